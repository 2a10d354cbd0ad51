"""Which figures does one batch give? Divergences, confusion counts and displacements, straight from their formulas.

Nothing here knows models, groups or batches before and after; sums over a data set are made in `metrics` and above.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softequiv.asking.divergence import check_same_shape, wide
from softequiv.errors import SoftEquivError

IGNORE_INDEX = 255
NO_LABEL = -(2**31)  # a label that no data set has


def geometric_mean(plain: Tensor, moved: Tensor) -> Tensor:
    """sqrt(plain * moved): the combined score of accuracies or IoUs, zero as soon as one of them is.

    >>> geometric_mean(torch.tensor(0.9), torch.tensor(0.4))
    tensor(0.6000)
    """
    return (plain * moved).sqrt()


def confusion_counts(prediction: Tensor, labels: Tensor, classes: int, ignore_index: int | None = None) -> Tensor:
    """How often label k was predicted as j, entries labelled `ignore_index` left out: (classes, classes) int64.

    Shapes: prediction and labels alike, whole numbers.

    >>> confusion_counts(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
    tensor([[1, 1],
            [0, 1]])
    """
    check_same_shape(prediction, labels, "predictions and labels")
    kept = labels != ignore_index if ignore_index is not None else torch.ones_like(labels, dtype=torch.bool)
    prediction, labels = prediction[kept], labels[kept]
    check_labels(labels, classes)
    check_labels(prediction, classes, "predictions")
    return torch.bincount(labels.long() * classes + prediction.long(), minlength=classes**2).reshape(classes, classes)


def overlap(counts: Tensor) -> Tensor:
    """Entries in the intersection and in the union of prediction and label, per class: (..., K, K) of
    `confusion_counts` to (..., 2 K).
    """
    both = counts.diagonal(dim1=-2, dim2=-1)
    return torch.cat([both, counts.sum(-2) + counts.sum(-1) - both], -1)


def mean_iou(overlap: Tensor) -> Tensor:
    """Mean over classes of intersection / union, float64, of sums or means of `overlap`: (..., 2 K) to (...).

    Classes that occur in neither labels nor predictions have no IoU and are left out.

    >>> mean_iou(overlap(torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]]))).item()
    0.5
    """
    intersections, unions = overlap.double().chunk(2, -1)
    present = unions > 0
    return (intersections / unions.where(present, 1.0)).sum(-1) / present.sum(-1)


def displacements(forecast: Tensor, future: Tensor) -> Tensor:
    """||forecast - future||_2 at each step: (..., steps, d) twice to (..., steps), in at least float32.

    Their mean is the average displacement error (ADE); that of the last step, the final one (FDE).

    >>> displacements(torch.zeros(1, 2, 2), torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]))
    tensor([[5., 1.]])
    """
    check_same_shape(forecast, future, "forecast and future")
    return torch.linalg.vector_norm(wide(forecast) - wide(future), dim=-1)


def ignored_label(ignore_index: int | None, classes: int) -> int:
    """The label of pixels that belong to no class: as given, or 255 as in PASCAL VOC where that is none of the classes.

    >>> ignored_label(None, 21), ignored_label(0, 21)
    (255, 0)
    """
    check_ignored(ignore_index)
    if ignore_index is not None:
        return ignore_index
    return IGNORE_INDEX if classes <= IGNORE_INDEX else NO_LABEL


def check_ignored(ignore_index: int | None) -> None:
    """Raise a sentence unless it is a label, or none is given."""
    if ignore_index is not None and (not isinstance(ignore_index, int) or isinstance(ignore_index, bool)):
        raise SoftEquivError(
            f"ignore_index is the label of pixels that belong to no class, a whole number such as 255; got "
            f"{ignore_index!r}"
        )


def check_labels(labels: Tensor, classes: int, what: str = "labels") -> None:
    """Raise a sentence unless every label is one of 0, ..., classes - 1."""
    check_whole(labels, what)
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise SoftEquivError(
            f"{what} must lie in 0..{classes - 1}, as there are {classes} classes; got {int(wrong[0])}: check that "
            "labels and model belong together, or name it as ignore_index where a metric has one"
        )


def check_whole(labels: Tensor, what: str = "labels") -> None:
    """Raise a sentence unless labels are whole numbers."""
    if labels.is_floating_point() or labels.is_complex():
        raise SoftEquivError(f"{what} are whole numbers; got {labels.dtype}")
