"""What Flower starts at a site for every message: it passes the message to the site's program, and the answer back.

That program holds data and model, so nothing heavy is imported here.
"""

import socket
from typing import Any

from fedprotip.envelopes import Envelope

PLACE = "socket"
"""Key of the node's configuration: where the site's program listens."""


def client_app() -> Any:
    """The ClientApp."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def passed_on(message: Any, context: Any) -> Any:
        envelope = Envelope.of(message.content)
        sent = Envelope({**envelope.head, "type": message.metadata.message_type}, envelope.parts)
        return Message(asked(str(context.node_config[PLACE]), sent).records(), reply_to=message)

    app.train("ask")(passed_on)
    app.query("hello")(passed_on)
    return app


def asked(place: str, envelope: Envelope) -> Envelope:
    """What the site's program answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        with connection.makefile("rwb") as stream:
            envelope.write(stream)
            return Envelope.read(stream)
