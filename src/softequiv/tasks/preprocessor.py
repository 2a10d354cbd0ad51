"""What does the file beside a model of transformers say about its pictures? Their side, their normalisation; a file
that prepares no picture is refused with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from softequiv._files import read_json
from softequiv.adapt.opening import PREPROCESSOR
from softequiv.errors import SoftEquivError
from softequiv.tasks.decoding import BILINEAR
from softequiv.tasks.files import Normalised

LARGEST = 1e6  # of a mean, deviation or factor, and the inverse of the least: others overflow, or are damaged
RESAMPLINGS = 6  # ways of pillow to resample, numbered from 0
BYTE = 1 / 255  # by which bytes are multiplied where a file does not say otherwise

Settings = Mapping[str, Any]


def preprocessor_of(model: nn.Module) -> Path:
    """Where the preprocessor file of a model of transformers would lie."""
    return Path(str(getattr(getattr(model, "config", None), "name_or_path", ""))) / PREPROCESSOR


def read_preprocessor(path: Path) -> dict[str, Any]:
    """What a preprocessor file says, nothing where there is none; figures that prepare no picture are refused."""
    if not path.is_file():
        return {}
    try:
        told = read_json(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise SoftEquivError(f"{path} is not JSON: {problem}; copy it again") from problem
    if not isinstance(told, dict):
        raise SoftEquivError(f"{path} holds no settings but {type(told).__name__}; copy it again")
    told = {name: value for name, value in told.items() if value is not None}
    mean, std = told.get("image_mean", [0.0]), told.get("image_std", [1.0] * 3)
    for name, values in (("image_mean", mean), ("image_std", std)):
        if not isinstance(values, list) or not values or not all(_usual(value) for value in values):
            raise SoftEquivError(
                f"{path}: {name} is {values!r}, and should be a list of numbers of at most {LARGEST:g}; correct it"
            )
    if min(std) < 1 / LARGEST or ("image_mean" in told and "image_std" in told and len(mean) != len(std)):
        raise SoftEquivError(
            f"{path}: image_std {std} are not the positive deviations for image_mean {mean}; correct it"
        )
    factor = told.get("rescale_factor", BYTE)
    if not _usual(factor) or factor < 1 / LARGEST:
        raise SoftEquivError(
            f"{path}: rescale_factor is {factor!r}, and should be a positive number such as 1/255; correct it"
        )
    if told.get("resample", BILINEAR) not in range(RESAMPLINGS):
        raise SoftEquivError(
            f"{path}: resample is {told['resample']!r}, and pillow numbers its ways from 0 to 5; correct it"
        )
    return told


def normalisation(settings: Settings, path: Path, channels: int) -> Normalised:
    """How the settings of a file normalise bytes: (factor x - mean) / std is (x / 255 - mean / c) / (std / c) with
    c = 255 factor.

    >>> normalisation({"image_mean": [0.5], "image_std": [0.25]}, Path("file"), 3)
    Normalised(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), pad=0)
    """
    mean: Sequence[float] = [0.0]
    std: Sequence[float] = [1.0]
    if settings.get("do_normalize", True):
        if "image_mean" not in settings or "image_std" not in settings:
            raise SoftEquivError(f"{path} does not say how it normalises; write image_mean and image_std into it")
        mean, std = settings["image_mean"], settings["image_std"]
    if len(mean) not in (1, channels):
        raise SoftEquivError(
            f"{path} normalises {len(mean)} channels and the model takes {channels}; correct that file"
        )
    factor = settings.get("rescale_factor", BYTE) if settings.get("do_rescale", True) else 1.0
    every = channels if len(mean) == 1 else 1
    scaled = [tuple(value / (255 * factor) for value in values) * every for values in (mean, std)]
    return Normalised(scaled[0], scaled[1])


def frame(settings: Settings, path: Path) -> tuple[int | None, int | None]:
    """The side of the squares that settings ask for, and the shorter side of the scaled pictures they are cut from.

    >>> frame({"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": 24}, Path("file"))
    (24, 32)
    """
    scaled = _side(settings.get("size"), path) if settings.get("do_resize", True) else None
    cut = _side(settings.get("crop_size"), path) if settings.get("do_center_crop") else None
    return cut or scaled, scaled or cut


def _side(entry: Any, path: Path) -> int | None:
    """A number, or a height, or a shortest edge."""
    if isinstance(entry, Mapping):
        entry = entry.get("height") or entry.get("shortest_edge")
    if entry and (type(entry) is not int or entry < 1):
        raise SoftEquivError(f"{path}: the side of pictures is {entry!r}, and should be a number of pixels; correct it")
    return entry or None


def _usual(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
