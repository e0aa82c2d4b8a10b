"""What a client asks of every plan before it takes part: the server states the settings, so it must not lower them."""

from dataclasses import dataclass

from fedprotip.messages import BadMessage
from fedprotip.settings import MethodSettings


@dataclass(frozen=True)
class Demands:
    """Of the settings that protect a client from the server."""

    secure: bool = False
    share: float = 0.0  # of `method.secure_share`, at least
    noise: float = 0.0  # of `method.secure_noise`, at least

    @classmethod
    def of(cls, told: MethodSettings) -> "Demands":
        """What a run began with stays for all of it."""
        return cls(told.secure, told.secure_share, told.secure_noise) if told.secure else NONE

    def check(self, told: MethodSettings, whose: str) -> None:
        """BadMessage where a plan promises less; `whose`: who asks for more."""
        if not self.secure:
            return
        if not told.secure:
            raise BadMessage(f"the plan has method.secure = false, {whose} has true, so this client takes no part")
        asked = (("secure_share", told.secure_share, self.share), ("secure_noise", told.secure_noise, self.noise))
        for name, value, least in asked:
            if value < least:
                said = f"the plan has method.{name} = {value:g}, {whose} has at least {least:g}"
                raise BadMessage(f"{said}, so this client takes no part")


NONE = Demands()
"""Of a client that takes any plan."""
