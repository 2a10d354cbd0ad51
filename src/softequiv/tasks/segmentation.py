"""What is it to segment? Cross entropy of every pixel, and the paper's mIoU, aIoU, cIoU and eErr."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from softequiv.actions import Moves, Pictures
from softequiv.asking.answers import asked, at_home, evaluating
from softequiv.errors import SoftEquivError
from softequiv.measure.functional import IGNORE_INDEX
from softequiv.tasks.base import Examples, Task

MASKS = Pictures("nearest", fill=IGNORE_INDEX)  # how labels of pixels move: what comes into the frame has no class


@dataclass(frozen=True)
class Segmentation(Task):
    """One label a pixel, (N, H, W); pixels labelled 255 belong to no class and are left out.

    Scores of fewer pixels than the mask, such as those of SegFormer, are upsampled to it.
    """

    classes: int
    acts: Pictures = field(default_factory=Pictures)

    score: ClassVar[str] = "cIoU"

    def __post_init__(self) -> None:
        if not 1 <= self.classes <= IGNORE_INDEX:
            raise SoftEquivError(f"masks are bytes with 1 to {IGNORE_INDEX} classes; got {self.classes}")

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """-sum log softmax(answers)[label] over labelled pixels, divided by their number; 0 where there is none."""
        labels = targets.long()
        scores = upsampled(answers, targets)
        total = functional.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return total / (labels != IGNORE_INDEX).sum().clamp(min=1)

    def figures(self, model: nn.Module, examples: Examples, moves: Moves, *, batch: int = 512) -> dict[str, float]:
        """mIoU, aIoU, cIoU = sqrt(mIoU aIoU), eErr = mean over valid pixels of KL[F(g x) || g F(x)]."""
        from softequiv.measure.metrics import SegmentationMetrics  # needs torchmetrics

        metrics, seen = SegmentationMetrics(self.classes), 0
        with evaluating(model):
            for inputs, targets in examples.batches(batch):
                x = at_home(model, inputs)
                labels, chosen = targets.to(x.device), moves.cycle(seen, len(x))
                plain, moved = (upsampled(asked(model, part), labels) for part in (x, moves(x, chosen)))
                metrics.to(x.device).update(plain, moved, labels, moves, chosen)
                seen += len(x)
        return {name: value.item() for name, value in metrics.compute().items()}


def upsampled(answers: Tensor, targets: Tensor) -> Tensor:
    """Scores (N, K, h, w) read bilinearly at the pixels of masks (N, H, W): (N, K, H, W)."""
    if answers.ndim != 4:
        raise SoftEquivError(
            f"scores of pixels are (N, K, h, w); the model answers {tuple(answers.shape)}: use one with a "
            "segmentation head"
        )
    if answers.shape[-2:] == targets.shape[-2:]:
        return answers
    return functional.interpolate(answers, targets.shape[-2:], mode="bilinear", align_corners=False)
