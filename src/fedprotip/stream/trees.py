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
LEFT_BEHIND = ("__MACOSX", "Thumbs.db", "desktop.ini")
"""What programs leave beside what was meant; so is what has a dot before its name."""
NAMED = 4
"""Folders or files that a sentence names; the others are dots."""
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
    left: list[Path] = []
    if len(parts) < 2:
        samples = _read_levels(folder, folders, left)
        return samples, [*_beside(folder), *_unread(folder, left)]
    samples = [sample | {"split": part} for part in PARTS for sample in _read_levels(parts[part], folders, left)]
    notes = [f"{folder}: only train and test are used, not {_listed(others)}."] if others else []
    notes += [note for one in (folder, *(parts[part] for part in PARTS)) for note in _beside(one)]
    return samples, [*notes, *_unread(folder, [*_loose(folder), *left])]


def _read_levels(folder: Path, folders: str, left: list[Path]) -> list[Sample]:
    """Images below folders that mean what `data.folders` says; what is not read is added to `left`."""
    level, _, rest = folders.partition("/")
    left += _loose(folder)
    if not rest:
        samples = _read_classes(folder, left)
        if folders == "auto":
            _refuse_layers(folder, samples)
        return samples
    within = _folders(folder)
    if not within:
        raise UsageError(f"{folder} has no folders; data.folders asks for one per {level}.")
    loose = next(filter(is_image, sorted(folder.iterdir())), None)
    if loose is not None:
        raise UsageError(f"{loose} lies where data.folders asks for a folder per {level}; move or remove it.")
    return [sample | {level: one.name} for one in within for sample in _read_levels(one, rest, left)]


def _read_classes(folder: Path, left: list[Path]) -> list[Sample]:
    """Images of a folder per class, however deep they lie in it."""
    samples: list[Sample] = []
    root = folder.resolve()
    places = dict.fromkeys((root, *root.parents), folder)
    for one in _folders(folder):
        same = places.setdefault(one.resolve(), one)
        if same is not one:
            raise UsageError(f"Class {one.name!r} is a link to where {same} is: its images would have two labels.")
        entries, aside = _within(one)
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
        left += [*aside, *(path for path in entries if not is_image(path))]
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


def _within(folder: Path) -> tuple[list[Path], list[Path]]:
    """What lies in a folder, however deep, and the folders in it that are not looked into: hidden ones, and links."""
    entries, aside, ahead = [], [], [folder]
    while ahead:
        for path in ahead.pop().iterdir():
            if not path.is_dir():
                entries += [path] if _is_meant(path) else []
            elif path.is_symlink() or not _is_meant(path):
                aside.append(path)
            else:
                ahead.append(path)
    return sorted(entries), aside


def _loose(folder: Path) -> list[Path]:
    """What lies beside the folders of a folder, and hidden folders; `_beside` tells of images."""
    return [path for path in folder.iterdir() if not (_is_meant(path) and path.is_dir()) and not is_image(path)]


def _unread(folder: Path, left: Sequence[Path]) -> list[str]:
    """Files that somebody may believe to be read, and folders with images that are not looked into."""
    files = sorted(str(path.relative_to(folder)) for path in left if _is_meant(path) and not path.is_dir())
    folders = sorted(str(path.relative_to(folder)) for path in left if path.is_dir() and _holds_images(path))
    kinds = ", ".join(SUFFIXES)
    told = (
        [f"{folder}: files that are not read: {len(files)} ({_listed(files)}); images end in {kinds}."] if files else []
    )
    if folders:
        told.append(f"{folder}: hidden folders, or links, whose images are not read: {_listed(folders)}.")
    return told


def _holds_images(folder: Path) -> bool:
    """Links count as if they did: they may lead anywhere."""
    return folder.is_symlink() or (folder.name not in LEFT_BEHIND and any(map(is_image, folder.rglob("*"))))


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and _is_meant(path))


def _is_meant(path: Path) -> bool:
    return not path.name.startswith(".") and path.name not in LEFT_BEHIND


def _listed(names: Sequence[str]) -> str:
    return shortened(", ".join(names[:NAMED])) + (", …" if len(names) > NAMED else "")
