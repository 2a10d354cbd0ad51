"""Which problem does a text stand for? `mnist:PATH`, `cifar10:PATH`, `camvid:PATH` and their like, or a folder of
pictures in folders of classes; pictures are made ready as the model wants them, where it says how.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from softequiv._files import path_of
from softequiv.actions import Pictures
from softequiv.adapt.plan import config_size
from softequiv.errors import SoftEquivError
from softequiv.tasks.base import Examples, Held
from softequiv.tasks.cifar import HUNDRED, TEN, cifar10, cifar100
from softequiv.tasks.classification import Classification
from softequiv.tasks.files import Files, Normalised
from softequiv.tasks.folders import IMAGENET, image_folder, labelled
from softequiv.tasks.images import channels_of, class_numbers, preprocessor_of, read_preprocessor
from softequiv.tasks.masks import ade20k, camvid, voc
from softequiv.tasks.mnist import MEAN, STD, mnist
from softequiv.tasks.segmentation import Segmentation

Named = Classification | Segmentation

DIGIT_SIDE = 28
SIDE = 224  # of pictures of a folder, where nothing says how large the model wants them
TEST = 0.2  # of the pictures of each class, where the folder has no test of its own


@dataclass(frozen=True)
class Wanted:
    """How a model wants its pictures, as far as it says so."""

    channels: int
    size: int | None = None
    normalised: Normalised | None = None
    crop: float = 1.0


@dataclass(frozen=True)
class Sized:
    """Pictures normalised, then read at size x size places; grey ones are repeated for every channel.

    >>> import torch
    >>> Sized(Normalised((0.5,), (0.5,)), 4, 3)(torch.zeros(1, 1, 2, 2, dtype=torch.uint8)).shape
    torch.Size([1, 3, 4, 4])
    """

    normalised: Normalised
    size: int | None
    channels: int

    def __call__(self, inputs: Tensor) -> Tensor:
        x = self.normalised(inputs)
        if self.size is not None and x.shape[-1] != self.size:
            x = functional.interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)
        return x.expand(-1, self.channels, -1, -1) if x.shape[1] == 1 else x


def wanted(model: nn.Module, size: int | None = None) -> Wanted:
    """What a model of timm or transformers says about its pictures; `size` instead of its own side."""
    own: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    channels = channels_of(model)
    if own:
        side, crop = size or int(own["input_size"][-1]), 1.0 if size else float(own.get("crop_pct") or 1.0)
        return Wanted(channels, side, Normalised(tuple(own["mean"]), tuple(own["std"])), crop)
    path = preprocessor_of(model)
    told = read_preprocessor(path)
    normalised = None
    if told.get("do_normalize", True) and "image_mean" in told and "image_std" in told:
        normalised = Normalised(tuple(told["image_mean"]), tuple(told["image_std"]))
    return Wanted(channels, size or config_size(model) or _side(told.get("size"), path), normalised)


def _side(entry: Any, path: Path) -> int | None:
    """The side that a preprocessor file gives: a number, or height, or the shortest edge."""
    if isinstance(entry, Mapping):
        entry = entry.get("height") or entry.get("shortest_edge")
    if entry and (type(entry) is not int or entry < 1):
        raise SoftEquivError(f"{path}: the side of pictures is {entry!r}, and should be a number of pixels; correct it")
    return entry or None


def open_task(text: str, model: nn.Module, *, size: int | None = None, seed: int = 0, named: bool = True) -> Named:
    """The problem that a text stands for, with pictures as the model wants them, split by seed.

    Class folders get the model's own numbers where it knows all their names, unless `named` is False.

    >>> open_task("mnits:digits", nn.Conv2d(1, 8, 3))
    Traceback (most recent call last):
        ...
    softequiv.errors.SoftEquivError: there is no data set 'mnits'; did you mean mnist? Known are mnist, cifar10, ...
    """
    path_of(text.rpartition(":")[2] if isinstance(text, str) else text)  # what could name nothing is refused
    kind, colon, path = text.partition(":")
    wants = wanted(model, size)
    if not colon or Path(text).exists():
        return _folder(Path(text), wants, seed, model if named else None)
    if kind not in READERS:
        near = difflib.get_close_matches(kind, READERS, 1)
        raise SoftEquivError(
            f"there is no data set {kind!r}{f'; did you mean {near[0]}?' if near else ';'} Known are "
            f"{', '.join(READERS)}, written as mnist:PATH, and folders of pictures"
        )
    return READERS[kind](Path(path), wants, seed)


def _digits(path: Path, wants: Wanted, seed: int) -> Classification:
    """Digits have room to turn: padded to the model's side where it is about theirs, else padded and scaled."""
    margin = (wants.size or 2 * DIGIT_SIDE) - DIGIT_SIDE
    fits = wants.size is not None and 0 <= margin <= DIGIT_SIDE and margin % 2 == 0
    task = mnist(path, seed=seed, **({"pad": margin // 2} if fits else {}))
    own = wants.normalised or Normalised((MEAN,), (STD,))
    assert isinstance(task.train, Held) and isinstance(task.train.prepare, Normalised)
    shown = Sized(replace(own, pad=task.train.prepare.pad), wants.size, wants.channels)
    return replace(_shown(task, shown), acts=Pictures(fill=-own.mean[0] / own.std[0]))


def _colours(
    read: Callable[..., Classification], normalised: Normalised, path: Path, wants: Wanted, seed: int
) -> Classification:
    return _shown(read(path, seed=seed), Sized(wants.normalised or normalised, wants.size, wants.channels))


def _shown(task: Classification, prepare: Sized) -> Classification:
    """The same pictures, prepared otherwise."""

    def part(examples: Examples) -> Examples:
        assert isinstance(examples, Held)
        return replace(examples, prepare=prepare)

    return _changed(task, part)


def _changed(task: Classification, part: Callable[[Examples], Examples]) -> Classification:
    """The same problem with each of its three parts changed."""
    return replace(task, train=part(task.train), validation=part(task.validation), test=part(task.test))


def _masks(read: Callable[..., Segmentation], path: Path, wants: Wanted, seed: int) -> Segmentation:
    sized = {"size": wants.size} if wants.size else {}
    split = {} if read is camvid else {"seed": seed}  # CamVid comes split
    return read(path, prepare=wants.normalised or IMAGENET, **sized, **split)


READERS: dict[str, Callable[[Path, Wanted, int], Named]] = {
    "mnist": _digits,
    "cifar10": partial(_colours, cifar10, TEN.normalised),
    "cifar100": partial(_colours, cifar100, HUNDRED.normalised),
    "camvid": partial(_masks, camvid),
    "voc": partial(_masks, voc),
    "ade20k": partial(_masks, ade20k),
}


def _folder(path: Path, wants: Wanted, seed: int, model: nn.Module | None) -> Classification:
    normalised = wants.normalised or IMAGENET
    task = image_folder(path, size=wants.size or SIDE, crop=wants.crop, prepare=normalised, test=TEST, seed=seed)
    if model is None:
        return task
    names = class_names(path)
    count = int(getattr(getattr(model, "config", None), "num_labels", None) or getattr(model, "num_classes", 0) or 0)
    if not names:  # labels.tsv has numbers of its own, which may leave some of the model's out
        return replace(task, classes=max(task.classes, count))
    numbers, unknown = class_numbers(names, model)
    if unknown or not numbers:
        return task
    order = [numbers[name] for name in names]

    def part(examples: Examples) -> Examples:
        assert isinstance(examples, Files)
        return replace(examples, items=tuple((source, order[label]) for source, label in examples.items))

    return replace(_changed(task, part), classes=max(count, len(names)))


def class_names(source: str | Path) -> tuple[str, ...]:
    """The names of the class folders of a source, in the order of their numbers; none for other data."""
    path = Path(source)
    if not path.is_dir():
        return ()
    return labelled(path / "train" if (path / "train").is_dir() else path)[1]
