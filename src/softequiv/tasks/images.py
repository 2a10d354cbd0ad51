"""Which pictures are in this folder? They are read in batches, prepared as the model's own files say, with classes from
the names of sub-folders.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from softequiv.errors import SoftEquivError
from softequiv.tasks.decoding import ENDINGS, MODES, check_pillow, decoded, is_picture, pictures_below
from softequiv.tasks.files import stacked
from softequiv.tasks.folders import refuse_parts
from softequiv.tasks.preparation import Preparation, channels_of, preparation

NUMBERED = re.compile(r"LABEL_\d+")  # what transformers calls classes that were given no names
WORDNET = re.compile(r"n\d{8}")  # ImageNet's folders, in whose order every model of it has its classes


@dataclass(frozen=True)
class Images:
    """The pictures of a folder in batches: (N, C, H, W), with labels (N,) where they are known."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...] | None
    prepare: Preparation
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
    """The pictures below a folder, prepared for the model. Class folders get the model's own numbers if it knows all
    their names, and are numbered in order if it has no names. `limit` draws so many pictures at random.
    """
    if not folder.is_dir():
        raise SoftEquivError(f"there is no folder {str(folder)!r}; give --data a folder of pictures")
    check_pillow()
    prepare, unsure = preparation(model, size)
    classes = {inner.name: pictures_below(inner) for inner in sorted(folder.iterdir()) if inner.is_dir()}
    classes = {name: pictures for name, pictures in classes.items() if pictures}
    refuse_parts(folder, classes)
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
        channels=channels_of(model),
        batch_size=batch,
        notes=tuple(note for note in (unsure, unknown) if note),
    )


def class_numbers(names: Sequence[str], model: nn.Module) -> tuple[dict[str, int], str]:
    """The number of each class: the model's own for that name, in whatever case, or its place where the model has no
    names, or the data have those of ImageNet; and where it cannot be told, why not."""
    if not names or "Segmentation" in type(model).__name__:
        return {}, ""
    own = own_names(model)
    for said in (str, str.casefold):
        known = {said(name): number for name, number in own.items()}
        numbers = {name: known[said(name)] for name in names if said(name) in known}
        if len(set(numbers.values())) == len(names):
            return numbers, ""
    count = class_count(model)
    if len(names) == count and (nameless(model) or all(WORDNET.fullmatch(name) for name in names)):
        return {name: number for number, name in enumerate(names)}, ""
    return {}, (
        f"labels not used: {len(names)} class folders, {count} classes of the model, and their names differ "
        f"({names[0]}, ...)"
    )


def class_count(model: nn.Module) -> int:
    """How many classes a model has; 0 where it does not say."""
    return int(getattr(getattr(model, "config", None), "num_labels", None) or getattr(model, "num_classes", 0) or 0)


def own_names(model: nn.Module) -> dict[str, int]:
    """What a model calls its classes, with their numbers."""
    told = getattr(getattr(model, "config", None), "label2id", None) or {}
    return {str(name): int(number) for name, number in told.items()}


def nameless(model: nn.Module) -> bool:
    """Whether a model has no names of its classes, or numbers for names: `LABEL_0`, `LABEL_1`, ..."""
    return all(NUMBERED.fullmatch(name) for name in own_names(model))
