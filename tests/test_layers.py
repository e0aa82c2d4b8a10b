"""One way through the house: a file imports only what stands above it."""

import ast
from pathlib import Path

import pytest

import fedprotip

ROOT = Path(fedprotip.__file__).parent
ORDER = [
    *(
        "errors",
        "lazy",
        "seeds",
        "settings",
        "envelopes",
        "messages",
        "store",
        "subspace",
        "stream",
        "models",
        "inference",
        "serve",
        "methods",
    ),
    *("evaluation", "federation", "report", "watch", "track", "api", "cells", "flower", "paper", "cli"),
]
FILES = sorted(path for path in ROOT.rglob("*.py") if path not in (ROOT / "__init__.py", ROOT / "__main__.py"))


def layer_of(path, root=ROOT):
    return path.relative_to(root).parts[0].removesuffix(".py")


def imported_layers(source, package, known):
    """Layers that a source text imports; `package`: dotted parts of the package it stands in."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "fedprotip" else {module}
    parts = [name.split(".") for name in found]
    named = {part[1] for part in parts if part[0] == "fedprotip" and len(part) > 1}
    return {name if name in known else "fedprotip" for name in named} | {
        "fedprotip" for p in parts if p == ["fedprotip"]
    }


def test_every_file_has_a_place_in_the_order():
    assert {layer_of(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_what_stands_above(path):
    own = layer_of(path)
    package = ["fedprotip", *path.relative_to(ROOT).parts[:-1]]
    allowed = {*ORDER[: ORDER.index(own)], own}
    assert imported_layers(path.read_text(encoding="utf-8"), package, ORDER) <= allowed


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", set()),
        ("from fedprotip.errors import UsageError", {"errors"}),
        ("from fedprotip import settings as s", {"settings"}),
        ("from fedprotip import run", {"fedprotip"}),
        ("import fedprotip", {"fedprotip"}),
        ("import fedprotip.cli", {"cli"}),
        ("def f():\n    from fedprotip.api import run", {"api"}),
        ("from .basis import core_basis", {"subspace"}),
        ("from .. import cli", {"cli"}),
        ("from ..cli import main", {"cli"}),
    ],
)
def test_the_check_sees_every_form_of_import(source, expected):
    assert imported_layers(source, ["fedprotip", "subspace"], ORDER) == expected
