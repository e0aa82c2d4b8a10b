"""A grid whose nodes are programs of sites in this process: all of a deployment but for Flower's own processes."""

import time
from dataclasses import dataclass
from typing import Any

import flwr.app
from flwr.supercore.task_identity import TaskIdentity

from fedprotip.envelopes import Envelope


@dataclass
class Node:
    node_id: int
    public_key: bytes
    program: Any
    gone: bool = False
    answered: int = 0


class LoopGrid:
    """`change(node, envelope)` may replace what a node answers; a node that is gone gives Flower's error 5.

    As with Flower, an answer that nobody has taken in time is gone: error 3.
    """

    def __init__(self, change=lambda node, envelope: envelope):
        self.nodes, self._change, self._waiting, self._count = [], change, {}, 0
        for part in ("task_id", "run_id", "node_id"):  # as in a process that Flower has started
            setattr(TaskIdentity, part, 1)

    def join(self, program, key=b""):
        self.nodes.append(Node(1000 + len(self.nodes), key, program))
        return self.nodes[-1]

    def get_nodes(self):
        return [node for node in self.nodes if not node.gone]

    def push_messages(self, messages):
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = f"m{self._count}"
            self._waiting[f"m{self._count}"] = message, time.monotonic() + message.metadata.ttl
            yield f"m{self._count}"

    def pull_messages(self, names):
        return [self._answer(*self._waiting.pop(name)) for name in names]

    def _answer(self, message, until):
        node = next(node for node in self.nodes if node.node_id == message.metadata.dst_node_id)
        if node.gone:
            return flwr.app.Message(flwr.app.Error(code=5, reason="no heartbeat"), reply_to=message)
        if time.monotonic() > until:
            return flwr.app.Message(flwr.app.Error(code=3, reason="expired"), reply_to=message)
        sent = Envelope.of(message.content)
        answer = node.program.answer(Envelope({**sent.head, "type": message.metadata.message_type}, sent.parts))
        node.answered += 1
        return flwr.app.Message(self._change(node, answer).records(), reply_to=message)
