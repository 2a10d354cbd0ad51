"""Which class is each picture of a folder in? That of its folder, or of its line in labels.tsv.

ImageNet as it is usually laid out is such a folder.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from softequiv._files import path_of
from softequiv.errors import SoftEquivError
from softequiv.tasks.base import Prepare
from softequiv.tasks.classification import Classification
from softequiv.tasks.decoding import ENDINGS, check_pillow, is_picture, pictures_below
from softequiv.tasks.files import Files, Labelled, Normalised
from softequiv.tasks.labels import check_inside, numbered_lines
from softequiv.tasks.splits import held_out, of_each_class

LABELS = "labels.tsv"
CHOOSING = ("val", "valid", "validation")  # what the folder is called whose pictures choose the model
NAMED = 3  # how many classes a warning names
DIGITS = 9  # of the number of a class, at most
IMAGENET = Normalised((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

Items = tuple[tuple[Path, int], ...]


@dataclass(frozen=True)
class Split:
    """Pictures with the numbers of their classes: those that teach, that choose the model, and that test it."""

    train: Items
    validation: Items
    test: Items
    classes: int
    names: tuple[str, ...]


def image_folder(
    folder: str | Path,
    *,
    size: int = 224,
    crop: float = 0.875,
    prepare: Prepare = IMAGENET,
    validation: float = 0.1,
    test: float = 0.5,
    crops: bool = False,
    seed: int = 0,
    classes: int | None = None,
) -> Classification:
    """Pictures in class folders below train/, val/ and test/, or below train/ and val/ (as in ImageNet; val/ is then
    the test), or in one folder of class folders, or listed in its labels.tsv.

    val/ may be called valid/ or validation/. Without train/, a share `test` of every class is the test. If there are
    both val/ and test/, val/ chooses the model; otherwise a share `validation` of the training pictures does. Pictures
    are the middle square of size x size pixels, with the shorter side scaled to size / crop; with `crops`, training
    pictures are random rectangles, drawn anew in every epoch.
    """
    check_pillow()
    found = split_folder(folder, validation=validation, test=test, seed=seed, classes=classes)
    plain, drawn = Labelled(size, crop), Labelled(size, crop, crops=crops)
    return Classification(
        Files(found.train, drawn, prepare, seed if crops else None),
        Files(found.validation, plain, prepare),
        Files(found.test, plain, prepare),
        found.classes,
    )


def split_folder(
    folder: str | Path, *, validation: float = 0.1, test: float = 0.5, seed: int = 0, classes: int | None = None
) -> Split:
    """The pictures of a folder as `image_folder` shares them out."""
    folder = _existing(path_of(folder))
    if classes is not None and type(classes) is not int:
        raise SoftEquivError(f"the number of classes is a whole number; got {classes!r}")
    laid_out = (folder / "train").is_dir()
    learning, choosing, asked, names = _laid_out(folder) if laid_out else _drawn(folder, test, seed)
    count = classes if classes is not None else max(len(names), 1 + max(label for _, label in (*learning, *asked)))
    check_labels(folder, (*learning, *choosing, *asked), count)
    if not choosing:
        remedy = "add pictures, or lay them out in folders train, val and test"
        kept, held = held_out(len(learning), validation, seed, remedy)
        learning, choosing = (tuple(learning[number] for number in part.tolist()) for part in (kept, held))
    unlearnt = sorted({label for _, label in (*choosing, *asked)} - {label for _, label in learning})
    if unlearnt:
        some = ", ".join(repr(names[label]) if names else str(label) for label in unlearnt[:NAMED])
        more = f" and {len(unlearnt) - NAMED} others" if len(unlearnt) > NAMED else ""
        warnings.warn(
            f"{folder}: no picture of class {some}{more} is left to learn from, as those held out for the test and to "
            "choose the model are all there are; add pictures of it, or take it away",
            stacklevel=3,
        )
    return Split(learning, choosing, asked, count, names)


def _laid_out(folder: Path) -> tuple[Items, Items, Items, tuple[str, ...]]:
    """What train/, val/ and test/ hold; val/ is the test where there is no test/, and then nothing chooses."""
    choosing = [name for name in CHOOSING if (folder / name).is_dir()]
    if len(choosing) > 1:
        raise SoftEquivError(f"{folder} has folders {' and '.join(choosing)}, which are two names for one; keep one")
    parts = [name for name in ("train", *choosing, "test") if (folder / name).is_dir()]
    if len(parts) == 1:
        raise SoftEquivError(f"{folder} has a folder train and none of test, val; put the pictures of a test there")
    found = {name: labelled(folder / name) for name in parts}
    learning, names = found["train"]
    for part, (_, own) in found.items():
        if own != names:
            odd = sorted(set(names) ^ set(own))[0]
            raise SoftEquivError(
                f"the class {odd!r} is in one of {folder / 'train'} and {folder / part} only; complete it"
            )
    return learning, found[parts[1]][0] if len(parts) == 3 else (), found[parts[-1]][0], names


def _drawn(folder: Path, test: float, seed: int) -> tuple[Items, Items, Items, tuple[str, ...]]:
    """What one folder of classes holds, with `test` of every class drawn for the test."""
    items, names = labelled(folder)
    refuse_parts(folder, names)
    apart = set(of_each_class(torch.tensor([label for _, label in items]), test, seed).tolist())
    learning = tuple(item for i, item in enumerate(items) if i not in apart)
    asked = tuple(item for i, item in enumerate(items) if i in apart)
    if not learning:
        raise SoftEquivError(
            f"{test:g} of every class for the test leaves no picture of {folder} to learn from; add pictures, or lay "
            "them out in folders train, val and test"
        )
    return learning, (), asked, names


def labelled(folder: Path) -> tuple[Items, tuple[str, ...]]:
    """Pictures with the number of their class, and the names of the classes where folders are theirs."""
    if (folder / LABELS).is_file():
        return _listed(folder), ()
    inner = sorted(path for path in _existing(folder).iterdir() if path.is_dir() and not path.name.startswith("."))
    if not inner:
        raise SoftEquivError(f"{folder} holds neither {LABELS} nor a folder for each class; put the pictures into such")
    items = []
    for number, path in enumerate(inner):
        pictures = pictures_below(path)
        if not pictures:
            raise SoftEquivError(
                f"the class folder {path} holds no pictures; fill it or take it away. Known endings are "
                f"{', '.join(ENDINGS)}"
            )
        items += [(picture, number) for picture in pictures]
    return tuple(items), tuple(path.name for path in inner)


def refuse_parts(folder: Path, names: Collection[str]) -> None:
    """Raise a sentence where folders are those of a training, the pictures that teach, choose and test, not classes."""
    parts = [name for name in ("train", *CHOOSING, "test") if name in names]
    if len(parts) > 1:
        raise SoftEquivError(
            f"{folder} holds {', '.join(parts)}, which are parts of the data and no classes; give one of them, such as "
            f"{folder / parts[-1]}"
        )


def check_labels(folder: Path, items: Items, classes: int) -> None:
    """Raise a sentence naming the first picture whose label is none of 0..classes-1, or that has two."""
    seen: set[Path] = set()
    for path, label in items:
        if not 0 <= label < classes:
            raise SoftEquivError(
                f"{folder}: {path.name} has the label {label}, which is none of 0..{classes - 1}; "
                f"correct {LABELS}, or the number of classes"
            )
        if path in seen:
            raise SoftEquivError(f"{folder}: {path.name} is listed more than once; keep one line of {LABELS}")
        seen.add(path)


def _listed(folder: Path) -> Items:
    """Lines `file name, tab, number of the class` of labels.tsv; files lie beside it or in images/."""
    items = []
    for number, line in numbered_lines(folder / LABELS, "write a file name, a tab and a class number a line"):
        name, *rest = line.split("\t")
        if len(rest) != 1 or not rest[0].strip().isdecimal() or len(rest[0]) > DIGITS:
            raise SoftEquivError(
                f"{folder / LABELS}, line {number}: {line[:60]!r} is not a file name, a tab and the number of a class"
            )
        check_inside(name, f"{folder / LABELS}, line {number}")
        path = next((place for place in (folder / name, folder / "images" / name) if is_picture(place)), None)
        if path is None:
            raise SoftEquivError(
                f"{folder / LABELS}, line {number}: there is no picture {name!r} in {folder} or its folder images; "
                "copy it there, or take the line away"
            )
        items.append((path, int(rest[0])))
    return tuple(items)


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise SoftEquivError(f"there is no folder {str(folder)!r}; give a folder of pictures in folders of classes")
    return folder
