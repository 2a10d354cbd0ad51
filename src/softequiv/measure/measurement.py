"""What was observed? `measure` moves a user's data by drawn group elements and tells how the model's answers follow.

Every figure comes with an interval over the samples, each of which has its own elements: accuracies with one that holds
for every number of samples, others with one by bootstrap, which is approximate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softequiv._text import aligned
from softequiv.actions import Acts, Moves, Pictures, Still
from softequiv.adapt.group import chosen_group
from softequiv.asking.answers import asked, at_home, at_size_of, check_alone, check_finite, default_target, evaluating
from softequiv.asking.data import Batch, batches, count
from softequiv.asking.divergence import kl_divergence
from softequiv.errors import SoftEquivError, check_count, check_seed
from softequiv.groups import Element, Group
from softequiv.measure.bootstrap import Statistic, combined, exact_interval, interval, mean
from softequiv.measure.elements import Elements, as_range, check_elements, drawn
from softequiv.measure.frame import inside_each, norms
from softequiv.measure.functional import check_ignored, check_labels, confusion_counts, ignored_label, mean_iou, overlap
from softequiv.measure.jacobian import PROBES, jacobian_norm, probes_for
from softequiv.measure.lie import lie_derivative, staying
from softequiv.measure.progress import progress

Columns = dict[str, Tensor]  # name -> (N,) or (N, d), a row per sample
NO_OWN_JACOBIAN = "it has no Jacobian of its own; keep running statistics"
INTERVAL = "95% interval (~ bootstrap, approximate)"


@dataclass(frozen=True)
class Row:
    """One figure: its value, its 95% interval, from how many samples, and what it is.

    The interval is `exact` where it holds at least as often as it says for every n, as those of accuracies do; else it
    is by bootstrap, and printed with a ~. A single sample says next to nothing of others, and no interval is printed.
    """

    name: str
    value: float
    low: float
    high: float
    n: int
    formula: str
    exact: bool = False

    @property
    def interval(self) -> str:
        """The interval as it is printed; empty for a single sample."""
        about = "" if self.exact else "~ "
        return f"{about}{self.low:.4g} .. {self.high:.4g}" if self.n > 1 else ""


@dataclass(frozen=True)
class Measurement:
    """What `measure` found; print it, or take a row by its name: `measurement["iErr"].value`.

    `elements` is their number for every sample: each has its own draws, or all have those that were `given`, for which
    alone the intervals then speak.
    """

    group: Group
    within: float | None
    samples: int
    elements: int
    given: bool
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
        how = "given" if self.given else "drawn for each"
        title = f"{self.group}, {where}: {self.samples} samples, {self.elements} elements {how}, seed {self.seed}"
        cells = [("", "value", INTERVAL, "n", "")]
        for row in self.rows:
            cells.append((row.name, f"{row.value:.4g}", row.interval, str(row.n), row.formula))
        return "\n".join([title, *aligned(cells), *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return {
            "group": str(self.group),
            "within": None if self.within is None else float(self.within),
            "samples": self.samples,
            "elements": self.elements,
            "given": self.given,
            "seed": self.seed,
            "rows": {
                row.name: {key: value for key, value in asdict(row).items() if key != "name"} for row in self.rows
            },
            "notes": list(self.notes),
        }


def ratio(means: Tensor) -> Tensor:
    """a / b."""
    return means[..., 0] / means[..., 1]


def combined_iou(means: Tensor) -> Tensor:
    """sqrt(mIoU aIoU)."""
    upright, moved = means.chunk(2, -1)
    return (mean_iou(upright) * mean_iou(moved)).sqrt()


@dataclass(frozen=True)
class Figure:
    """How a row is made: a statistic of the means of some columns; `shares` are columns whose entries lie in [0, 1]."""

    name: str
    formula: str
    columns: tuple[str, ...]
    statistic: Statistic = mean
    shares: bool = False


FIGURES = (
    Figure("accuracy", "class of F(x) is the label's", ("right",), shares=True),
    Figure("accuracy moved", "class of F(gx) is the label's", ("right moved",), shares=True),
    Figure("accuracy combined", "sqrt(accuracy * accuracy moved)", ("right", "right moved"), combined, shares=True),
    Figure("iErr", "KL[F(x) || F(gx)]", ("kl",)),
    Figure("mIoU", "intersection over union, mean over classes", ("overlap",), mean_iou),
    Figure("aIoU", "the same, pictures and labels moved", ("overlap moved",), mean_iou),
    Figure("cIoU", "sqrt(mIoU * aIoU)", ("overlap", "overlap moved"), combined_iou),
    Figure("eErr", "KL[F(gx) || gF(x)] per pixel inside the frame", ("pixel kl",), ratio),
    Figure("relative change", "||F(gx) - gF(x)|| / ||F(x)||, inside the frame", ("relative",)),
    Figure("relative error", "||F(gx) - gF(x)|| / (||J_F(x)||_F ||x||), inside the frame", ("paper",)),
    Figure("Lie derivative", "||d/dt g_t^-1 F(g_t x)|| / ||F(x)|| at t = 0 inside the frame, by jvp", ("lie",)),
)


@dataclass(frozen=True)
class Setting:
    """What one measurement asks of every batch."""

    group: Group
    acts: Acts
    target: Acts
    ignore_index: int | None

    def ignored(self, y: Tensor) -> int:
        """The label that is left out beside scores per pixel."""
        return ignored_label(self.ignore_index, y.shape[1])

    def is_map(self, y: Tensor) -> bool:
        """Whether answers are scores per pixel, (N, K, h, w)."""
        return isinstance(self.target, Pictures) and y.ndim == 4

    def is_scores(self, y: Tensor) -> bool:
        """Whether answers are class scores, (N, K)."""
        return isinstance(self.target, Still) and y.ndim == 2 and y.shape[1] > 1

    def compared(self, y: Tensor, x: Tensor) -> Tensor:
        """Answers where they are compared: scores per pixel at the size of the picture."""
        return at_size_of(x, y) if self.is_map(y) else y

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
        check_labels(labels[labels != self.ignored(y)] if self.is_map(y) else labels, y.shape[1])
        return labels


def overlaps(y: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Pixels in the intersection and in the union of prediction and label, per class: (N, 2 K)."""
    pairs = zip(y.argmax(1), labels, strict=True)
    return overlap(torch.stack([confusion_counts(said, true, y.shape[1], ignore_index) for said, true in pairs]))


def upright_columns(setting: Setting, y: Tensor, labels: Tensor | None) -> Columns:
    """What the answers to data as it is say."""
    if labels is None:
        return {}
    if setting.is_map(y):
        return {"overlap": overlaps(y, labels, setting.ignored(y))}
    return {"right": y.argmax(1) == labels}


def moved_columns(
    setting: Setting, y: Tensor, moved: Tensor, labels: Tensor | None, moves: Moves, chosen: Tensor
) -> Columns:
    """What the answers to moved data, F(g x) with g = chosen[i] for sample i, say beside y = F(x)."""
    check_finite(moved, "the model's answers to moved data")
    on_answers = moves.on(setting.target)
    expected, kept = on_answers(y, chosen), inside_each(on_answers, y, chosen)
    change = norms(moved - expected, kept)
    size = norms(y) if kept is None else norms(expected, kept)
    columns: Columns = {"change": change, "relative": change / positive(size, "the answer", "look for dead layers")}
    if setting.is_scores(y):
        columns["kl"] = kl_divergence(y, moved, 1)
        if labels is not None:
            columns["right moved"] = moved.argmax(1) == labels
    if setting.is_map(y) and y.shape[1] > 1:
        divergence = kl_divergence(moved, expected, 1)
        weight = torch.ones_like(divergence) if kept is None else kept[:, 0].to(divergence.dtype)
        columns["pixel kl"] = torch.stack([(part * weight).flatten(1).sum(1) for part in (divergence, weight)], 1)
        if labels is not None:
            turned = moves.on(Pictures("nearest", fill=setting.ignored(y)))(labels, chosen)
            columns["overlap moved"] = overlaps(moved, turned, setting.ignored(y))
    return columns


def rounds(
    group: Group, within: float | None, elements: Elements, n: int, generator: torch.Generator
) -> tuple[list[Element], Tensor]:
    """Elements, and which of them moves each of n samples in every round, (rounds, n): given ones move all samples,
    drawn ones a single sample each.
    """
    if isinstance(elements, int):
        return drawn(group, within, elements * n, generator), torch.arange(elements * n).reshape(elements, n)
    return list(elements), torch.arange(len(elements))[:, None].expand(-1, n)


def share_inside(moves: Moves, y: Tensor, rounds: Tensor) -> Tensor:
    """In which share of the rounds each entry of F(x) stays inside the frame, in the shape of y.

    Rows of J_F(x) times its root have the root mean square over the rounds of the Jacobian of what stays inside.
    """
    back = moves.inverse()
    kept = [inside_each(back, y, chosen) for chosen in rounds]
    return torch.stack([torch.ones_like(y) if part is None else part.to(y).expand_as(y) for part in kept]).mean(0)


def scaled(fn: Callable[[Tensor], Tensor], scale: Tensor, x: Tensor) -> Tensor:
    """F(x) with its entries scaled."""
    return fn(x) * scale


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
    group: Group | str | None = None,
    within: float | str | None = None,
    *,
    acts: Acts = Pictures(),  # noqa: B008  (frozen)
    target: Acts | None = None,
    elements: Elements = 4,
    batch_size: int = 32,
    jacobians: int = 16,
    probes: int = PROBES,
    ignore_index: int | None = None,
    seed: int = 0,
) -> Measurement:
    """How equivariant is the model on this data? F(gx) against gF(x), for elements g drawn from the range.

    The group is by default that of a soft model, the range all of it.
    `data`: a tensor (N, C, H, W), a pair (inputs, labels), a dict (pixel_values, labels), or a loader of such batches,
    which are streamed. Labels, where there are any, are (N,), or (N, H, W) for scores per pixel. `acts` says how the
    group moves inputs, `target` how it moves answers: by default class scores (N, K) stand still, and scores per
    pixel (N, K, h, w), resized to the picture, move with it; pixels that leave the frame are left out. For every sample
    `elements` are drawn (or the given ones taken), and each figure is a mean over samples and elements, with a 95%
    interval over the samples. The relative error is taken from the first `jacobians` samples, with an exact Jacobian
    for up to 64 outputs and `probes` random probes for more. Labels of pixels that belong to no class are
    `ignore_index`, by default 255 where that is none of the classes. Runs on the model's device and in its precision.

    >>> net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> found = measure(net, torch.randn(8, 1, 9, 9), "C4")
    >>> [row.name for row in found.rows]
    ['iErr', 'relative change', 'relative error']
    """
    group = chosen_group(model, group, "measure")
    within = as_range(group, within)
    check_actions(acts, target)
    check_elements(group, within, elements)
    check_count("batch_size", batch_size)
    check_count("jacobians", jacobians, least=0)
    check_count("probes", probes)
    check_ignored(ignore_index)
    check_seed(seed)
    generator, signs = (torch.Generator().manual_seed(seed) for _ in range(2))
    columns: dict[str, list[Tensor]] = defaultdict(list)
    samples = measured = 0
    notes: dict[str, str] = {}  # by column
    failed: dict[str, str] = {}
    with evaluating(model):
        for batch in progress(batches(data, batch_size), "measuring", count(data, batch_size)):
            x = at_home(model, batch.inputs)
            acts.check(group, x[0])
            raw = asked(model, x)
            check_finite(raw, "the model's answers")
            setting = Setting(group, acts, target or default_target(acts, raw), ignore_index)
            fn, y = partial(setting.scores, model), setting.compared(raw, x)
            setting.target.check(group, y[0])
            labels = setting.labels(batch, y)
            positive(norms(y), "the answer", "look for dead layers")
            pool, numbers = rounds(group, within, elements, len(x), generator)
            moves = Moves(acts, group, elements=pool)
            found = average(moved_columns(setting, y, fn(moves(x, some)), labels, moves, some) for some in numbers)
            found |= upright_columns(setting, y, labels)
            change = found.pop("change")
            few = min(max(jacobians - measured, 0), len(x))
            if few and "paper" not in failed:
                number = probes_for(y[0].numel(), probes)
                notes["paper"] = f"Jacobian: {'exact' if number is None else f'{number} random probes a sample'}"
                try:
                    check_alone(model, x[:few], asked(model, x[:few]), NO_OWN_JACOBIAN)
                    share = share_inside(moves.on(setting.target), y[:few], numbers[:, :few])
                    jacobian = jacobian_norm(partial(scaled, fn, share.sqrt()), x[:few], probes=number, generator=signs)
                except SoftEquivError as problem:  # it has answered before, without derivatives
                    failed["paper"] = f"relative error: not measured, as {problem}"
                else:
                    scale = positive(jacobian * norms(x[:few]), "||J_F(x)||_F ||x||", "leave it out with jacobians=0")
                    found["paper"] = change[:few] / scale
            if len(group.lie) and "lie" not in failed:
                try:
                    speed = lie_derivative(fn, x, group, acts, setting.target)
                except SoftEquivError as problem:
                    failed["lie"] = f"Lie derivative: not measured, as {problem}"
                else:
                    sizes = norms(y, staying(y, group, setting.target))
                    found["lie"] = speed / positive(sizes, "the answer", "look for dead layers")
            for name, values in found.items():
                columns[name].append(values.double().cpu())
            samples, measured = samples + len(x), measured + few
    if not samples:
        raise SoftEquivError("there is nothing to measure: the data is empty")
    table = {name: torch.cat(parts).reshape(sum(map(len, parts)), -1) for name, parts in columns.items()}
    kept = {name: values for name, values in table.items() if name not in failed}
    return Measurement(
        group,
        within,
        samples,
        elements if isinstance(elements, int) else len(elements),
        not isinstance(elements, int),
        seed,
        tuple(rows(kept, seed)),
        tuple((notes | failed).values()),
    )


def check_actions(acts: Acts, target: Acts | None) -> None:
    """Raise a sentence where what should be an action is none."""
    for what, value in (("acts", acts), ("target", target)):
        if value is not None and not isinstance(value, Acts):
            raise SoftEquivError(
                f"{what} must be an action on data, such as Pictures(), Points() or Vectors(rep); got {value!r}"
            )


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
            if figure.columns[0].startswith("overlap"):
                values = labelled(values)
            found = (exact_interval if figure.shares else interval)(values, figure.statistic, seed=seed)
            yield Row(figure.name, *found, len(values), figure.formula, figure.shares)


def labelled(counted: Tensor) -> Tensor:
    """The rows of samples that have a labelled pixel."""
    found = counted[counted.any(1)]
    if not len(found):
        raise SoftEquivError("every pixel is labelled ignore_index, so there is no IoU; leave the labels out")
    return found
