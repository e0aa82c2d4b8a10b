"""Settings from a TOML file, a mapping and `--set key=value`, and settings as TOML."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedprotip.errors import UsageError, nearest, shortened
from fedprotip.settings import places, tomltext
from fedprotip.settings.names import declared, known, load_offered
from fedprotip.settings.refusals import sentence
from fedprotip.settings.schema import HUGE, MANY, Section, Settings, method_class

PRESETS = ("paper",)
"""Files in `configs/` that `--preset` names."""


def load(
    source: Settings | Mapping[str, Any] | str | Path | None = None,
    overrides: Iterable[str] = (),
    note: Callable[[str], None] = lambda text: None,
    preset: str = "",
) -> Settings:
    """Settings from a TOML file, a mapping or defaults, with `key=value` overrides on top.

    Args:
        source: path of a TOML file, a nested mapping, ready Settings, or None for the defaults.
        overrides: assignments such as "train.rounds=5"; values are TOML, bare words are strings.
        note: told what was read into settings that were left out, and which were left aside.
        preset: name of settings that come with the package and lie below all others.
    """
    if isinstance(source, Settings):
        raw = source.model_dump(exclude_unset=True)  # defaults depend on the method: they are filled in again
    elif isinstance(source, Mapping):
        raw = {key: dict(value) if isinstance(value, Mapping) else value for key, value in source.items()}
    else:
        raw = places.joined(tomltext.read(Path(source)), Path(source).parent) if source is not None else {}
    for assignment in overrides:
        _assign(raw, assignment)
    if preset:
        raw = layered(preset_settings(preset, raw.get("method", {}).get("name", "fedprotip")), raw)
    _take_former_names(raw)
    _name_own_data(raw, note)
    _set_aside_foreign_options(raw, note)
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        raise UsageError(sentence(error, raw)) from None
    _refuse_what_toml_cannot_hold(settings)
    _refuse_absurd_numbers(settings)
    for key, value in (("data.name", settings.data.name), ("model.name", settings.model.name)):
        known(key, value)
    return settings


def preset_settings(name: str, method: str) -> dict[str, dict[str, Any]]:
    """Settings that come with the package, such as "paper", as far as this method has them."""
    if name not in PRESETS:
        raise UsageError(f"--preset {shortened(name)!r} is unknown; {nearest(name, PRESETS)}.")
    text = (files("fedprotip") / "configs" / f"{name}.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)
    return found if method == "fedprotip" else {key: part for key, part in found.items() if key != "method"}


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, later layers on top."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, values in layer.items():
            both = isinstance(values, Mapping) and isinstance(merged.get(section, {}), Mapping)
            merged[section] = {**merged.get(section, {}), **values} if both else values
    return merged


def relocated(settings: Settings, overrides: Iterable[str], folder: Path) -> Settings:
    """The settings of a run folder, with its data elsewhere; any other change is refused."""
    given = list(overrides)
    keys = [assignment.partition("=")[0].strip() for assignment in given]
    for key in keys:
        if key not in ("data.root", "data.source"):
            raise UsageError(
                f"--set {shortened(key)}: a run that has begun can only be told where its data is now, by data.source "
                "or data.root; for anything else start another run."
            )
    moved = places.seen_from(load({}, given), folder).data.model_dump()
    new = {key.partition(".")[2]: moved[key.partition(".")[2]] for key in keys}
    return settings.model_copy(update={"data": settings.data.model_copy(update=new)})


def to_toml(settings: Settings, documented: bool = False) -> str:
    """The settings as TOML; with `documented`, each key stands below its documentation."""
    blocks = []
    for name in Settings.model_fields:
        section: Section = getattr(settings, name)
        lines = [f"[{name}]"]
        for key, field in type(section).model_fields.items():
            if documented:
                lines += ["", f"# {field.description}", *_constraint_comment(field)]
            lines.append(f"{key} = {tomltext.write(getattr(section, key))}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def documentation() -> list[dict[str, Any]]:
    """Every setting: key, default, documentation, and for which method it exists (empty: all)."""
    rows = []
    sections: list[tuple[str, type[Section], str]] = [
        (name, type(getattr(Settings(), name)), "") for name in Settings.model_fields if name != "method"
    ]
    sections += [("method", cls, method) for method, cls in sorted(declared("method.name").items())]
    for name, cls, method in sections:
        for key, field in cls.model_fields.items():
            default = field.get_default(call_default_factory=True)
            rows.append({"key": f"{name}.{key}", "default": default, "doc": field.description, "method": method})
    return rows


def _refuse_what_toml_cannot_hold(settings: Settings) -> None:
    """Half a character (a file name that is not UTF-8) could not be saved with the run."""
    for section in Settings.model_fields:
        for key, value in getattr(settings, section):
            try:
                tomltext.write(value).encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"{section}.{key} = {shortened(repr(value))} is not text in UTF-8; rename it."
                ) from None


def _refuse_absurd_numbers(settings: Settings) -> None:
    """Numbers without an upper bound of their own have a common one; so has a setting that is added later."""
    for section in Settings.model_fields:
        table: Section = getattr(settings, section)
        for key, field in type(table).model_fields.items():
            bounded = any(hasattr(bound, "le") or hasattr(bound, "lt") for bound in field.metadata)
            for number in () if bounded else _numbers(getattr(table, key)):
                most = MANY if isinstance(number, int) else HUGE
                if abs(number) > most:
                    raise UsageError(
                        f"{section}.{key} = {shortened(repr(number))} is more than a run can have; "
                        f"the nearest valid value is {most}."
                    )


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(one)


def _assign(raw: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    section, _, field = key.strip().partition(".")
    if not equals or not section or not field:
        raise UsageError(
            f"--set {shortened(assignment)!r} is not of the form section.key=value, such as train.rounds=5."
        )
    value = tomltext.parse(text.strip())
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        raise UsageError(f"{section} = {shortened(repr(table))} must be a table of settings.")
    table[field] = value


def _take_former_names(raw: dict[str, Any]) -> None:
    """What files and run folders from before still say the old way.

    `clients.workers` became an engine. `method.images` is gone: no more images than columns were looked at anyway.
    """
    clients, run = raw.get("clients"), raw.get("run", {})
    if isinstance(clients, dict) and isinstance(run, dict) and isinstance(clients.get("workers"), int):
        workers = clients.pop("workers")
        raw["run"] = {"engine": "pool", "workers": workers} | run if workers else run
    method = raw.get("method")
    if isinstance(method, dict) and isinstance(method.get("images"), int):
        fields = method_class(str(method.get("name", "fedprotip"))).model_fields
        if "columns" in fields and "images" not in fields:
            method["columns"] = min(method.pop("images"), method.get("columns", fields["columns"].default))


def _name_own_data(raw: dict[str, Any], note: Callable[[str], None]) -> None:
    """Whoever names a source and no dataset means their own."""
    data = raw.get("data")
    if isinstance(data, dict) and data.get("source") and "name" not in data:
        data["name"] = "own"
        note(f"data.source = {shortened(repr(data['source']))}: data.name is 'own'.")


def _set_aside_foreign_options(raw: dict[str, Any], note: Callable[[str], None]) -> None:
    """Drop options that belong to other methods, so that one file can serve several methods."""
    method = raw.get("method")
    if not isinstance(method, dict):
        return
    name = str(method.get("name", "fedprotip"))
    others = [key for key in method if key not in method_class(name).model_fields]
    if any(key not in _options_of_methods() for key in others):
        load_offered("method.name")  # it may be one of theirs
    foreign = [key for key in others if key in _options_of_methods()]
    for key in foreign:
        del method[key]
    if foreign:
        note(f"{name!r} has no settings {', '.join(f'method.{key}' for key in foreign)}: left aside.")


def _options_of_methods() -> set[str]:
    return {field for cls in declared("method.name").values() for field in cls.model_fields}


def _constraint_comment(field: Any) -> list[str]:
    choices = getattr(field.annotation, "__args__", ())
    literal = [c for c in choices if isinstance(c, str)]
    return [f"# one of: {', '.join(literal)}"] if literal else []
