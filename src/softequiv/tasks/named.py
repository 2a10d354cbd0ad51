"""Which problem does a text stand for? `mnist:PATH`, `camvid:PATH` and their like, `masks:PATH`, `hub:NAME`, or a
folder of pictures in folders of classes; pictures are made ready as the model wants them, and it is told how.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv._files import path_of
from softequiv.actions import Pictures
from softequiv.adapt.plan import config_size
from softequiv.errors import SoftEquivError
from softequiv.tasks.base import Examples, Held, Prepare
from softequiv.tasks.cifar import HUNDRED, TEN, cifar10, cifar100
from softequiv.tasks.classification import Classification
from softequiv.tasks.decoding import MODES, check_pillow, decoded
from softequiv.tasks.files import Files, Normalised, Read
from softequiv.tasks.folders import split_folder
from softequiv.tasks.hub import Row, hub_splits
from softequiv.tasks.images import class_count, class_numbers, own_names
from softequiv.tasks.masks import Fitted, ade20k, camvid, mask_folders, voc
from softequiv.tasks.mnist import MEAN, SIDE, STD, mnist
from softequiv.tasks.preparation import (
    USUAL,
    Preparation,
    Processed,
    Squares,
    channels_of,
    preparation,
    processed,
    timm_settings,
)
from softequiv.tasks.preprocessor import frame, normalisation, preprocessor_of, read_preprocessor
from softequiv.tasks.segmentation import Segmentation
from softequiv.tasks.splits import held_out

Items = tuple[tuple[Any, int], ...]  # sources, and numbers of classes
Named = Classification | Segmentation

TEST = 0.2  # of the pictures of each class, where the folder has no test of its own
CHOOSING = 0.1  # of the rows of the hub that are to learn from
SOME = 3  # names of classes that a message shows


@dataclass(frozen=True)
class Wanted:
    """How a model wants its pictures, as far as it says so."""

    channels: int
    size: int | None = None
    normalised: Normalised | None = None
    processed: Processed | None = None


@dataclass(frozen=True)
class Opened:
    """A problem, how its pictures are made ready, what had to be guessed, and what its classes are called, in the order
    in which the data have them, where they say so."""

    task: Named
    prepared: Preparation
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ready:
    """A picture made ready for a model, and its label."""

    prepare: Preparation
    channels: int

    def __call__(self, source: Path, target: int, random: Random) -> tuple[Tensor, Tensor]:
        return self.cut(decoded(source, MODES[self.channels]), random), torch.tensor(target)

    def cut(self, picture: Any, random: Random) -> Tensor:
        """A decoded picture made ready."""
        return self.prepare(picture)


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
    channels, own = channels_of(model), timm_settings(model)
    if own:
        return Wanted(channels, size or int(own["input_size"][-1]), Normalised(tuple(own["mean"]), tuple(own["std"])))
    path = preprocessor_of(model)
    told = read_preprocessor(path)
    normalised = normalisation(told, path, channels) if path.is_file() else None
    side = size or frame(told, path)[0] or config_size(model)
    return Wanted(channels, side, normalised, processed(model, size))


def open_task(text: str, model: nn.Module, *, size: int | None = None, seed: int = 0, named: bool = True) -> Opened:
    """The problem that a text stands for, with pictures as the model wants them, split by seed.

    Classes get the model's own numbers where it knows all their names, those of the data where it has no names, and are
    refused where it has others; with `named=False`, for a new head, they keep those of the data.

    >>> open_task("mnits:digits", nn.Conv2d(1, 8, 3))
    Traceback (most recent call last):
        ...
    softequiv.errors.SoftEquivError: there is no data set 'mnits'; did you mean mnist? Known are mnist, cifar10, ...
    """
    path_of(text.rpartition(":")[2] if isinstance(text, str) else text)  # what could name nothing is refused
    kind, colon, path = text.partition(":")
    if not colon or Path(text).exists():
        return _ready(_folder(Path(text), seed), model, size, named)
    if kind == HUB:
        return _ready(_rows(path, seed), model, size, named)
    if kind not in READERS:
        near = difflib.get_close_matches(kind, [*READERS, HUB], 1)
        raise SoftEquivError(
            f"there is no data set {kind!r}{f'; did you mean {near[0]}?' if near else ';'} Known are "
            f"{', '.join(READERS)}, written as mnist:PATH, {HUB}:NAME, and folders of pictures"
        )
    return READERS[kind](Path(path), wanted(model, size), seed)


def _digits(path: Path, wants: Wanted, seed: int) -> Opened:
    """Digits have room to turn: padded to the model's side where it is about theirs, else padded and scaled."""
    margin = (wants.size or 2 * SIDE) - SIDE
    fits = wants.size is not None and 0 <= margin <= SIDE and margin % 2 == 0
    task = mnist(path, seed=seed, **({"pad": margin // 2} if fits else {}))
    own = wants.normalised or Normalised((MEAN,), (STD,))
    assert isinstance(task.train, Held) and isinstance(task.train.prepare, Normalised)
    opened = _shown(task, Sized(replace(own, pad=task.train.prepare.pad), wants.size, wants.channels))
    return replace(opened, task=replace(opened.task, acts=Pictures(fill=-own.mean[0] / own.std[0])))


def _colours(
    read: Callable[..., Classification], normalised: Normalised, path: Path, wants: Wanted, seed: int
) -> Opened:
    return _shown(read(path, seed=seed), Sized(wants.normalised or normalised, wants.size, wants.channels))


def prepared(task: Classification, prepare: Prepare) -> Classification:
    """The same task, whose pictures in memory are prepared otherwise."""

    def part(examples: Examples) -> Examples:
        assert isinstance(examples, Held)
        return replace(examples, prepare=prepare)

    return task.mapped(part)


def _shown(task: Classification, prepare: Sized) -> Opened:
    """The same pictures as a model wants them, and how a single one is made ready."""
    assert isinstance(task.train, Held)
    side, own = task.train.inputs.shape[-1], prepare.normalised
    framed = side + 2 * own.pad
    size = prepare.size or framed
    return Opened(prepared(task, prepare), Squares(size, round(size * side / framed), own.mean, own.std))


def pictures_and_masks(folder: Path, **settings: Any) -> Segmentation:
    """Any folder with pictures in images/ and their masks in masks/."""
    return mask_folders(folder / "images", folder / "masks", **settings)


def _masks(read: Callable[..., Segmentation], path: Path, wants: Wanted, seed: int) -> Opened:
    """The whole picture is fitted into a square, for its mask's sake; alone, it is cut by the model's own file, or to
    the middle square."""
    sized = {"size": wants.size} if wants.size else {}
    split = {} if read is camvid else {"seed": seed}  # CamVid comes split
    normalised = wants.normalised or USUAL[wants.channels]
    task = read(path, prepare=normalised, **sized, **split)
    assert isinstance(task.train, Files) and isinstance(task.train.read, Fitted)
    size = task.train.read.size
    return Opened(task, wants.processed or Squares(size, size, normalised.mean, normalised.std))


READERS: dict[str, Callable[[Path, Wanted, int], Opened]] = {
    "mnist": _digits,
    "cifar10": partial(_colours, cifar10, TEN.normalised),
    "cifar100": partial(_colours, cifar100, HUNDRED.normalised),
    "camvid": partial(_masks, camvid),
    "voc": partial(_masks, voc),
    "ade20k": partial(_masks, ade20k),
    "masks": partial(_masks, pictures_and_masks),
}
HUB = "hub"


@dataclass(frozen=True)
class Parts:
    """Pictures with the numbers of their classes, by what they are for, and how each part is read once it is known how
    they are made ready."""

    train: Items
    validation: Items
    test: Items
    classes: int
    names: tuple[str, ...]
    learning: Callable[[Ready], Read]
    testing: Callable[[Ready], Read]


def _folder(path: Path, seed: int) -> Parts:
    check_pillow()
    found = split_folder(path, test=TEST, seed=seed)
    return Parts(found.train, found.validation, found.test, found.classes, found.names, from_files, from_files)


def from_files(ready: Ready) -> Read:
    """A file is decoded by what makes it ready."""
    return ready


def _rows(name: str, seed: int) -> Parts:
    """Rows of a data set of the hub; a tenth of those to learn from choose the model."""
    found = hub_splits(name)
    items, test = found.items
    kept, held = (tuple(items[number] for number in part.tolist()) for part in held_out(len(items), CHOOSING, seed))
    read = [partial(Row, rows, found.image) for rows in (found.learning, found.test)]
    return Parts(kept, held, test, found.classes, found.names, *read)


def _ready(parts: Parts, model: nn.Module, size: int | None, named: bool) -> Opened:
    """Pictures as the model wants them, with its own numbers of classes."""
    order, classes = _numbers(parts.names, model, parts.classes) if named else (None, parts.classes)
    prepared, note = preparation(model, size)
    ready = Ready(prepared, channels_of(model))

    def part(items: Items, read: Read) -> Files:
        return Files(items if order is None else tuple((source, order[label]) for source, label in items), read)

    learning = parts.learning(ready)
    task = Classification(
        part(parts.train, learning), part(parts.validation, learning), part(parts.test, parts.testing(ready)), classes
    )
    return Opened(task, prepared, (note,) if note else (), parts.names)


def _numbers(names: Sequence[str], model: nn.Module, found: int) -> tuple[list[int] | None, int]:
    """The model's own numbers for classes of these names where it knows them all, and how many classes there are."""
    count = class_count(model)
    if not names:  # labels.tsv has numbers of its own, which may leave some of the model's out
        return None, max(found, count)
    numbers, unknown = class_numbers(names, model)
    if unknown and found == count:  # the head would fit, and its classes be others
        theirs, own = (", ".join([*some][:SOME]) + ", ..." * (count > SOME) for some in (names, own_names(model)))
        raise SoftEquivError(
            f"the pictures' classes are called {theirs} and the model's {own}: give them the same names, or the model "
            "a new head (--new-head)"
        )
    if not numbers:
        return None, found
    return [numbers[name] for name in names], max(count, len(names))
