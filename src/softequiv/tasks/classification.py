"""What is it to classify? Cross entropy to learn by, and the paper's Acc, aAcc, cAcc and iErr to be judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from softequiv.actions import Moves, Pictures
from softequiv.asking.answers import asked, at_home, evaluating
from softequiv.tasks.base import Examples, Task


@dataclass(frozen=True)
class Classification(Task):
    """One label a sample. Targets are labels (N,), or probabilities (N, K) where samples were mixed.

    `acts` is how a group moves the inputs, with the value that lies outside of them: `Moves(task.acts, group, within)`.
    """

    classes: int
    label_smoothing: float = 0.0
    acts: Pictures = field(default_factory=Pictures)

    score: ClassVar[str] = "cAcc"

    def loss(self, answers: Tensor, targets: Tensor) -> Tensor:
        """-mean_n sum_k q_nk log softmax(answers)_nk, q the targets smoothed: (1 - s) q + s / K."""
        return functional.cross_entropy(answers, targets, label_smoothing=self.label_smoothing)

    def figures(self, model: nn.Module, examples: Examples, moves: Moves, *, batch: int = 512) -> dict[str, float]:
        """Acc, aAcc, cAcc = sqrt(Acc aAcc), iErr = mean KL[F(x) || F(g x)]."""
        return figures_by_range(model, examples, {"": moves}, batch)[""]


def figures_by_range(
    model: nn.Module, examples: Examples, ranges: Mapping[str, Moves], batch: int
) -> dict[str, dict[str, float]]:
    """Acc, aAcc, cAcc and iErr under several ranges of moves, by name; the upright pictures are asked about once."""
    from softequiv.measure.metrics import ClassificationMetrics  # needs torchmetrics

    metrics, seen = {name: ClassificationMetrics() for name in ranges}, 0
    with evaluating(model):
        for inputs, labels in examples.batches(batch):
            x = at_home(model, inputs)
            upright, labels = asked(model, x), labels.to(x.device)
            for name, moves in ranges.items():
                moved = asked(model, moves(x, moves.cycle(seen, len(x))))
                metrics[name].to(x.device).update(upright, moved, labels)
            seen += len(x)
    return {name: {key: value.item() for key, value in metric.compute().items()} for name, metric in metrics.items()}
