"""Where do handwritten digits come from? The four idx files of MNIST, gzipped or not, of 28 x 28 pixels."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy
import torch
from torch import Tensor

from softequiv.actions import Pictures
from softequiv.errors import SoftEquivError, check_count
from softequiv.tasks.archives import stored
from softequiv.tasks.base import Held
from softequiv.tasks.classification import Classification
from softequiv.tasks.files import Normalised
from softequiv.tasks.labels import check_range
from softequiv.tasks.splits import held_out

MEAN, STD = 0.1307, 0.3081
BLACK = -MEAN / STD  # a black pixel as the model sees it
PAD = 6  # 28 sqrt(2) < 28 + 2 * 6: no turn takes a corner of the picture out of the frame
DIGITS, SIDE = 10, 28
REMEDY = "get the four files of MNIST, train-images-idx3-ubyte.gz and its like, from ossci-datasets.s3.amazonaws.com"
NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def mnist(folder: str | Path, *, validation: float = 0.1, seed: int = 0, pad: int = PAD) -> Classification:
    """MNIST as in the paper: pictures padded by `pad` black pixels on each side, (1, 28 + 2 pad, 28 + 2 pad), and a
    tenth of the training pictures held out by seed. What turns leave empty is black."""
    check_count("pad, the black pixels on each side,", pad, 0)
    files = stored(folder, [name for pair in NAMES.values() for name in pair], REMEDY)
    train, test = (_digits(files, *pair, Normalised((MEAN,), (STD,), pad)) for pair in NAMES.values())
    kept, apart = held_out(len(train), validation, seed)
    return Classification(train.part(kept), train.part(apart), test, DIGITS, acts=Pictures(fill=BLACK))


def idx(content: bytes, name: str) -> Tensor:
    """The bytes of an idx file: 0, 0, type 8, axes k; k sizes of 4 bytes, the largest first; then the entries.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "two")
    tensor([7, 9], dtype=torch.uint8)
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise SoftEquivError(
            f"{name} is no idx file of bytes: it starts with {content[:4].hex(' ') or 'nothing'} instead of 00 00 08; "
            "download it again"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise SoftEquivError(f"{name} is cut short within its first {start} bytes; download it again")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    expected = math.prod(shape)
    if not 1 <= len(shape) <= 4 or not expected:
        raise SoftEquivError(f"{name} has {len(shape)} axes and {expected} entries; download it again")
    if len(content) - start != expected:
        raise SoftEquivError(
            f"{name} says that it holds {' x '.join(map(str, shape))} = {expected} entries and has "
            f"{len(content) - start}: it is damaged or cut short; download it again"
        )
    return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=start).reshape(shape).copy())


def _digits(files: dict[str, bytes], pictures_name: str, labels_name: str, prepare: Normalised) -> Held:
    pictures, labels = (idx(files[name], name) for name in (pictures_name, labels_name))
    for part, name, axes in ((pictures, pictures_name, 3), (labels, labels_name, 1)):
        if part.ndim != axes:
            raise SoftEquivError(f"{name} has {part.ndim} axes instead of {axes}; were two files exchanged?")
    if len(pictures) != len(labels):
        raise SoftEquivError(
            f"{pictures_name} holds {len(pictures)} pictures and {labels_name} {len(labels)} labels; take both from "
            "one source"
        )
    if pictures.shape[1:] != (SIDE, SIDE):
        size = " x ".join(map(str, pictures.shape[1:]))
        raise SoftEquivError(
            f"{pictures_name} holds pictures of {size} pixels, and those of MNIST have {SIDE} x {SIDE}; take all files "
            "from one source"
        )
    check_range(labels, DIGITS, labels_name)
    return Held(pictures[:, None], labels.long(), prepare)
