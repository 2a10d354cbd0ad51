"""Which layer is to blame? The error of the answer split over the network, so that the parts add up to the whole.

Let h_i be the features at cut i for the input as it is, and F_i the answer when they are replaced by g h_i, with
F_0 = F(gx) and F_L = gF(x). Then F(gx) - gF(x) = sum_i (F_{i-1} - F_i): part i is what the layers between two cuts
alone do to the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softequiv._text import aligned
from softequiv.actions import Acts, Pictures, Still
from softequiv.adapt.bake import bake
from softequiv.adapt.find import Setting, Skipped, find
from softequiv.adapt.walk import uneven_layers
from softequiv.asking.answers import asked, at_home, check_finite, default_target, evaluating
from softequiv.asking.data import batches, count
from softequiv.errors import SoftEquivError, check_count, check_seed
from softequiv.groups import Element, Group
from softequiv.groups.parse import as_group
from softequiv.measure.causes import RESAMPLING, UNKNOWN, Cause, Circumstances, causes, common_name
from softequiv.measure.cuts import MOST_CUTS, Cut, features_of, find_cuts, replaced
from softequiv.measure.elements import Elements, as_range, drawn_moves
from softequiv.measure.frame import inside
from softequiv.measure.measurement import check_actions
from softequiv.measure.plots import share_bars
from softequiv.measure.progress import progress
from softequiv.nn import soft_weights

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}  # an error below this, relative to the answer, has no author
HALF_ROUNDING = 1e-2  # for all other dtypes
ALL_RESAMPLING = 1.0  # there and back resamples twice, so from here on half of the error or more needs no layer
MOST_TRIED = 4  # elements by which weights are moved to see whether they are to blame
NEGLIGIBLE = 5e-4  # parts of less than this size are counted, not listed


@dataclass(frozen=True)
class Part:
    """What the layers between two cuts contribute.

    `share` is <part, whole> / ||whole||^2, which may be negative and sums to 1 over the parts; `size` is
    ||part|| / ||whole||; `without` is the error that would remain without this part, ||whole - part|| / ||whole||. All
    in root mean square over samples and elements.
    """

    name: str
    share: float
    size: float
    without: float
    causes: tuple[Cause, ...]


@dataclass(frozen=True)
class Attribution:
    """The error split over the network, in order of execution; print it, the first line names the culprit.

    `gram[i, j]` is the mean of <part_i, part_j>: what remains without any set of parts follows from it.
    """

    group: Group
    within: float | None
    samples: int
    seed: int
    error: float  # rms ||F(gx) - gF(x)|| / rms ||F(x)||, of maps inside the frame under g and its inverse
    rounding: float  # errors below this are none
    resampling: float  # rms ||F(g^-1 g x) - F(x)|| relative to the error: what interpolation there and back does
    names: tuple[str, ...]
    gram: Tensor = field(repr=False, compare=False)
    causes: tuple[tuple[Cause, ...], ...]
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether there is no error but rounding."""
        return self.error <= self.rounding

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in order of execution; all zero where the model is exactly equivariant."""
        whole = float(self.gram.sum())
        scale = 1 / whole if whole > 0 else 0.0
        shares = (self.gram.sum(1) * scale).tolist()
        sizes = (self.gram.diagonal() * scale).clamp_min(0).sqrt().tolist()
        return tuple(
            Part(name, shares[i], sizes[i], self.without(name), self.causes[i]) for i, name in enumerate(self.names)
        )

    def without(self, *names: str) -> float:
        """The error that would remain without these parts, ||whole - their sum|| / ||whole||, rms."""
        unknown = [name for name in names if name not in self.names]
        if unknown:
            raise SoftEquivError(f"no part is called {unknown[0]!r}; there are {', '.join(self.names)}")
        stays = torch.tensor([float(name not in names) for name in self.names], dtype=self.gram.dtype)
        whole = float(self.gram.sum())
        return math.sqrt(max(float(stays @ self.gram @ stays), 0.0) / whole) if whole > 0 else 0.0

    @property
    def culprit(self) -> Part | None:
        """The part with the largest share; None where there is no error."""
        return None if self.exact else max(self.parts, key=lambda part: part.share)

    @property
    def verdict(self) -> str:
        """The culprit and the remedy, in words."""
        part = self.culprit
        if part is None:
            return f"nothing to blame: the error is {self.error:.1e} of the answer, which is rounding"
        if self.resampling >= ALL_RESAMPLING:
            return (
                f"culprit: {RESAMPLING.what}, which there and back makes {self.resampling:.2f} of the error; "
                f"remedy: {RESAMPLING.remedy}"
            )
        cause = (*part.causes, UNKNOWN)[0]
        return f"culprit: {part.name}, {100 * part.share:.0f}% of the error: {cause.what}; remedy: {cause.remedy}"

    def __str__(self) -> str:
        where = "all of it" if self.within is None else f"within {self.within!r}"
        about = (
            f"{self.group}, {where}: error {self.error:.3g} of the answer, {self.samples} samples, seed {self.seed}; "
            f"interpolation there and back {self.resampling:.3g} of the error"
        )
        if self.exact:
            return "\n".join([self.verdict, about])
        cells = [("part", "share", "size", "without it", "why")]
        told = sorted((part for part in self.parts if part.size >= NEGLIGIBLE), key=lambda part: -part.share)
        for part in told:
            why = "".join(cause.what for cause in part.causes[:1])
            why += f" (and {len(part.causes) - 1} more)" * (len(part.causes) > 1)
            cells.append((part.name, f"{100 * part.share:.1f}%", f"{part.size:.3f}", f"{part.without:.3f}", why))
        rest = f"{len(self.names) - len(told)} more parts of no size; " * (len(told) < len(self.names))
        note = "shares sum to 100%; a size is ||part|| / ||error||, in root mean square"
        lines = [self.verdict, about, *aligned(cells), rest + note, self.note]
        return "\n".join(line for line in lines if line)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return {
            "group": str(self.group),
            "within": None if self.within is None else float(self.within),
            "samples": self.samples,
            "seed": self.seed,
            "error": self.error,
            "resampling": self.resampling,
            "verdict": self.verdict,
            "note": self.note,
            "parts": [asdict(part) for part in self.parts],
        }

    def plot(self, path: str | Path, title: str = "") -> None:
        """A bar chart of the shares in order of execution, in the format that the path's ending names."""
        title = title or f"{self.group}: error {self.error:.3g} of the answer"
        share_bars(self.names, [part.share for part in self.parts], path, title)


def telescope(model: nn.Module, x: Tensor, g: Element, cuts: Sequence[Cut], acts: Acts, target: Acts) -> Tensor:
    """F_0, ..., F_L for one element: (L + 1, N, ...). Their differences are the parts, first minus last the whole."""
    y, features = features_of(model, x, [cut.name for cut in cuts])
    moved = acts(x, g)
    answers = [asked(model, moved)]
    for cut, h in zip(cuts, features, strict=True):
        with replaced(model.get_submodule(cut.name), cut.acts(h, g)):
            answers.append(asked(model, moved))
    return torch.stack([*answers, target(y, g)])


def attribute(
    model: nn.Module,
    data: Any,
    group: Group | str,
    within: float | str | None = None,
    *,
    acts: Pictures = Pictures(),  # noqa: B008  (frozen)
    target: Acts | None = None,
    elements: Elements = 2,
    batch_size: int = 32,
    most: int = MOST_CUTS,
    seed: int = 0,
) -> Attribution:
    """Which layers make F(gx) differ from gF(x)? Data as for `measure`, pictures (N, C, H, W); labels are not used.

    The network is cut at up to `most` modules whose output alone decides the answer. Maps there move as pictures
    whose border is continued, tokens as the grid that they form, vectors stand still; what a part contributes depends
    on this choice, unless the moves carry pixels to pixels.

    >>> net = nn.Sequential(nn.AvgPool2d(3), nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> found = attribute(net, torch.randn(8, 1, 9, 9), "C4")
    >>> found.culprit.name, round(sum(part.share for part in found.parts), 6)
    ('1', 1.0)
    """
    group = as_group(group)
    within = as_range(group, within)
    if not isinstance(acts, Pictures):
        raise SoftEquivError(f"attribution follows pictures through a network; got acts={acts}")
    check_actions(acts, target)
    check_count("batch_size", batch_size)
    check_count("most", most)
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    samples, moves, answers, round_trips = 0, 0, 0.0, 0.0
    seen: dict[str, Element] = {}
    with evaluating(model):
        stream = batches(data, batch_size)
        first = next(stream, None)
        if first is None:
            raise SoftEquivError("there is nothing to attribute: the data is empty")
        example = at_home(model, first.inputs)
        acts.check(group, example[0])
        check_finite(asked(model, example), "the model's answers")
        cuts, behind = find_cuts(model, example, group, acts, most)
        gram = torch.zeros(len(cuts) + 1, len(cuts) + 1, dtype=torch.float64)
        for batch in progress(chain([first], stream), "attributing", count(data, batch_size)):
            x = at_home(model, batch.inputs)
            y = asked(model, x)
            to = target or default_target(acts, y)
            to.check(group, y[0])
            for g in drawn_moves(group, within, elements, generator):
                steps = telescope(model, x, g, cuts, acts, to)
                check_finite(steps, "answers to moved features")
                back = asked(model, acts(acts(x, g), g.inverse))
                kept = inside(to, y, g, g.inverse)
                weight = 1 if kept is None else kept
                flat = ((steps[:-1] - steps[1:]) * weight).flatten(1).double()
                gram += (flat @ flat.T).cpu()
                answers += float(((y if kept is None else steps[-1]) * weight).double().square().sum())
                round_trips += float(((back - y) * weight).double().square().sum())
                seen.setdefault(str(g), g)
                moves += len(x)
            samples += len(x)
    whole = float(gram.sum())
    blamed, note = explained(model, example[:1], cuts, behind, list(seen.values()), acts, len(cuts) >= most)
    return Attribution(
        group=group,
        within=within,
        samples=samples,
        seed=seed,
        error=math.sqrt(max(whole, 0.0) / answers) if answers else 0.0,
        rounding=ROUNDING.get(y.dtype, HALF_ROUNDING),
        resampling=math.sqrt(round_trips / whole) if whole > 0 else 0.0,
        names=unique([*(common_name(cut.contents) or cut.name for cut in cuts), common_name(behind) or "answer"]),
        gram=gram / moves,
        causes=blamed,
        note=note,
    )


def explained(
    model: nn.Module,
    x: Tensor,
    cuts: Sequence[Cut],
    behind: Sequence[str],
    elements: Sequence[Element],
    acts: Pictures,
    dropped: bool,
) -> tuple[tuple[tuple[Cause, ...], ...], str]:
    """The causes in each part, and what could not be checked."""
    soft = frozenset(weight.name for weight in soft_weights(model))
    plain = bake(model, copy=True) if soft else model
    fixed = cannot_be_softened(plain, elements[0].group)
    told = {*(name.rpartition(".")[0] for name in soft), *fixed}
    uneven, stopped = uneven_layers(plain, tuple(x.shape), x.dtype, elements[0].group, told)
    resamples = any(acts.valid(x, g) is not None for g in elements)
    tried = Circumstances(tuple(elements[:MOST_TRIED]), resamples, tuple(uneven), soft, fixed, dropped)
    entering = [acts, *(cut.acts for cut in cuts)]
    found = [
        () if isinstance(before, Still) else causes(plain, contents, tried)  # what stands still cannot be broken
        for before, contents in zip(entering, [*(cut.contents for cut in cuts), behind], strict=True)
    ]
    return tuple(found), f"strides and padding not checked to the end: {stopped.splitlines()[0]}" if stopped else ""


def cannot_be_softened(model: nn.Module, group: Group) -> dict[str, str]:
    """Weights that `soften` leaves alone, and why; all of them where it refuses the model."""
    try:
        return {weight.name: weight.reason for weight in find(model, Setting(group)) if isinstance(weight, Skipped)}
    except SoftEquivError as refusal:
        return {name: str(refusal) for name, _ in model.named_parameters()}


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """The names, later ones numbered where they repeat."""
    found: list[str] = []
    for name in names:
        again = sum(other == name or other.startswith(f"{name} (") for other in found)
        found.append(f"{name} ({again + 1})" if again else name)
    return tuple(found)
