"""What is wrong with settings, as one sentence: the key, its value, what would be valid."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedprotip.errors import nearest, shortened
from fedprotip.settings.schema import Settings, method_class


def sentence(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """The first problem of a ValidationError as one sentence: key, value, what would be valid."""
    problems = error.errors()
    same_key = [problem for problem in problems if problem["loc"][:2] == problems[0]["loc"][:2]]
    # of several types the one that came furthest
    problem = max(same_key, key=lambda problem: (len(problem["loc"]), problem["type"] == "finite_number"))
    path = [str(part) for part in problem["loc"]]
    if error.title != "Settings":  # raised by a method's own class, which sees only its section
        path = ["method", *path]
    section, field = path[0], path[1] if len(path) > 1 else ""
    key = shortened(f"{section}.{field}" if field else section)
    context = problem.get("ctx", {})
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        table = not field and isinstance(problem["input"], Mapping)
        return f"{key} is not a setting; {nearest(key, Settings.model_fields if table else _all_keys(raw))}."
    if not field and problem["type"] == "value_error":  # several settings of a section do not fit together
        return f"{section}.{problem['msg'].removeprefix('Value error, ').rstrip('.')}."
    if not field:
        return f"{section} = {shortened(repr(problem['input']))} must be a table of settings."
    value = raw.get(section, {}).get(field)
    shown = f"{key} = {shortened(repr(value))}"
    if problem["type"] == "literal_error":
        choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        return f"{shown} is not a choice; {nearest(str(value), choices)}."
    reason = problem["msg"].removeprefix("Value error, ").replace("Input ", "it ", 1).rstrip(".")
    words = {"ge": "", "le": "", "gt": "just above ", "lt": "just below "}
    limit = next((f"{word}{context[name]}" for name, word in words.items() if name in context), "")
    return f"{shown}: {reason}" + (f"; the nearest valid value is {limit}." if limit else ".")


def _all_keys(raw: Mapping[str, Any]) -> list[str]:
    keys = []
    for name in Settings.model_fields:
        chosen = raw.get(name)
        cls = type(getattr(Settings(), name))
        if name == "method" and isinstance(chosen, Mapping):
            cls = method_class(str(chosen.get("name", "fedprotip")))
        keys += [f"{name}.{key}" for key in cls.model_fields]
    return keys
