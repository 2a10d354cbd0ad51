"""What was observed? `measure` moves a user's data by drawn group elements and tells how the model's answers follow.

Every figure comes with a bootstrap interval over the samples, given the elements that were drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv.actions import Acts, Pictures, Still
from softequiv.adapt.plan import as_group
from softequiv.errors import SoftEquivError
from softequiv.groups import Element, Group
from softequiv.measure.answers import asked, at_home, evaluating
from softequiv.measure.bootstrap import Statistic, interval, mean
from softequiv.measure.data import Batch, batches, count
from softequiv.measure.elements import Elements, drawn
from softequiv.measure.functional import check_finite, check_labels, confusion_counts, kl_divergence
from softequiv.measure.jacobian import PROBES, jacobian_norm, probes_for
from softequiv.measure.lie import lie_derivative
from softequiv.measure.progress import progress

IGNORE_INDEX = 255  # the label of pixels that belong to no class, as in PASCAL VOC

Columns = dict[str, Tensor]  # name -> (N,) or (N, d), a row per sample


@dataclass(frozen=True)
class Row:
    """One figure: its value, its 95% interval, from how many samples, and what it is."""

    name: str
    value: float
    low: float
    high: float
    n: int
    formula: str


@dataclass(frozen=True)
class Measurement:
    """What `measure` found; print it, or take a row by its name: `measurement["iErr"].value`."""

    group: Group
    within: float | None
    samples: int
    elements: int
    seed: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise SoftEquivError(f"no figure is called {name!r}; there are {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        where = "all of it" if self.within is None else f"within {self.within!r}"
        title = f"{self.group}, {where}: {self.samples} samples, {self.elements} elements drawn, seed {self.seed}"
        cells = [("", "value", "95% interval", "n", "")]
        for row in self.rows:
            cells.append((row.name, f"{row.value:.4g}", f"{row.low:.4g} .. {row.high:.4g}", str(row.n), row.formula))
        return "\n".join([title, *aligned(cells), *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return {
            "group": str(self.group),
            "within": None if self.within is None else float(self.within),
            "samples": self.samples,
            "elements": self.elements,
            "seed": self.seed,
            "rows": {
                row.name: {key: value for key, value in asdict(row).items() if key != "name"} for row in self.rows
            },
            "notes": list(self.notes),
        }


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with the columns one under the other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def combined(means: Tensor) -> Tensor:
    """sqrt(a b)."""
    return means.prod(-1).sqrt()


def ratio(means: Tensor) -> Tensor:
    """a / b."""
    return means[..., 0] / means[..., 1]


def mean_iou(means: Tensor) -> Tensor:
    """Mean over classes of intersection / union, from (intersections, unions) per class; absent classes left out."""
    intersections, unions = means.chunk(2, -1)
    present = unions > 0
    return (intersections / unions.where(present, 1.0)).sum(-1) / present.sum(-1)


def combined_iou(means: Tensor) -> Tensor:
    """sqrt(mIoU aIoU)."""
    upright, moved = means.chunk(2, -1)
    return (mean_iou(upright) * mean_iou(moved)).sqrt()


@dataclass(frozen=True)
class Figure:
    """How a row is made: a statistic of the means of some columns."""

    name: str
    formula: str
    columns: tuple[str, ...]
    statistic: Statistic = mean


FIGURES = (
    Figure("accuracy", "class of F(x) is the label's", ("right",)),
    Figure("accuracy moved", "class of F(gx) is the label's", ("right moved",)),
    Figure("accuracy combined", "sqrt(accuracy * accuracy moved)", ("right", "right moved"), combined),
    Figure("iErr", "KL[F(x) || F(gx)]", ("kl",)),
    Figure("mIoU", "intersection over union, mean over classes", ("overlap",), mean_iou),
    Figure("aIoU", "the same, pictures and labels moved", ("overlap moved",), mean_iou),
    Figure("cIoU", "sqrt(mIoU * aIoU)", ("overlap", "overlap moved"), combined_iou),
    Figure("eErr", "KL[F(gx) || gF(x)] per pixel inside the frame", ("pixel kl",), ratio),
    Figure("relative change", "||F(gx) - gF(x)|| / ||F(x)||", ("relative",)),
    Figure("relative error", "||F(gx) - gF(x)|| / (||J_F(x)||_F ||x||)", ("paper",)),
    Figure("Lie derivative", "||d/dt g_t^-1 F(g_t x)|| / ||F(x)|| at t = 0, by jvp", ("lie",)),
)


@dataclass(frozen=True)
class Setting:
    """What one measurement asks of every batch."""

    group: Group
    acts: Acts
    target: Acts
    ignore_index: int

    def is_map(self, y: Tensor) -> bool:
        """Whether answers are scores per pixel, (N, K, h, w)."""
        return isinstance(self.target, Pictures) and y.ndim == 4

    def is_scores(self, y: Tensor) -> bool:
        """Whether answers are class scores, (N, K)."""
        return isinstance(self.target, Still) and y.ndim == 2 and y.shape[1] > 1

    def compared(self, y: Tensor, x: Tensor) -> Tensor:
        """Answers where they are compared: scores per pixel at the size of the picture."""
        if not self.is_map(y) or y.shape[-2:] == x.shape[-2:]:
            return y
        return functional.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)

    def scores(self, model: nn.Module, x: Tensor) -> Tensor:
        """F(x) as it is compared."""
        return self.compared(asked(model, x), x)

    def labels(self, batch: Batch, y: Tensor) -> Tensor | None:
        """The labels beside the answers y, checked."""
        if batch.labels is None:
            return None
        if not (self.is_map(y) or self.is_scores(y)):
            raise SoftEquivError(
                f"labels say which class is right, and answers of shape {tuple(y.shape)} under {self.target} are no "
                "class scores; leave the labels out"
            )
        labels, expected = batch.labels.to(y.device).long(), (len(y), *y.shape[2:])
        if tuple(labels.shape) != expected:
            raise SoftEquivError(
                f"answers of shape {tuple(y.shape)} need labels of shape {expected}; got {tuple(labels.shape)}"
            )
        check_labels(labels[labels != self.ignore_index] if self.is_map(y) else labels, y.shape[1])
        return labels


def default_target(acts: Acts, y: Tensor) -> Acts:
    """How answers move where the user did not say: class scores stand still, maps of scores move as the pictures."""
    if isinstance(acts, Pictures) and y.ndim == 2:
        return Still()
    if isinstance(acts, Pictures) and y.ndim == 4:
        return Pictures(acts.interpolation)
    raise SoftEquivError(
        f"how does the group act on answers of shape {tuple(y.shape)}? Say it with target=..., such as Still() for "
        "what stays, Points() or Vectors(rep)"
    )


def norms(y: Tensor) -> Tensor:
    """The norm of every sample: (N, ...) -> (N,)."""
    return y.flatten(1).to(torch.promote_types(y.dtype, torch.float32)).norm(dim=1)


def overlaps(y: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Pixels in the intersection and in the union of prediction and label, per class: (N, 2 K)."""
    pairs = zip(y.argmax(1), labels, strict=True)
    counts = torch.stack([confusion_counts(said, true, y.shape[1], ignore_index) for said, true in pairs])
    both = counts.diagonal(dim1=1, dim2=2)
    return torch.cat([both, counts.sum(1) + counts.sum(2) - both], 1)


def upright_columns(setting: Setting, y: Tensor, labels: Tensor | None) -> Columns:
    """What the answers to data as it is say."""
    if labels is None:
        return {}
    if setting.is_map(y):
        return {"overlap": overlaps(y, labels, setting.ignore_index)}
    return {"right": y.argmax(1) == labels}


def moved_columns(setting: Setting, y: Tensor, moved: Tensor, labels: Tensor | None, g: Element) -> Columns:
    """What the answers to moved data F(gx) say beside those to data as it is, y = F(x)."""
    check_finite(moved, "the model's answers to moved data")
    expected, inside = setting.target(y, g), setting.target.valid(y, g)
    if inside is not None and not inside.any():
        raise SoftEquivError(
            f"no entry of an answer of shape {tuple(y.shape)} stays inside the frame under {g}; use larger pictures, "
            "or a target with another interpolation"
        )
    change = moved - expected if inside is None else (moved - expected) * inside
    columns: Columns = {"change": norms(change)}
    if setting.is_scores(y):
        columns["kl"] = kl_divergence(y, moved, 1)
        if labels is not None:
            columns["right moved"] = moved.argmax(1) == labels
    if setting.is_map(y) and y.shape[1] > 1:
        weight = torch.ones(y.shape[-2:], device=y.device) if inside is None else inside.to(torch.float32)
        divergence = kl_divergence(moved, expected, 1) * weight
        columns["pixel kl"] = torch.stack([divergence.flatten(1).sum(1), weight.sum().expand(len(y))], 1)
        if labels is not None:
            turned = Pictures("nearest", fill=setting.ignore_index)(labels, g)
            columns["overlap moved"] = overlaps(moved, turned, setting.ignore_index)
    return columns


def average(columns: Iterable[Columns]) -> Columns:
    """The mean of every column over the elements."""
    lists: dict[str, list[Tensor]] = defaultdict(list)
    for some in columns:
        for name, values in some.items():
            lists[name].append(values.double())
    return {name: torch.stack(values).mean(0) for name, values in lists.items()}


def measure(
    model: nn.Module,
    data: Any,
    group: Group | str,
    within: float | None = None,
    *,
    acts: Acts = Pictures(),  # noqa: B008  (frozen)
    target: Acts | None = None,
    elements: Elements = 4,
    batch_size: int = 32,
    jacobians: int = 16,
    probes: int = PROBES,
    ignore_index: int = IGNORE_INDEX,
    seed: int = 0,
) -> Measurement:
    """How equivariant is the model on this data? F(gx) against gF(x), for elements g drawn from the range.

    `data`: a tensor (N, C, H, W), a pair (inputs, labels), a dict (pixel_values, labels), or a loader of such batches,
    which are streamed. Labels, where there are any, are (N,), or (N, H, W) for scores per pixel. `acts` says how the
    group moves inputs, `target` how it moves answers: by default class scores (N, K) stand still, and scores per
    pixel (N, K, h, w), resized to the picture, move with it; pixels that leave the frame are left out. For every batch
    `elements` are drawn (or given), and each figure is a mean over samples and elements, with a 95% interval over the
    samples. The relative error is taken from the first `jacobians` samples, with an exact Jacobian for up to 64
    outputs and `probes` random probes for more. Runs on the model's device and in its precision.

    >>> net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> found = measure(net, torch.randn(8, 1, 9, 9), "C4")
    >>> [row.name for row in found.rows]
    ['iErr', 'relative change', 'relative error']
    """
    group = as_group(group)
    if within is not None:
        group.reach(within)
    generator, signs = (torch.Generator().manual_seed(seed) for _ in range(2))
    columns: dict[str, list[Tensor]] = defaultdict(list)
    samples = moves = measured = 0
    notes: dict[str, str] = {}
    with evaluating(model):
        for batch in progress(batches(data, batch_size), "measuring", count(data, batch_size)):
            x = at_home(model, batch.inputs)
            acts.check(group, x)
            raw = asked(model, x)
            check_finite(raw, "the model's answers")
            setting = Setting(group, acts, target or default_target(acts, raw), ignore_index)
            fn, y = partial(setting.scores, model), setting.compared(raw, x)
            setting.target.check(group, y)
            labels, sizes = setting.labels(batch, y), positive(norms(y), "the answer", "look for dead layers")
            chosen = drawn(group, within, elements, generator)
            found = average(moved_columns(setting, y, fn(acts(x, g)), labels, g) for g in chosen)
            found |= upright_columns(setting, y, labels)
            change = found.pop("change")
            found["relative"] = change / sizes
            few = min(max(jacobians - measured, 0), len(x))
            if few:
                number = probes_for(y[0].numel(), probes)
                notes["jacobian"] = f"Jacobian: {'exact' if number is None else f'{number} random probes a sample'}"
                jacobian = jacobian_norm(fn, x[:few], probes=number, generator=signs)
                scale = positive(jacobian * norms(x[:few]), "||J_F(x)||_F ||x||", "leave it out with jacobians=0")
                found["paper"] = change[:few] / scale
            if len(group.lie) and "lie" not in notes:
                try:
                    found["lie"] = lie_derivative(fn, x, group, acts, setting.target) / sizes
                except (RuntimeError, SoftEquivError) as problem:  # it has answered before, without derivatives
                    reason = str(problem.__cause__ or problem).splitlines()[0]
                    notes["lie"] = f"Lie derivative: not measured, as the model has no forward derivative ({reason})"
            for name, values in found.items():
                columns[name].append(values.double().cpu())
            samples, moves, measured = samples + len(x), moves + len(chosen), measured + few
    if not samples:
        raise SoftEquivError("there is nothing to measure: the data is empty")
    table = {name: torch.cat(parts).reshape(sum(map(len, parts)), -1) for name, parts in columns.items()}
    if "lie" in notes:
        table.pop("lie", None)
    return Measurement(group, within, samples, moves, seed, tuple(rows(table, seed)), tuple(notes.values()))


def positive(sizes: Tensor, what: str, remedy: str) -> Tensor:
    """The same sizes, by which errors are divided."""
    zeros = int((sizes == 0).sum())
    if zeros:
        raise SoftEquivError(f"{what} is zero at {zeros} samples, so no error is relative to it; {remedy}")
    return sizes


def rows(table: Columns, seed: int) -> Iterable[Row]:
    """Every figure whose columns were filled."""
    for figure in FIGURES:
        if all(name in table for name in figure.columns):
            values = torch.cat([table[name] for name in figure.columns], 1)
            yield Row(figure.name, *interval(values, figure.statistic, seed=seed), len(values), figure.formula)
