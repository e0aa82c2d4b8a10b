"""Errors a user can meet: one clear sentence each, and the exit code that goes with it."""

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class FedprotipError(Exception):
    """Something the user can understand and mend. Shown as one sentence, never as a traceback."""

    exit_code = 1


class UsageError(FedprotipError):
    """The request itself is wrong: an unknown key, an impossible value, a missing file."""

    exit_code = 2


class UnknownName(UsageError):
    """A setting names a method, a model or a dataset that nobody here has registered."""

    def __init__(self, key: str, name: str, text: str) -> None:
        super().__init__(text)
        self.key, self.name = key, name


class RunError(FedprotipError):
    """The request was fine and the run failed: no space left, every client failed, a damaged folder."""

    exit_code = 1


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, and all of them when they are few; the end of a sentence."""
    names, word = sorted(known), shortened(word)
    many = len(names) > 20
    same = [name for name in names if name.lower() == word.lower()]
    close = same or get_close_matches(word, names, n=1, cutoff=0.0 if many else 0.5)
    if many:
        return f"did you mean {close[0]!r}"
    listed = ", ".join(names) if names else "none"
    return f"did you mean {close[0]!r} (known: {listed})" if close else f"known: {listed}"


def looked_for(path: str) -> str:
    """Where a relative path was looked for, as the end of a sentence; of an absolute one that is clear."""
    return "" if os.path.isabs(path) else f" (it was looked for in {os.getcwd()})"


def shortened(text: str, most: int = 200) -> str:
    """A text that may come from anywhere, cut to what belongs into a sentence.

    >>> shortened("abcdef", most=4)
    'abc…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are.

    >>> listed(["ant", "bee", "cat"], most=2)
    'ant, bee and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
