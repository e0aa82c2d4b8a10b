"""Folders of the user's own images: one per class, and maybe one per task or client around them.

Which folder means what is said by `data.folders`. Where it is not said, folders within folders are refused with the
choice: a class with parts, a domain with classes and a site with classes all look alike.
"""

from collections.abc import Sequence
from pathlib import Path

from fedprotip.errors import UsageError, shortened
from fedprotip.stream.images import SUFFIXES, is_image, is_no_image

PARTS = ("train", "test")
VALIDATION = ("val", "valid", "validation")
"""How others call a part that may be for testing."""
LEFT_BEHIND = ("__MACOSX",)
"""Folders that programs leave beside those that were meant."""
NAMED = 4
"""Folders that a sentence names; the others are dots."""
Sample = dict[str, str]
"""What folders say about an image: its path, its label, and maybe task, client and split."""


def read_tree(folder: Path, folders: str) -> tuple[list[Sample], list[str]]:
    """The images below a folder, or below `train` and `test` in it, and sentences about what is not used."""
    within = _folders(folder)
    parts = {path.name.lower(): path for path in within if path.name.lower() in PARTS}
    others = [path.name for path in within if path not in parts.values()]
    if len(parts) == 1 and folders != "class":
        (here,) = parts.values()
        other = next((name for name in others if name.lower() in VALIDATION), "")
        rename = f" (rename {other!r}, if that is what it is)" if other else ""
        raise UsageError(
            f"{folder} has a folder {here.name!r} only; it needs 'train' and 'test'{rename}, or data.folders = 'class' "
            "where it is a class."
        )
    if len(parts) < 2:
        return _read_levels(folder, folders), _beside(folder)
    samples = [sample | {"split": part} for part in PARTS for sample in _read_levels(parts[part], folders)]
    notes = [f"{folder}: only train and test are used, not {_listed(others)}."] if others else []
    return samples, [*notes, *_beside(folder), *(note for part in PARTS for note in _beside(parts[part]))]


def _read_levels(folder: Path, folders: str) -> list[Sample]:
    """Images below folders that mean what `data.folders` says."""
    level, _, rest = folders.partition("/")
    if not rest:
        samples = _read_classes(folder)
        if folders == "auto":
            _refuse_layers(folder, samples)
        return samples
    within = _folders(folder)
    if not within:
        raise UsageError(f"{folder} has no folders; data.folders asks for one per {level}.")
    loose = next(filter(is_image, sorted(folder.iterdir())), None)
    if loose is not None:
        raise UsageError(f"{loose} lies where data.folders asks for a folder per {level}; move or remove it.")
    return [sample | {level: one.name} for one in within for sample in _read_levels(one, rest)]


def _read_classes(folder: Path) -> list[Sample]:
    """Images of a folder per class, however deep they lie in it."""
    samples: list[Sample] = []
    root = folder.resolve()
    places = dict.fromkeys((root, *root.parents), folder)
    for one in _folders(folder):
        same = places.setdefault(one.resolve(), one)
        if same is not one:
            raise UsageError(f"Class {one.name!r} is a link to where {same} is: its images would have two labels.")
        entries = sorted(one.rglob("*"))
        wrong = next(filter(is_no_image, entries), None)
        if wrong is not None:
            raise UsageError(f"{wrong} is called an image but is no file (a link to nothing, a device); remove it.")
        found = sorted(str(path) for path in entries if is_image(path))
        if not found:
            kinds = ", ".join(SUFFIXES)
            raise UsageError(
                f"Class {one.name!r} is empty: {one} holds no images ({kinds}); put some there, or remove the folder."
            )
        samples += [{"path": path, "label": one.name} for path in found]
    if not samples:
        raise UsageError(f"{folder} has no class folders; images belong into one folder per class.")
    return samples


def _refuse_layers(folder: Path, samples: Sequence[Sample]) -> None:
    """Images that all lie in folders within folders: the outer ones may be classes, tasks or clients."""
    inner: dict[str, set[str]] = {}
    for sample in samples:
        within = Path(sample["path"]).relative_to(folder / sample["label"]).parts
        if len(within) == 1:
            return
        inner.setdefault(sample["label"], set()).add(within[0])
    names = set().union(*inner.values())
    if len(names) == 1 and len(inner) > 1:
        return  # as in Tiny ImageNet, where all images of a class lie in a folder images
    outer = _listed(sorted(inner))
    if {name.lower() for name in names} <= {*PARTS, *VALIDATION}:
        raise UsageError(
            f"{folder} has {_listed(sorted(names))} within {outer}; "
            "put folders train and test first, and the classes into both."
        )
    alike = "the same folders" if all(found == names for found in inner.values()) and len(inner) > 1 else "folders"
    raise UsageError(
        f"{folder} has {alike} ({_listed(sorted(names))}) within its folders ({outer}); say what the outer ones are by "
        "data.folders = 'task/class' (tasks or domains), 'client/class' (sites) or 'class' (they are the classes)."
    )


def _beside(folder: Path) -> list[str]:
    loose = sum(map(is_image, folder.iterdir()))
    return [f"{folder}: {loose} images lie beside the folders and are not used."] if loose else []


def _folders(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in LEFT_BEHIND
    )


def _listed(names: Sequence[str]) -> str:
    return shortened(", ".join(names[:NAMED])) + (", …" if len(names) > NAMED else "")
