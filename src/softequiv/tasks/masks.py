"""Which class is each pixel in? That of the mask beside its picture: PASCAL VOC, CamVid, ADE20K, or folders of pairs.

Pictures and masks are fitted into squares together; a value that is no class is named with its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy
from torch import Tensor

from softequiv._files import path_of
from softequiv.errors import SoftEquivError
from softequiv.measure.functional import IGNORE_INDEX
from softequiv.measure.progress import progress
from softequiv.tasks.decoding import BILINEAR, MODES, NEAREST, check_pillow, check_side, decoded, is_picture, pixels
from softequiv.tasks.files import Files, Normalised
from softequiv.tasks.folders import IMAGENET
from softequiv.tasks.labels import check_inside, numbered_lines
from softequiv.tasks.segmentation import Segmentation
from softequiv.tasks.splits import held_out

NUMBERED = ("L", "P", "1", "I", "I;16")  # modes of pillow whose pixels are numbers and not colours

Pairs = tuple[tuple[Path, Path], ...]


@dataclass(frozen=True)
class Values:
    """What the bytes of masks mean: first, first + 1, ... are classes 0, 1, ..., and `ignored` ones belong to none.

    >>> Values(2, ignored=(0,), first=1)(numpy.array([0, 1, 2]), Path("mask.png"))
    array([255,   0,   1], dtype=uint8)
    """

    classes: int
    ignored: tuple[int, ...] = (IGNORE_INDEX,)
    first: int = 0

    def __post_init__(self) -> None:
        listed = self.ignored if isinstance(self.ignored, tuple) else (None,)
        if not all(type(number) is int for number in (self.classes, self.first, *listed)):
            raise SoftEquivError(f"classes and first are whole numbers, and ignored a tuple of such; got {self}")

    def __call__(self, mask: Any, path: Path) -> Any:
        """Classes with 255 for none, (H, W) uint8."""
        values = mask.astype(numpy.int64)
        none = numpy.isin(values, self.ignored)
        labels = values - self.first
        unknown = ~none & ((labels < 0) | (labels >= self.classes))
        if unknown.any():
            raise SoftEquivError(
                f"{path} holds the value {int(values[unknown][0])} in {int(unknown.sum())} pixels, which is no class: "
                f"classes are {self.first}..{self.first + self.classes - 1}, and "
                f"{', '.join(map(str, self.ignored))} is ignored; correct the mask or the number of classes"
            )
        return numpy.where(none, IGNORE_INDEX, labels).astype(numpy.uint8)


@dataclass(frozen=True)
class Fitted:
    """A picture and its mask in a square: the longer side becomes `size` pixels, and what is left over, the same on
    both sides, is of colour `fill` and belongs to no class. No pixel is lost, and circles remain circles. Pictures have
    as many channels as `fill`."""

    size: int
    values: Values
    fill: tuple[int, ...] = (0, 0, 0)

    def __post_init__(self) -> None:
        check_side(self.size)

    def __call__(self, source: Path, target: Path, random: Random) -> tuple[Tensor, Tensor]:
        mode = MODES[len(self.fill)]
        picture, mask = decoded(source, mode), numbered(target)
        if mask.size != picture.size:
            raise SoftEquivError(
                f"{target} is {mask.size[0]} x {mask.size[1]} and {source} {picture.size[0]} x {picture.size[1]} "
                "pixels; a mask has the size of its picture"
            )
        from PIL import Image

        labels = Image.fromarray(self.values(numpy.asarray(mask), target))
        frame = Image.new(mode, (self.size, self.size), self.fill)
        around = Image.new("L", (self.size, self.size), IGNORE_INDEX)
        scale = self.size / max(picture.size)
        inner = tuple(max(1, round(side * scale)) for side in picture.size)
        corner = tuple((self.size - side) // 2 for side in inner)
        frame.paste(picture.resize(inner, BILINEAR), corner)
        around.paste(labels.resize(inner, NEAREST), corner)
        return pixels(frame), pixels(around)[0]


def camvid(folder: str | Path, *, size: int = 480, prepare: Normalised = IMAGENET) -> Segmentation:
    """CamVid: {train,val,test}/NAME.jpg with {train,val,test}annot/NAME.png, 11 classes, 11 = unlabelled."""
    folder = path_of(folder)
    parts = [paired(folder / name, folder / f"{name}annot") for name in ("train", "val", "test")]
    return _segmentation(parts, size, Values(11, ignored=(11,)), prepare)


def voc(
    folder: str | Path, *, size: int = 512, validation: float = 0.1, seed: int = 0, prepare: Normalised = IMAGENET
) -> Segmentation:
    """PASCAL VOC 2012: JPEGImages, SegmentationClass, ImageSets/Segmentation/{train,val}.txt; 21 classes, 255 ignored.

    Its val is the test, as that of the challenge is not public; `validation` of its train chooses the model.
    """
    folder = path_of(folder)
    learning, test = (_voc_pairs(folder, name) for name in ("train", "val"))
    both = sorted(set(learning) & set(test))
    if both:
        raise SoftEquivError(
            f"{folder}: {both[0][0].stem!r} is in train.txt and in val.txt, which is the test; take it out of one"
        )
    return _segmentation([*_apart(learning, validation, seed), test], size, Values(21), prepare)


def ade20k(
    folder: str | Path, *, size: int = 512, validation: float = 0.1, seed: int = 0, prepare: Normalised = IMAGENET
) -> Segmentation:
    """ADE20K, scene parsing: images/{training,validation} and annotations/...; classes 1..150, 0 = other, ignored."""
    folder = path_of(folder)
    learning, test = (paired(folder / "images" / n, folder / "annotations" / n) for n in ("training", "validation"))
    return _segmentation([*_apart(learning, validation, seed), test], size, Values(150, (0,), first=1), prepare)


def mask_folders(
    pictures: str | Path,
    masks: str | Path,
    values: Values | None = None,
    *,
    size: int = 512,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    prepare: Normalised = IMAGENET,
) -> Segmentation:
    """Any folder of pictures with a folder of masks of the same names, split by seed into three.

    Where `values` is not given, classes are 0, 1, ... up to the highest value of any mask, and 255 belongs to none.
    """
    pairs = paired(path_of(pictures), path_of(masks))
    known = values or Values(_counted(masks, pairs))
    learning, asked = _apart(pairs, test, seed)
    return _segmentation([*_apart(learning, validation, seed), asked], size, known, prepare)


def _counted(masks: str | Path, pairs: Pairs) -> int:
    """How many classes all masks have together; one alone would be right everywhere, whatever is learnt."""
    highest = max(highest_class(mask) for _, mask in progress(pairs, "reading the masks"))
    if highest == 0:
        raise SoftEquivError(
            f"the masks in {masks} hold one class only, 0, where they are not {IGNORE_INDEX}, which belongs to none; "
            f"write classes as 0, 1, ..., and 1 for {IGNORE_INDEX} where that is one"
        )
    return 1 + highest


def highest_class(mask: Path) -> int:
    """The highest value in a mask but 255; 0 where there is none."""
    values = numpy.asarray(numbered(mask))
    return int(values[values != IGNORE_INDEX].max(initial=0))


def numbered(mask: Path) -> Any:
    """A mask as a picture of pillow, whose pixels are numbers of classes."""
    picture = decoded(mask)
    if picture.mode not in NUMBERED:
        raise SoftEquivError(
            f"{mask} is a picture of colours (mode {picture.mode}); masks hold the number of a class in each pixel: "
            "convert it"
        )
    return picture


def paired(pictures: Path, masks: Path) -> Pairs:
    """Each picture of a folder with the mask NAME.png of another, in the order of their names."""
    for folder in (pictures, masks):
        if not folder.is_dir():
            raise SoftEquivError(
                f"there is no folder {str(folder)!r}; pictures and masks lie in {pictures} and {masks}"
            )
    found = sorted(path for path in pictures.iterdir() if is_picture(path))
    if not found:
        raise SoftEquivError(f"{pictures} holds no pictures; put them there")
    seen: dict[str, Path] = {}
    for path in found:
        before = seen.setdefault(path.stem, path)
        if before != path:  # one might teach and the other test
            raise SoftEquivError(f"{before} and {path.name} have one mask, {path.stem}.png; keep one of them")
    return tuple((path, _mask_of(path, masks)) for path in found)


def _mask_of(picture: Path, masks: Path) -> Path:
    mask = masks / f"{picture.stem}.png"
    if not mask.is_file():
        raise SoftEquivError(f"{picture} has no mask {mask}; add it, or take the picture away")
    return mask


def _voc_pairs(folder: Path, split: str) -> Pairs:
    names = folder / "ImageSets" / "Segmentation" / f"{split}.txt"
    if not names.is_file():
        raise SoftEquivError(
            f"there is no {names}; give the folder VOC2012 of VOCtrainval_11-May-2012.tar, which holds ImageSets, "
            "JPEGImages and SegmentationClass"
        )
    pairs = []
    seen: dict[Path, int] = {}
    for number, line in numbered_lines(names, "write a name a line, without its ending"):
        check_inside(line.strip(), f"{names}, line {number}")
        picture = folder / "JPEGImages" / f"{line.strip()}.jpg"
        before = seen.setdefault(picture, number)  # ./a is a
        if before != number:
            raise SoftEquivError(f"{names}, line {number}: {line.strip()!r} is in line {before} already; keep one")
        if not picture.is_file():
            raise SoftEquivError(
                f"{names}, line {number}: there is no picture {picture}; copy it, or take the line away"
            )
        pairs.append((picture, _mask_of(picture, folder / "SegmentationClass")))
    return tuple(pairs)


def _apart(pairs: Pairs, fraction: float, seed: int) -> tuple[Pairs, Pairs]:
    kept, held = (tuple(pairs[i] for i in part.tolist()) for part in held_out(len(pairs), fraction, seed))
    return kept, held


def _segmentation(parts: Sequence[Pairs], size: int, values: Values, prepare: Normalised) -> Segmentation:
    check_pillow()
    read = Fitted(size, values, tuple(round(255 * mean) for mean in prepare.mean))
    train, validation, test = (Files(pairs, read, prepare) for pairs in parts)
    return Segmentation(train, validation, test, values.classes)
