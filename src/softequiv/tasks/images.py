"""Which pictures are in this folder? They are read in batches, prepared as the model's own preprocessor says, with
classes from the names of sub-folders.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softequiv._files import read_json
from softequiv.adapt.opening import PREPROCESSOR, first_line
from softequiv.adapt.plan import config_size
from softequiv.errors import SoftEquivError
from softequiv.tasks.decoding import (
    BICUBIC,
    BILINEAR,
    ENDINGS,
    MODES,
    check_pillow,
    decoded,
    is_picture,
    middle,
    pictures_below,
    pixels,
)

LARGEST = 1e6  # of a mean or deviation of colours, and the inverse of the least: others overflow, or are damaged
RESAMPLINGS = 6  # ways of pillow to resample, numbered from 0
NAMES = {"bilinear": BILINEAR, "bicubic": BICUBIC}  # timm's words for pillow's numbers

Prepare = Callable[[Any], Tensor]  # a picture of pillow -> (C, H, W)


@dataclass(frozen=True)
class Images:
    """The pictures of a folder in batches: (N, C, H, W), with labels (N,) where they are known."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...] | None
    prepare: Prepare
    channels: int
    batch_size: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return -(-len(self.paths) // self.batch_size)

    def __iter__(self) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        for start in range(0, len(self.paths), self.batch_size):
            some = slice(start, start + self.batch_size)
            pictures = stacked(self.paths[some], [self.read(path) for path in self.paths[some]])
            yield pictures if self.labels is None else (pictures, torch.tensor(self.labels[some]))

    def read(self, path: Path) -> Tensor:
        """One picture as the model wants it."""
        return self.prepare(decoded(path, MODES[self.channels]))


def open_images(
    folder: Path, model: nn.Module, *, size: int | None = None, limit: int | None = None, seed: int = 0, batch: int = 32
) -> Images:
    """The pictures below a folder, as the model wants them; class folders are numbered in the order of their names, or
    by the model's own numbers where it knows all the names. With `limit`, so many of them, drawn at random.
    """
    if not folder.is_dir():
        raise SoftEquivError(f"there is no folder {str(folder)!r}; give --data a folder of pictures")
    check_pillow()
    channels = channels_of(model)
    prepare, unsure = preparation(model, channels, size)
    classes = {inner.name: pictures_below(inner) for inner in sorted(folder.iterdir()) if inner.is_dir()}
    classes = {name: pictures for name, pictures in classes.items() if pictures}
    loose = [path for path in sorted(folder.iterdir()) if is_picture(path)]
    if loose and classes:
        raise SoftEquivError(
            f"{folder} holds pictures ({loose[0].name}, ...) beside folders of pictures ({next(iter(classes))}, ...); "
            "put every picture into the folder of its class, or all into one folder"
        )
    if not loose and not classes:
        raise SoftEquivError(f"{folder} holds no pictures; known endings are {', '.join(ENDINGS)}")
    numbers, unknown = class_numbers(list(classes), model)
    pairs = [(path, 0) for path in loose]
    pairs += [(path, numbers.get(name, 0)) for name, pictures in classes.items() for path in pictures]
    if limit is not None and limit < len(pairs):
        pairs = sorted(random.Random(seed).sample(pairs, limit))
    return Images(
        paths=tuple(path for path, _ in pairs),
        labels=tuple(number for _, number in pairs) if numbers else None,
        prepare=prepare,
        channels=channels,
        batch_size=batch,
        notes=tuple(note for note in (unsure, unknown) if note),
    )


def stacked(paths: Sequence[Path], pictures: Sequence[Tensor]) -> Tensor:
    """One batch, (N, C, H, W)."""
    for path, picture in zip(paths, pictures, strict=True):
        if picture.shape != pictures[0].shape:
            raise SoftEquivError(
                f"{path} becomes {tuple(picture.shape)} and {paths[0]} {tuple(pictures[0].shape)}: the model's "
                "preprocessor keeps their shapes; cut them to squares with --size"
            )
    return torch.stack(list(pictures))


def class_numbers(names: Sequence[str], model: nn.Module) -> tuple[dict[str, int], str]:
    """The number of each class folder, and where they cannot be told, why not."""
    config = getattr(model, "config", None)
    count = getattr(config, "num_labels", None) or getattr(model, "num_classes", None)
    if not names or "Segmentation" in type(model).__name__:
        return {}, ""
    known: Mapping[str, int] = getattr(config, "label2id", None) or {}
    if all(name in known for name in names):
        return {name: int(known[name]) for name in names}, ""
    if len(names) == count:
        return {name: number for number, name in enumerate(sorted(names))}, ""
    return {}, (
        f"labels not used: {len(names)} class folders, {count} classes of the model, and their names differ "
        f"({names[0]}, ...)"
    )


def channels_of(model: nn.Module) -> int:
    """Colours of the pictures that a model takes."""
    first = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    channels = int(getattr(getattr(model, "config", None), "num_channels", None) or first)
    if channels not in MODES:
        raise SoftEquivError(f"the model takes {channels} channels, and pictures have 1 or 3; measure it in Python")
    return channels


def preparation(model: nn.Module, channels: int, size: int | None) -> tuple[Prepare, str]:
    """How a picture is made ready for a model, and what had to be guessed."""
    own: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    if own:
        return timm_preparation(own, size), ""
    path = preprocessor_of(model)
    settings = read_preprocessor(path)
    known = path.is_file()
    if known and size is None and channels == 3:
        return Processed.read(path), ""
    side = size or config_size(model)
    if side is None:
        raise SoftEquivError("the model does not say how large its pictures are; give --size")
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    if known and settings.get("do_normalize", True):
        if "image_mean" not in settings or "image_std" not in settings:
            raise SoftEquivError(f"{path} does not say how it normalises; write image_mean and image_std into it")
        mean, std = tuple(settings["image_mean"]), tuple(settings["image_std"])
    if len(mean) not in (1, channels):
        raise SoftEquivError(
            f"{path} normalises {len(mean)} channels and the model takes {channels}; correct that file"
        )
    note = "" if known else f"no {PREPROCESSOR} beside the model: pictures are scaled to [0, 1] and not normalised"
    return Squares(side, mean, std, resample=settings.get("resample", BILINEAR)), note


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
    if told.get("resample", BILINEAR) not in range(RESAMPLINGS):
        raise SoftEquivError(
            f"{path}: resample is {told['resample']!r}, and pillow numbers its ways from 0 to 5; correct it"
        )
    return told


def _usual(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def timm_preparation(settings: Mapping[str, Any], size: int | None) -> Prepare:
    """As timm evaluates."""
    side = size or int(settings["input_size"][-1])
    resample = NAMES.get(settings.get("interpolation", "bilinear"), BILINEAR)
    crop = 1.0 if size else float(settings.get("crop_pct") or 1.0)
    return Squares(side, tuple(settings["mean"]), tuple(settings["std"]), crop, resample)


@dataclass(frozen=True)
class Squares:
    """The shorter side becomes size / crop pixels, the middle square is cut out; (x - mean) / std with x in [0, 1]."""

    size: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    crop: float = 1.0
    resample: int = BILINEAR

    def __call__(self, picture: Any) -> Tensor:
        square = pixels(middle(picture, self.size, self.crop, self.resample))
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (square / 255 - mean) / std


@dataclass(frozen=True)
class Processed:
    """As the model's own processor of transformers says."""

    processor: Any
    path: Path

    @classmethod
    def read(cls, path: Path) -> Processed:
        """The processor of a preprocessor file."""
        import transformers

        processors: Any = transformers.AutoImageProcessor
        with _processing(path):
            return cls(processors.from_pretrained(path.parent), path)

    def __call__(self, picture: Any) -> Tensor:
        with _processing(self.path):
            pixels: Tensor = self.processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return pixels


@contextlib.contextmanager
def _processing(path: Path) -> Iterator[None]:
    """What goes wrong inside of transformers, in one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as problem:
        raise SoftEquivError(
            f"{path} prepares no picture ({first_line(problem)[:200]}); correct it, or give --size to do without"
        ) from problem
