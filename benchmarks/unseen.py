"""Two sets of made-up images for which no default was ever chosen: letters in many fonts, and textures in colour.

python -m benchmarks.unseen FOLDER      # writes letters.npz and textures.npz
fedprotip compare --methods fedavg,lda,fedprotip --set data.source=FOLDER/letters.npz --set train.rounds=10
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

LETTERS, LETTER_SIDE = "ABCDEFGHIJKLMNOPQRST", 28
FONTS = ("DejaVuSans*", "DejaVuSerif*", "STIXGeneral*", "cmr10*", "cmss10*", "cmtt10*", "cmb10*")
TEXTURES, TEXTURE_SIDE = 12, 32
SEED = 5


def fonts() -> list[Path]:
    """Those that matplotlib brings along."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    found = sorted(path for name in FONTS for path in folder.glob(f"{name}.ttf"))
    return [path for path in found if "Display" not in path.name]


def letter(text: str, chance: np.random.Generator, faces: list[Path]) -> np.ndarray:
    """(28, 28): somewhere near the middle, turned, on a slope of grey with noise, and half of them inverted."""
    font = ImageFont.truetype(str(faces[chance.integers(len(faces))]), int(chance.integers(14, 24)))
    image = Image.new("L", (LETTER_SIDE, LETTER_SIDE))
    left, top, right, bottom = ImageDraw.Draw(image).textbbox((0, 0), text, font=font)
    x, y = LETTER_SIDE / 2 - np.array([left + right, top + bottom]) / 2 + 1.5 * chance.standard_normal(2)
    ImageDraw.Draw(image).text((x, y), text, fill=int(chance.integers(120, 255)), font=font)
    turned = image.rotate(15 * chance.standard_normal(), resample=Image.Resampling.BILINEAR)
    grid = np.arange(LETTER_SIDE)
    slope = np.add.outer(grid, grid) * chance.uniform(-1.5, 1.5)
    noise = chance.uniform(0, 40) * chance.standard_normal(slope.shape)
    pixels = np.clip(np.asarray(turned) + slope + noise, 0, 255).astype(np.uint8)
    return 255 - pixels if chance.random() < 0.5 else pixels


def texture(kind: int, chance: np.random.Generator) -> np.ndarray:
    """(32, 32, 3): waves, from the seventh kind on crossed ones, of a length that the kind says, in any colour."""
    y, x = np.mgrid[:TEXTURE_SIDE, :TEXTURE_SIDE]
    crossed, pace = kind >= TEXTURES // 2, 0.25 + 0.13 * (kind % (TEXTURES // 2))
    angle = chance.uniform(0, np.pi) if crossed else kind * np.pi / 6 + 0.1 * chance.standard_normal()
    waves = np.sin(pace * (x * np.cos(angle) + y * np.sin(angle)) + chance.uniform(0, 2 * np.pi))
    if crossed:
        waves *= np.sin(pace * (x * np.sin(angle) - y * np.cos(angle)) + chance.uniform(0, 2 * np.pi))
    colour = chance.uniform(0.2, 1, 3)
    noise = 30 * chance.standard_normal((TEXTURE_SIDE, TEXTURE_SIDE, 3))
    return np.clip(128 + 80 * waves[..., None] * colour + noise, 0, 255).astype(np.uint8)


def write(folder: Path, letters: tuple[int, int] = (250, 60), textures: tuple[int, int] = (200, 50)) -> None:
    """Both as NPZ, with so many images of a class for training and for tests."""
    chance, faces = np.random.default_rng(SEED), fonts()
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {}
    for part, count in zip(("train", "test"), letters, strict=True):
        parts[f"x_{part}"] = np.stack([letter(text, chance, faces) for text in LETTERS for _ in range(count)])
        parts[f"y_{part}"] = np.repeat(list(LETTERS), count)
    np.savez(folder / "letters.npz", **parts)
    for part, count in zip(("train", "test"), textures, strict=True):
        parts[f"x_{part}"] = np.stack([texture(kind, chance) for kind in range(TEXTURES) for _ in range(count)])
        parts[f"y_{part}"] = np.repeat(np.arange(TEXTURES), count)
    np.savez(folder / "textures.npz", **parts)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
