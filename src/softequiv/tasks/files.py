"""Where are the examples that do not fit into memory? In files, decoded batch by batch on several threads.

What is drawn at random for a picture depends on the seed, the epoch and its number alone, so that a resumed run sees
the same pictures.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from softequiv.errors import SoftEquivError
from softequiv.measure.progress import progress
from softequiv.tasks.base import Examples, Held, Prepare, unchanged
from softequiv.tasks.decoding import MODES, anywhere, check_side, decoded, middle, pixels

HASHED = 1024  # files at a time; all at once would wait in memory
BLOCK = 2**20  # bytes of a file at a time

Read = Callable[[Any, Any, Random], tuple[Tensor, Tensor]]  # source, target, what is drawn -> input, target


@dataclass(frozen=True)
class Normalised:
    """Bytes (N, C, H, W) as the model wants them: padded with black, then (x / 255 - mean) / std of each channel.

    >>> Normalised((0.5,), (0.25,), pad=1)(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8))[0, 0, 1]
    tensor([-2., 2., -2.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        mean, std = constants((self.mean, self.std), inputs.device)
        padded: Tensor = functional.pad(inputs, (self.pad,) * 4) if self.pad else inputs
        return (padded.float() / 255 - mean) / std

    def bytes(self, prepared: Tensor) -> Tensor:
        """The way back of (x / 255 - mean) / std, rounded and clipped to 0..255, uint8; padding stays."""
        mean, std = constants((self.mean, self.std), prepared.device)
        return (255 * (prepared * std + mean)).round().clamp(0, 255).byte()


@lru_cache
def constants(values: tuple[tuple[float, ...], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Numbers for each channel, (C, 1, 1) each, copied to a device once."""
    return tuple(torch.tensor(row, device=device)[:, None, None] for row in values)


@dataclass(frozen=True)
class Labelled:
    """A picture and its label: the middle square of size x size bytes, or a random rectangle where `crops`."""

    size: int
    crop: float = 1.0
    channels: int = 3
    crops: bool = False

    def __post_init__(self) -> None:
        check_side(self.size)
        if not isinstance(self.crop, (int, float)) or not 0 < self.crop < math.inf:
            raise SoftEquivError(
                f"crop is the share of the shorter side that is kept, such as 0.875; got {self.crop!r}"
            )

    def __call__(self, source: Path, target: int, random: Random) -> tuple[Tensor, Tensor]:
        return self.cut(decoded(source, MODES[self.channels]), random), torch.tensor(target)

    def cut(self, picture: Any, random: Random) -> Tensor:
        """The square of a decoded picture, (C, size, size) uint8."""
        if self.crops:
            return pixels(anywhere(picture, self.size, random))
        return pixels(middle(picture, self.size, max(1, round(self.size / self.crop))))


@dataclass(frozen=True)
class Files(Examples):
    """Examples in files: pairs of a source, such as a path, and a target, such as a label or the path of a mask.

    `read`, a value, makes tensors of one shape of them; `prepare` runs on a whole batch on the device. Where `read`
    draws at random there is a seed, and batches are the same whenever seed, epoch and numbers are.
    """

    items: tuple[tuple[Any, Any], ...] = field(repr=False)
    read: Read
    prepare: Prepare = field(default=unchanged, compare=False)
    seed: int | None = None
    epoch: int = 0
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if not self.items:
            raise SoftEquivError("there are no examples; check the folder or the split they come from")

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = (self._sent(part) for part in self._stacked(numbers))
        return self.prepare(inputs), targets

    def to(self, device: torch.device | str) -> Files:
        return replace(self, device=device)

    def in_epoch(self, epoch: int) -> Files:
        return replace(self, epoch=epoch)

    def part(self, numbers: Tensor) -> Files:
        return replace(self, items=tuple(self.items[number] for number in numbers.tolist()))

    def held(self) -> Held:
        """All examples decoded once and kept in memory, as bytes where they are bytes."""
        if self.seed is not None:
            raise SoftEquivError(
                "pictures cropped at random as they are read would stay the same in memory; read them without crops, "
                "and vary them by softequiv.tasks.augment.Resized"
            )
        inputs, targets = (self._sent(part) for part in self._stacked(torch.arange(len(self))))
        return Held(inputs, targets, self.prepare)

    def labels(self) -> Tensor:
        labels = [target for _, target in self.items]
        if not all(isinstance(label, int) for label in labels):
            raise SoftEquivError(
                f"targets such as {labels[0]} are no labels; only examples with one label each can be balanced by class"
            )
        return torch.tensor(labels)

    @property
    def fingerprint(self) -> str:
        """Of names, contents and targets of the files and of how they are read; each file is read for it once."""
        sha = hashlib.sha256(repr((self.read, self.seed)).encode())
        for start in progress(range(0, len(self), HASHED), "reading the data"):
            for identity in _pool(os.getpid()).map(_identity, self.items[start : start + HASHED]):
                sha.update(identity.encode())
        return sha.hexdigest()

    def _one(self, number: int) -> tuple[Tensor, Tensor]:
        return self.read(*self.items[number], Random(f"{self.seed} {self.epoch} {number}"))

    def _stacked(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        chosen = numbers.tolist()
        inputs, targets = zip(*_pool(os.getpid()).map(self._one, chosen), strict=True)
        return stacked([self.items[number][0] for number in chosen], inputs), torch.stack(targets)

    def _sent(self, part: Tensor) -> Tensor:
        """On the device; from pinned memory the copy runs beside the computation."""
        pinned = part.pin_memory() if torch.device(self.device).type == "cuda" else part
        return pinned.to(self.device, non_blocking=True)


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads that decode, of this process: those of a parent do not survive a fork."""
    return ThreadPoolExecutor(thread_name_prefix="softequiv-decode")


def stacked(sources: Sequence[Any], inputs: Sequence[Tensor]) -> Tensor:
    """One batch, (N, ...); inputs of two shapes are named by their sources."""
    for source, own in zip(sources, inputs, strict=True):
        if own.shape != inputs[0].shape:
            raise SoftEquivError(
                f"{source} becomes {tuple(own.shape)} and {sources[0]} {tuple(inputs[0].shape)}: the model's "
                "preprocessor keeps their shapes; cut them to squares with --size"
            )
    return torch.stack(list(inputs))


def _identity(item: tuple[Any, Any]) -> str:
    return repr([_named_content(part) if isinstance(part, Path) else repr(part) for part in item])


def _named_content(path: Path) -> str:
    """The last two names of a path, so that a copied folder is the same, and a SHA-256 of what is there."""
    try:
        state = path.stat()
        content = _content(path, state.st_size, state.st_mtime_ns)
    except FileNotFoundError:
        content = "missing"
    except OSError as problem:
        raise SoftEquivError(f"{path} cannot be read ({problem}); copy it again, or take it away") from problem
    return f"{path.parent.name}/{path.name} {content}"


@cache
def _content(path: Path, size: int, changed: int) -> str:
    """What a file of that size and time of change holds."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            sha.update(block)
    return sha.hexdigest()
