"""Which variations of training pictures do names stand for? Those of `augment`, in the order in which they are made:
pictures are cut and coloured before they are turned, and hidden or mixed after it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from softequiv.errors import SoftEquivError
from softequiv.tasks.augment import (
    Chain,
    CutMix,
    Either,
    Erased,
    Flip,
    Mixup,
    RandAugment,
    Resized,
    Scaled,
    Transform,
    torchvision_transforms,
)
from softequiv.tasks.named import Opened
from softequiv.tasks.preparation import normalised
from softequiv.tasks.segmentation import Segmentation


@dataclass(frozen=True)
class Variations:
    """What is done to training pictures before they are turned, and after."""

    before: tuple[Transform, ...] = ()
    after: tuple[Transform, ...] = ()

    def around(self, turning: Transform | None) -> Transform | None:
        """All of it as one transform, with the turning in its place; None where nothing is done."""
        steps = (*self.before, *((turning,) if turning else ()), *self.after)
        return Chain(steps) if steps else None


def _cropped(opened: Opened) -> Transform:
    side = int(opened.task.train.batch(torch.zeros(1, dtype=torch.long))[0].shape[-1])
    return Scaled(side) if isinstance(opened.task, Segmentation) else Resized(side)


def _randomly_edited(opened: Opened) -> Transform:
    torchvision_transforms()  # absent, it is missed before the training and not in it
    return RandAugment(normalised(opened.prepared))


BEFORE: dict[str, Callable[[Opened], Transform]] = {
    "crop": _cropped,
    "flip": lambda opened: Flip(),
    "randaugment": _randomly_edited,
}
HIDING: dict[str, Callable[[Opened], Transform]] = {"erase": lambda opened: Erased()}
MIXING: dict[str, Callable[[Opened], Transform]] = {
    "mixup": lambda opened: Mixup(opened.task.classes),
    "cutmix": lambda opened: CutMix(opened.task.classes),
}
NAMES = (*BEFORE, *HIDING, *MIXING)
MASKED = ("crop", "flip")  # what masks follow


def variations(text: str, opened: Opened) -> Variations:
    """Variations by their names, such as "crop,flip,mixup", for the pictures of a problem; the order does not matter.

    With mixup and cutmix each batch has one of them, by even chances.
    """
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            raise SoftEquivError(
                f"pictures are varied by {', '.join(NAMES)}; got {name!r}{f': did you mean {near[0]}?' if near else ''}"
            )
        if isinstance(opened.task, Segmentation) and name not in MASKED:
            raise SoftEquivError(
                f"{name} would leave masks behind; pictures with masks are varied by {' and '.join(MASKED)}"
            )

    def made(kind: dict[str, Callable[[Opened], Transform]]) -> tuple[Transform, ...]:
        return tuple(make(opened) for name, make in kind.items() if name in chosen)

    mixed = made(MIXING)
    return Variations(made(BEFORE), (*made(HIDING), *((Either(*mixed),) if len(mixed) == 2 else mixed)))
