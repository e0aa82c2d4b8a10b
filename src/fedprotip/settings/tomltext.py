"""TOML: reading a file, one value of it, and writing a value."""

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

from fedprotip.errors import UsageError

DATA = (".csv", ".npz", ".parquet")
"""Names of files that hold samples, not settings."""
LONGEST = 2**22
"""Characters of a file of settings."""
DEEPEST = 20
"""Parts of a dotted key: what a parser remembers of them grows with their square."""
_QUOTED = re.compile(r"""#[^\n]*|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'""", re.DOTALL)
_DEEP = re.compile(r"(?:\.[^.,=\[\]{}\n]*){" + str(DEEPEST) + "}")


def loads(text: str) -> dict[str, Any]:
    """TOML that may be a stranger's; a ValueError where it is none, or none that can be read in bounded memory."""
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text):,} characters, more than {LONGEST:,}")
    if _DEEP.search(_QUOTED.sub("_", text)):
        raise ValueError(f"it has a key of more than {DEEPEST} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(path: Path) -> dict[str, Any]:
    if path.is_dir() or path.suffix.lower() in DATA:
        raise UsageError(f"{path} is no settings file; to learn from images there: --set data.source={path}.")
    try:
        with path.open(encoding="utf-8") as file:
            return loads(file.read(LONGEST + 1))
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file in UTF-8.") from None
    except ValueError as error:  # mostly TOMLDecodeError
        raise UsageError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise UsageError(f"Cannot read the settings file {path}: {error.strerror}.") from None


def parse(text: str) -> Any:
    """A TOML value; anything else, dates and lines of their own included, is a string as it stands."""
    try:
        table = loads(f"value = {text}")
    except ValueError:
        return text
    return text if len(table) > 1 or isinstance(table["value"], date | time) else table["value"]


def as_text(text: str) -> str:
    """A string as `--set` takes it: as it stands, unless it would be read as a number or a table."""
    return text if parse(text) == text == text.strip() else write(text)


def write(value: Any) -> str:
    """A value as TOML text; tables and lists on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{write(str(k))} = {write(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(write(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON leaves it, TOML forbids it
    return repr(value)
