"""Where do pictures come from that are on a hub? From `datasets`, where it is installed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor

from softequiv.errors import SoftEquivError, imported
from softequiv.tasks.base import Prepare
from softequiv.tasks.classification import Classification
from softequiv.tasks.decoding import MODES, check_pillow
from softequiv.tasks.files import Files, Labelled
from softequiv.tasks.folders import IMAGENET
from softequiv.tasks.splits import held_out

Items = tuple[tuple[int, int], ...]  # rows by number, with their labels

TESTS = ("test", "validation")  # splits that may be the test, the first there is


class Cut(Protocol):
    """How a picture of pillow becomes a tensor, and of how many channels."""

    @property
    def channels(self) -> int: ...

    def cut(self, picture: Any, random: Random) -> Tensor: ...


@dataclass(frozen=True)
class Row:
    """A row of a data set of `datasets`, whose column `image` holds a picture of pillow."""

    rows: Any
    image: str
    picture: Cut

    def __call__(self, source: int, target: int, random: Random) -> tuple[Tensor, Tensor]:
        picture = self.rows[source][self.image]
        return self.picture.cut(picture.convert(MODES[self.picture.channels]), random), torch.tensor(target)

    def __repr__(self) -> str:
        """By the data set's own fingerprint."""
        return f"Row({getattr(self.rows, '_fingerprint', None)}, {self.image}, {self.picture})"


@dataclass(frozen=True)
class Splits:
    """The rows to learn from and those of the test, and the columns of their pictures and labels."""

    learning: Any
    test: Any
    image: str
    label: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes in the order of their numbers, where the data set says them."""
        return tuple(getattr(self.learning.features[self.label], "names", None) or ())

    @property
    def classes(self) -> int:
        """How many there are, by names or by the highest label."""
        return len(self.names) or 1 + max(number for items in self.items for _, number in items)

    @property
    def items(self) -> tuple[Items, Items]:
        """Rows by number with their labels, those to learn from and those of the test."""
        return self._labelled(self.learning), self._labelled(self.test)

    def _labelled(self, rows: Any) -> Items:
        labels = list(rows[self.label])
        for number, label in enumerate(labels):
            if label is None or label < 0:  # as data sets have it whose test is a challenge
                raise SoftEquivError(
                    f"row {number} has the label {label} in the column {self.label!r}, which is no class; take a split "
                    "with labels, hub_classification(..., test=...)"
                )
        return tuple((number, int(label)) for number, label in enumerate(labels))


def hub_splits(
    name: str, image: str | None = None, label: str | None = None, train: str = "train", test: str | None = None
) -> Splits:
    """A data set of the hub, or a folder that `datasets` reads. Where the columns are not named, they are the only one
    of pictures and the only one of classes; the test is by default the split `test`, else `validation`."""
    datasets = imported("datasets", "data sets of the hub need datasets", "hub")
    check_pillow()
    try:
        found = datasets.load_dataset(name)
    except (OSError, ValueError) as problem:
        raise SoftEquivError(
            f"datasets cannot load {name!r} ({problem}); check its name, and that the hub can be reached"
        ) from problem
    asked = test or next((split for split in TESTS if split in found), TESTS[0])
    for split in (train, asked):
        if split not in found:
            raise SoftEquivError(f"{name!r} has no split {split!r}; it has {', '.join(found)}")
    columns = found[train].features
    return Splits(
        found[train],
        found[asked],
        _column(name, columns, image, "Image", "image"),
        _column(name, columns, label, "ClassLabel", "label"),
    )


def _column(name: str, columns: dict[str, Any], asked: str | None, kind: str, argument: str) -> str:
    """The column that is asked for, or the only one of a kind."""
    if asked is not None and asked not in columns:
        raise SoftEquivError(f"{name!r} has no column {asked!r}; it has {', '.join(columns)}: name it by {argument}=")
    found = [asked] if asked else [column for column, told in columns.items() if type(told).__name__ == kind]
    if len(found) != 1:
        raise SoftEquivError(
            f"{name!r} has {len(found) or 'no'} columns of the kind {kind} among {', '.join(columns)}; name the one "
            f"that counts in Python, hub_classification(..., {argument}=...)"
        )
    return found[0]


def hub_classification(
    name: str,
    *,
    image: str | None = None,
    label: str | None = None,
    train: str = "train",
    test: str | None = None,
    size: int = 224,
    crop: float = 0.875,
    prepare: Prepare = IMAGENET,
    validation: float = 0.1,
    crops: bool = False,
    seed: int = 0,
) -> Classification:
    """A data set of the hub, or a folder that `datasets` reads, by the names of its columns and splits, which are found
    where they are not given: `hub_classification("uoft-cs/cifar10", label="label", size=32, crop=1.0)`.
    """
    splits = hub_splits(name, image, label, train, test)
    learning, asked = splits.items
    kept, held = held_out(len(learning), validation, seed)
    plain, varied = (Labelled(size, crop, crops=random) for random in (False, crops))

    def part(rows: Any, items: Items, picture: Labelled) -> Files:
        return Files(items, Row(rows, splits.image, picture), prepare, seed if picture.crops else None)

    return Classification(
        train=part(splits.learning, learning, varied).part(kept),
        validation=part(splits.learning, learning, plain).part(held),
        test=part(splits.test, asked, plain),
        classes=splits.classes,
    )
