"""Options that several verbs have."""

import json
from typing import Annotated

import typer

from fedprotip import settings as settings_file


def _bring_in(modules: list[str] | None) -> list[str] | None:
    for module in modules or []:
        settings_file.bring_in(module)
    return modules


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; may be given again."),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        callback=_bring_in,
        help="A module, or a file such as mine.py, with methods, models or datasets of your own; may be given again.",
    ),
]
"""Its callback has imported them before the verb begins."""
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Curves for tensorboard or mlflow; may be given again."),
]


def with_tracking(overrides: list[str] | None, names: list[str] | None) -> list[str]:
    """Settings of the command line, the trackers among them."""
    return [*(overrides or []), *([f"run.track={json.dumps(names)}"] if names else [])]
