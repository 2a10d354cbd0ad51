"""Where do pictures come from that are on a hub? From `datasets`, where it is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from softequiv.errors import SoftEquivError
from softequiv.tasks.base import Prepare
from softequiv.tasks.classification import Classification
from softequiv.tasks.decoding import MODES, check_pillow
from softequiv.tasks.files import Files, Labelled
from softequiv.tasks.folders import IMAGENET
from softequiv.tasks.splits import held_out


@dataclass(frozen=True)
class Row:
    """A row of a data set of `datasets`, whose column `image` holds a picture of pillow."""

    rows: Any
    image: str
    picture: Labelled

    def __call__(self, source: int, target: int, random: Random) -> tuple[Tensor, Tensor]:
        picture = self.rows[source][self.image]
        return self.picture.cut(picture.convert(MODES[self.picture.channels]), random), torch.tensor(target)

    def __repr__(self) -> str:
        """By the data set's own fingerprint."""
        return f"Row({getattr(self.rows, '_fingerprint', None)}, {self.image}, {self.picture})"


def hub_classification(
    name: str,
    *,
    image: str = "image",
    label: str = "label",
    train: str = "train",
    test: str = "test",
    size: int = 224,
    crop: float = 0.875,
    prepare: Prepare = IMAGENET,
    validation: float = 0.1,
    crops: bool = False,
    seed: int = 0,
) -> Classification:
    """A data set of the hub, or a folder that `datasets` reads, by the names of its columns and splits:
    `hub_classification("uoft-cs/cifar10", image="img", size=32, crop=1.0)`.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise SoftEquivError("data sets of the hub need datasets: pip install 'softequiv[hub]'") from None
    check_pillow()
    try:
        found = datasets.load_dataset(name)
    except (OSError, ValueError) as problem:
        raise SoftEquivError(
            f"datasets cannot load {name!r} ({problem}); check its name, and that the hub can be reached"
        ) from problem
    learning, asked = (_split(found, name, split, (image, label)) for split in (train, test))
    plain = Labelled(size, crop)
    items, test_items = (tuple(enumerate(int(number) for number in rows[label])) for rows in (learning, asked))
    kept, held = held_out(len(items), validation, seed)
    random_crops = Row(learning, image, Labelled(size, crop, crops=crops))
    return Classification(
        train=Files(items, random_crops, prepare, seed if crops else None).part(kept),
        validation=Files(items, Row(learning, image, plain), prepare).part(held),
        test=Files(test_items, Row(asked, image, plain), prepare),
        classes=1 + max(number for _, number in (*items, *test_items)),
    )


def _split(found: Any, name: str, split: str, columns: tuple[str, ...]) -> Any:
    if split not in found:
        raise SoftEquivError(f"{name!r} has no split {split!r}; it has {', '.join(found)}")
    missing = [column for column in columns if column not in found[split].column_names]
    if missing:
        raise SoftEquivError(
            f"{name!r} has no column {missing[0]!r}; it has {', '.join(found[split].column_names)}: name the columns "
            "by image= and label="
        )
    return found[split]
