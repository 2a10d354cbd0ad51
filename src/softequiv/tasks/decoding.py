"""How does a picture file become pixels? It is decoded by pillow, cut to a square, and kept as bytes.

A file that is no picture is named in a sentence.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor

from softequiv.errors import SoftEquivError, imported

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")  # of pillow; others would start programs (Ghostscript)
LARGEST = 178_956_970  # pixels of a picture, as pillow has it
MODES = {1: "L", 3: "RGB"}
DEEP = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # modes of pillow with more than a byte a pixel
DAMAGED = (OSError, ValueError, KeyError, SyntaxError, TypeError, struct.error)  # what pillow raises then
NEAREST, BILINEAR, BICUBIC = 0, 2, 3  # pillow's numbers, as preprocessor files have them
ATTEMPTS = 10  # to find a rectangle inside the picture, as torchvision has it


def is_picture(path: Path) -> bool:
    """Whether the name is that of a picture."""
    return path.suffix.lower() in ENDINGS and path.is_file()


def pictures_below(folder: Path) -> list[Path]:
    """Every picture in a folder and its folders, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if is_picture(path))


def check_side(size: int) -> None:
    """Raise a sentence where the side of pictures is none."""
    if type(size) is not int or size < 1 or size * size > LARGEST:
        raise SoftEquivError(f"the side of pictures is a whole number of pixels, such as 224; got {size!r}")


def check_pillow() -> None:
    """Raise a sentence where pillow is absent."""
    imported("PIL", "reading pictures needs pillow", "images")


def decoded(path: Path, mode: str | None = None) -> Any:
    """The picture of a file as it is shown, converted to a mode of pillow, or in its own; a file that is none is
    named."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=FORMATS) as file:
            file.load()
            if mode and file.mode in DEEP:  # pillow would cut off what a byte cannot hold
                raise ValueError(f"its pixels are more than bytes, mode {file.mode}; convert them to 8 bits")
            upright = ImageOps.exif_transpose(file)  # cameras store which side is up
            return upright.convert(mode) if mode else upright
    except FileNotFoundError:
        raise SoftEquivError(f"there is no picture {path}; copy it there, or take its name off the list") from None
    except (*DAMAGED, Image.DecompressionBombError) as problem:
        raise SoftEquivError(
            f"{path} cannot be read as a picture ({problem}); copy it again, or take it away"
        ) from problem


def pixels(picture: Any) -> Tensor:
    """A picture of pillow as bytes, (C, H, W) uint8."""
    values = numpy.asarray(picture, dtype=numpy.uint8)
    return torch.from_numpy(values.reshape(*values.shape[:2], -1).transpose(2, 0, 1).copy())


def middle(picture: Any, size: int, shorter: int, resample: int = BILINEAR) -> Any:
    """The shorter side becomes so many pixels, and the middle square of size x size is cut out; black is around it
    where it is larger. Rounded as transformers does."""
    width, height = (shorter * side // min(picture.size) for side in picture.size)
    if width * height > LARGEST:
        raise SoftEquivError(
            f"a picture of {picture.size[0]} x {picture.size[1]} pixels is too narrow: with its shorter side scaled it "
            f"would have {width} x {height}; cut it, or take it away"
        )
    left, top = (width - size) // 2, (height - size) // 2
    return picture.resize((width, height), resample).crop((left, top, left + size, top + size))


def anywhere(picture: Any, size: int, random: Random, *, area: tuple[float, float] = (0.08, 1.0)) -> Any:
    """A random rectangle resized to a square, flipped half of the time: area uniform, log of width / height uniform.

    Szegedy et al. 2015, "Going deeper with convolutions"; where no rectangle fits, the middle square.
    """
    width, height = picture.size
    for _ in range(ATTEMPTS):
        wanted = width * height * random.uniform(*area)
        shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(wanted * shape)), round(math.sqrt(wanted / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            found = picture.resize((size, size), BILINEAR, box=(left, top, left + w, top + h))
            break
    else:
        found = middle(picture, size, size)
    return found.transpose(0) if random.random() < 0.5 else found  # pillow's number 0: left to right
