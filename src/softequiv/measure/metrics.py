"""How good and how equivariant is a model over a data set? The paper's metrics as `torchmetrics`, right across ranks.

Each class takes the outputs on x and on the moved x batch by batch, keeps sums, and computes all figures of its task.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from softequiv.actions import Acts, Moves, Pictures, Points
from softequiv.asking import check_finite, kl_divergence
from softequiv.errors import SoftEquivError
from softequiv.groups import Element
from softequiv.measure.functional import (
    check_labels,
    check_whole,
    confusion_counts,
    displacements,
    geometric_mean,
    ignored_label,
    mean_iou,
    overlap,
)

try:
    from torchmetrics import Metric
except ImportError as missing:
    raise ImportError(
        "softequiv.measure.metrics needs torchmetrics; install it with: pip install 'softequiv[metrics]'"
    ) from missing


class _Sums(Metric):
    """A metric whose states are sums, added over batches and ranks."""

    full_state_update = False
    is_differentiable = False

    def _add_sums(self, *names: str) -> None:
        for name in names:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, **terms: Tensor) -> None:
        """Add terms to sums, in float64 even where `.to(dtype)` of a model around the metric rounded the state."""
        for name, values in terms.items():
            setattr(self, name, getattr(self, name).double() + values.double().sum())

    def _add_counts(self, *names: str, shape: tuple[int, ...] = ()) -> None:
        for name in names:
            self.add_state(name, torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")


class ClassificationMetrics(_Sums):
    """Acc, aAcc, cAcc = sqrt(Acc aAcc), and iErr = mean KL[F(x) || F(g x)], from class scores on x and on g x.

    Accuracies lie in [0, 1]; iErr is in nats. Every sample counts alike, however batches are cut.

    >>> metrics = ClassificationMetrics()
    >>> metrics.update(torch.eye(2), torch.eye(2).flip(0), torch.tensor([0, 1]))
    >>> {name: round(value.item(), 3) for name, value in metrics.compute().items()}
    {'Acc': 1.0, 'aAcc': 0.0, 'cAcc': 0.0, 'iErr': 0.462}
    """

    right: Tensor
    moved_right: Tensor
    divergence: Tensor
    samples: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._add_counts("right", "moved_right", "samples")
        self._add_sums("divergence")

    def update(self, logits: Tensor, moved_logits: Tensor, labels: Tensor) -> None:
        """Add a batch: F(x) (N, K), F(g x) (N, K), labels (N,). Each sample may have its own g."""
        if logits.ndim != 2 or labels.shape != logits.shape[:1]:
            raise SoftEquivError(
                f"class scores are (N, K) and labels (N,); got {tuple(logits.shape)} and {tuple(labels.shape)}"
            )
        check_finite(logits, "class scores")
        check_finite(moved_logits, "class scores of moved data")
        divergence = kl_divergence(logits, moved_logits)
        check_labels(labels, logits.shape[1])
        self.right += (logits.argmax(1) == labels).sum()
        self.moved_right += (moved_logits.argmax(1) == labels).sum()
        self._add(divergence=divergence)
        self.samples += len(labels)

    def compute(self) -> dict[str, Tensor]:
        """The four figures of all samples so far."""
        samples = _counted(self.samples, "sample")
        plain, moved = self.right.double() / samples, self.moved_right.double() / samples
        return {
            "Acc": plain,
            "aAcc": moved,
            "cAcc": geometric_mean(plain, moved),
            "iErr": self.divergence.double() / samples,
        }


class SegmentationMetrics(_Sums):
    """mIoU, aIoU, cIoU = sqrt(mIoU aIoU), and eErr = mean over valid pixels of KL[F(g x)[u, v] || (g F(x))[u, v]].

    Labels are moved by the nearest pixel, and what they leave empty is ignored. The scores F(x) are moved by
    `pictures` as logits, so that they remain those of a distribution; pixels whose sample reads outside the frame are
    left out of eErr. Pixels labelled `ignore_index`, by default 255 where that is none of the classes, are left out of
    the IoUs, and so are classes that occur in neither labels nor predictions of the whole data set. In one
    MetricCollection with different options these need `compute_groups=False`, or they share their first one's sums.

    >>> from softequiv import C
    >>> metrics, g = SegmentationMetrics(classes=2), C(4).element(1)
    >>> scores, labels = torch.randn(1, 2, 4, 4), torch.randint(2, (1, 4, 4))
    >>> metrics.update(scores, Pictures()(scores, g), labels, g)  # a model that commutes with g
    >>> metrics.compute()["eErr"].item()
    0.0
    """

    counts: Tensor
    moved_counts: Tensor
    divergence: Tensor
    pixels: Tensor

    def __init__(
        self, classes: int, ignore_index: int | None = None, pictures: Pictures | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if classes < 1:
            raise SoftEquivError(f"there must be at least one class; got classes={classes}")
        self.classes, self.pictures = classes, pictures or Pictures()
        self.ignore_index = ignored_label(ignore_index, classes)
        self._add_counts("counts", "moved_counts", shape=(classes, classes))
        self._add_counts("pixels")
        self._add_sums("divergence")

    def update(
        self, logits: Tensor, moved_logits: Tensor, labels: Tensor, g: Element | Moves, chosen: Tensor | None = None
    ) -> None:
        """Add a batch: F(x) (N, K, H, W), F(g x) (N, K, H, W), labels of x (N, H, W).

        All samples were moved by the element g, or sample i by element chosen[i] of a pool, `chosen` (N,).
        """
        if labels.ndim != 3 or logits.shape != (len(labels), self.classes, *labels.shape[1:]):
            raise SoftEquivError(
                f"scores are (N, {self.classes}, H, W) and labels (N, H, W); got {tuple(logits.shape)} and "
                f"{tuple(labels.shape)}: resize the scores to the labels' size"
            )
        check_finite(logits, "pixel scores")
        check_finite(moved_logits, "pixel scores of moved data")
        scores, masks = (_acting(g, acts) for acts in (self.pictures, Pictures("nearest", fill=self.ignore_index)))
        if isinstance(g, Element):
            chosen = torch.zeros(len(labels), dtype=torch.int64)
        elif chosen is None:
            raise SoftEquivError("a pool of moves says nothing of each sample's element; give `chosen`, their numbers")
        divergence = kl_divergence(moved_logits, scores(logits, chosen), dim=1)  # (N, H, W)
        check_whole(labels)
        labels = labels.long()  # a narrow type may not hold the ignored label
        moved_labels = masks(labels, chosen)
        counts = confusion_counts(logits.argmax(1), labels, self.classes, self.ignore_index)
        moved_counts = confusion_counts(moved_logits.argmax(1), moved_labels, self.classes, self.ignore_index)
        inside = scores.valid(logits, chosen)
        valid = divergence if inside is None else divergence[inside]
        self.counts += counts
        self.moved_counts += moved_counts
        self._add(divergence=valid)
        self.pixels += valid.numel()

    def compute(self) -> dict[str, Tensor]:
        """The four figures of all pixels so far."""
        pixels = _counted(self.pixels, "valid pixel")
        for counts in (self.counts, self.moved_counts):
            _counted(counts.sum(), "labelled pixel")
        plain, moved = mean_iou(overlap(self.counts)), mean_iou(overlap(self.moved_counts))
        return {
            "mIoU": plain,
            "aIoU": moved,
            "cIoU": geometric_mean(plain, moved),
            "eErr": self.divergence.double() / pixels,
        }


class TrajectoryMetrics(_Sums):
    """ADE, FDE, aADE, aFDE, cADE = (ADE + aADE) / 2, cFDE likewise, and eErr = mean ||F(g x) - g F(x)||_2.

    ADE is the mean distance over agents and time steps, FDE over agents at the last step. The norm in eErr runs over
    all steps and coordinates of an agent's forecast, the mean over agents. `points` moves forecasts and futures, and
    must turn them about the centre about which the past was turned.

    >>> from softequiv import SO
    >>> metrics, g, past = TrajectoryMetrics(), SO(2).element(0.5), torch.randn(3, 8, 2)
    >>> future = 2 * past
    >>> metrics.update(2 * past, 2 * Points()(past, g), future, g)  # a model that commutes with g, and is right
    >>> round(metrics.compute()["cADE"].item(), 5), round(metrics.compute()["eErr"].item(), 5)
    (0.0, 0.0)
    """

    agents: Tensor
    steps: Tensor
    along: Tensor
    moved_along: Tensor
    final: Tensor
    moved_final: Tensor
    difference: Tensor

    def __init__(self, points: Points | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.points = points or Points()
        if self.points.centre == "mean":
            raise SoftEquivError(
                "forecasts and futures would each turn about their own mean, and not together; give the point about "
                "which the past was turned, or use the origin"
            )
        self._add_counts("agents", "steps")
        self._add_sums("along", "moved_along", "final", "moved_final", "difference")

    def update(self, forecast: Tensor, moved_forecast: Tensor, future: Tensor, g: Element) -> None:
        """Add a batch moved by one element: F(x), F(g x) and the true future of x, each (..., steps, d)."""
        check_finite(forecast, "forecasts")
        check_finite(moved_forecast, "forecasts of moved data")
        check_finite(future, "futures")
        if forecast.ndim < 2 or forecast.shape[-2] == 0:
            raise SoftEquivError(f"forecasts are (..., steps, d) with at least one step; got {tuple(forecast.shape)}")
        plain = displacements(forecast, future).double()  # (..., steps)
        moved = displacements(moved_forecast, self.points(future, g)).double()
        difference = displacements(moved_forecast, self.points(forecast, g)).double()
        self.agents += plain[..., -1].numel()
        self.steps += plain.numel()
        self._add(along=plain, moved_along=moved, final=plain[..., -1], moved_final=moved[..., -1])
        self._add(difference=torch.linalg.vector_norm(difference, dim=-1))

    def compute(self) -> dict[str, Tensor]:
        """The seven figures of all agents so far."""
        agents, steps = _counted(self.agents, "agent"), self.steps
        average, moved_average = self.along.double() / steps, self.moved_along.double() / steps
        final, moved_final = self.final.double() / agents, self.moved_final.double() / agents
        return {
            "ADE": average,
            "FDE": final,
            "aADE": moved_average,
            "aFDE": moved_final,
            "cADE": (average + moved_average) / 2,
            "cFDE": (final + moved_final) / 2,
            "eErr": self.difference.double() / agents,
        }


@lru_cache(maxsize=16)
def _acting(g: Element | Moves, acts: Acts) -> Moves:
    """One element, or a pool of them, acting as told; kept, as a pool is stacked once."""
    return Moves(acts, g.group, elements=[g]) if isinstance(g, Element) else g.on(acts)


def _counted(count: Tensor, what: str) -> Tensor:
    if int(count) == 0:
        raise SoftEquivError(f"no {what} has been seen, so there is no figure yet; call update() with data first")
    return count
