"""Replies that are none, to any question."""

import json

import torch

from benchmarks.hostile.door import (
    EVERY,
    LONG,
    PRESENCE,
    Change,
    Said,
    Scene,
    attack,
    called,
    each,
    raw,
    several,
    times,
    told,
    with_tensors,
)
from fedprotip.federation.parcels import LOST
from fedprotip.messages import Message


def nested(depth: int) -> Change:
    """Metadata of lists within lists; the numbers that are asked for are there too."""

    def change(message: Message, scene: Scene) -> Said:
        rest = json.dumps(message.meta)[1:-1]
        return raw(message, "{" + rest + (", " if rest else "") + '"deep": ' + "[" * depth + "]" * depth + "}")

    return change


def raising(text: str) -> Change:
    def change(message: Message, scene: Scene) -> Said:
        raise RuntimeError(text)

    return change


several(
    EVERY,
    "A reply with more or other than was asked for",
    {
        "lost_again_and_again": called(LOST),
        "meta_10_MB": told({"more": "x" * 10_000_000}),
        "meta_10_000_entries": told({f"key {i}": [i] for i in range(10_000)}),
        "meta_nested_400": nested(400),
        "meta_nested_900": nested(900),
        "meta_nested_970": nested(970),
        "meta_infinity": told(
            {"loss": float("inf"), "samples": float("inf"), "withheld": float("inf"), "rest": float("inf")}
        ),
        "meta_texts": told(dict.fromkeys(("loss", "samples", "withheld", "rest"), "text")),
        "meta_lists": told({key: [[]] for key in ("loss", "samples", "withheld", "rest")}),
        "meta_nothing": told(dict.fromkeys(("loss", "samples", "withheld", "rest"))),
        "everything_nan": times(torch.nan),
        "everything_largest": lambda m, s: each(m, lambda t: torch.full_like(t, torch.finfo(t.dtype).max)),
        "integers_largest": lambda m, s: with_tensors(
            m, {n: t if t.is_floating_point() else torch.full_like(t, 2**63 - 1) for n, t in m.tensors.items()}
        ),
    },
)
several(
    EVERY,
    "Every number is zero",
    {"everything_zero": lambda m, s: with_tensors(m, {n: torch.zeros_like(t) for n, t in m.tensors.items()})},
    needs_robust=True,
)
several(
    EVERY,
    "No reply to this question",
    {
        "kind_of_100_kB": called("k" * LONG),
        "kind_empty": called(""),
        "kind_strange": called("\x1b[31m\u202e😀\n" * 100),
        "kind_plan": called("plan"),
        "damaged_bytes": lambda m, s: m.to_bytes()[:-3],
        "no_bytes": lambda m, s: b"",
        "bytes_of_noise": lambda m, s: bytes(range(256)) * 40,
        "meta_list": lambda m, s: raw(m, "[1, 2]"),
        "meta_nested_100000": nested(100_000),
        "raises": raising("the disk of this client is full"),
        "raises_1_MB": raising("e" * 1_000_000),
        "raises_strange_text": raising("\x1b[2J\u202e😀\n\x00" * 1000),
    },
    refused=True,
)


@attack(*EVERY)
def lost_with_deep_metadata(message: Message, scene: Scene) -> Said:
    """It has lost everything, and says so in lists within lists."""
    return raw(Message(LOST), '{"deep": ' + "[" * 900 + "]" * 900 + "}")


@attack(*EVERY)
def answers_of_other_questions(message: Message, scene: Scene) -> Said:
    """The last reply to another question, as it was."""
    others = [past[-1] for name, past in scene.past.items() if name not in (scene.ask.exchange, PRESENCE)]
    return others[scene.ask.step % len(others)] if others else message


@attack(*EVERY)
def answers_under_another_name(message: Message, scene: Scene) -> Said:
    """The last reply to another question, called what was asked for."""
    others = [past[-1] for name, past in scene.past.items() if name not in (scene.ask.exchange, PRESENCE)]
    other = others[scene.ask.step % len(others)] if others else message
    return Message(message.kind, other.tensors, other.meta)


@attack(*EVERY, needs_robust=True)
def answers_of_the_first_task(message: Message, scene: Scene) -> Said:
    """Its first reply of every kind, again and again."""
    return scene.past[scene.ask.exchange][0]
