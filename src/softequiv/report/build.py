"""What does a model show over the dial? Each softness is a copy of the model: certified, measured, and looked into."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.actions import Pictures
from softequiv.adapt.group import group_of
from softequiv.adapt.soften import soften
from softequiv.certify import Certificate, certify
from softequiv.certify.certificate import versions
from softequiv.certify.statistical import checked_confidence
from softequiv.errors import SoftEquivError
from softequiv.gains import LevelGain, softness
from softequiv.groups import Group
from softequiv.groups.parse import as_group
from softequiv.measure import attribute, measure
from softequiv.measure.elements import Elements, as_range
from softequiv.measure.measurement import Row
from softequiv.measure.progress import progress
from softequiv.nn import set_gain, soft_weights
from softequiv.report.data import Answers, Blame, Compared, Levels, ReportData, Stop, View
from softequiv.report.layer import Shown, mosaic, show, shown_element, shown_weight, strongest, told
from softequiv.report.png import photograph, shaded, shrunk
from softequiv.spectrum import spectrum

LEVELS = tuple(i / 10 for i in range(11))
KERNELS, KERNEL_COLUMNS = 24, 6
MAPS, LARGEST_MAP = 6, 48  # features shown, and their largest side in pixels
BRIGHT = 0.995  # this share of the values lies within the palette; the rest takes its last shade
MOST_VALUES = 1_000_000  # quantiles of more are taken from every k-th
ATTRIBUTED = 16  # pictures that the shares of the layers are computed from
MOST_BLAMED = 8  # parts that are drawn, the largest shares first


@dataclass(frozen=True)
class Trial:
    """What every model of a report is tried on."""

    data: Any
    pictures: Tensor
    group: Group
    within: float | None
    elements: Elements
    batch_size: int
    confidence: float

    @property
    def reach(self) -> float:
        """The range, infinite where it is the whole group."""
        return math.inf if self.within is None else self.within

    def certificate(self, model: nn.Module) -> Certificate:
        """What is guaranteed."""
        return certify(model, self.reach, self.group)

    def answers(self, model: nn.Module) -> Answers:
        """What holds on average, with this confidence; where it cannot be said, why not."""
        try:
            found = certify(
                *(model, self.reach, self.group),
                data=self.pictures,
                confidence=self.confidence,
                batch_size=self.batch_size,
            )
        except SoftEquivError as problem:
            return Answers(refused=str(problem))
        return Answers(found.figures)

    def measured(self, model: nn.Module) -> tuple[Row, ...]:
        """What is observed."""
        found = measure(model, self.data, self.group, self.within, elements=self.elements, batch_size=self.batch_size)
        return found.rows


@dataclass(frozen=True)
class Look:
    """Which kernels and maps are drawn, and what the last shade stands for: the same at every stop."""

    kernels: Tensor
    maps: Tensor | None
    kernel_limit: float
    map_limit: float

    @staticmethod
    def of(shown: Sequence[Shown]) -> Look:
        """The strongest kernels and maps of the freest model."""
        kernels, features = shown[-1].kernels, shown[-1].features
        maps = [every for s in shown for every in (s.features, s.moved) if every is not None]
        return Look(
            kernels=strongest(kernels, KERNELS),
            maps=None if features is None else strongest(features, MAPS),
            kernel_limit=largest([s.kernels for s in shown]),
            map_limit=largest(maps),
        )

    def view(self, shown: Shown) -> View:
        """One stop as pictures."""
        features, turned, moved, difference = (
            None if part is None or self.maps is None else self.drawn(part[self.maps])
            for part in (shown.features, shown.turned, shown.moved, shown.difference)
        )
        weights = shaded(mosaic(shown.kernels[self.kernels], KERNEL_COLUMNS), self.kernel_limit)
        return View(weights, features, turned, moved, difference, shown.error)

    def drawn(self, maps: Tensor) -> str:
        """Maps (n, h, w) in one row."""
        return shaded(mosaic(shrunk(maps, LARGEST_MAP), MAPS), self.map_limit)


def build(
    model: nn.Module | Mapping[float, nn.Module],
    pictures: Tensor,
    labels: Tensor | None = None,
    *,
    group: Group | str,
    within: float | str | None = None,
    levels: Sequence[float] = LEVELS,
    title: str = "How equivariant is it?",
    compared: Mapping[str, nn.Module] | None = None,
    settings: Mapping[str, str] | None = None,
    elements: Elements = 4,
    batch_size: int = 32,
    confidence: float = 0.99,
) -> ReportData:
    """Everything for one page: the model at each softness of `levels`, on pictures (N, C, H, W) as it takes them.

    A plain model is softened to each level, a soft one set to it, on copies and without training; a mapping from
    softness to models, such as trained ones, is used as it is. `labels` (N,), or (N, H, W) for scores per pixel, are
    optional. `within` is the range of the moves, such as "30deg", by default the whole group. `compared` are other
    models to measure, by name; `settings` are printed at the end of the page; `elements` and `batch_size` are those of
    `measure`. The bounds on the answers of all models hold together with this `confidence`, for pictures that none of
    them was trained on. A model in project mode cannot regain at higher levels what it has lost.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> data = build(net, torch.randn(4, 1, 9, 9), group="C4", levels=(0, 1))
    >>> [stop.certified[0].error < 1e-6 for stop in data.stops]
    [True, False]
    """
    group = as_group(group)
    within = as_range(group, within)
    check_pictures(pictures, labels)
    others = dict(compared or {})
    if isinstance(model, nn.Module):
        given = dial_of(model, group)
        if given is None and group_of(model) is not None:
            others = {"as given": model, **others}
        stops, at = checked(levels, given), partial(turned_to, model, group)
    else:
        given = None
        stops, at = checked(model), partial(one_of, model, group)
    g = shown_element(group, within)
    confidence = checked_confidence(confidence)
    each = 1 - (1 - confidence) / (len(stops) + len(others))
    data = pictures if labels is None else (pictures, labels)
    trial = Trial(data, pictures, group, within, elements, batch_size, each)
    shown = [show(at(level), pictures[0], g) for level in stops]  # one copy of the model at a time
    look = Look.of(shown)
    work = list(zip(stops, shown, strict=True))
    shades = float(pictures[0].min()), float(pictures[0].max())
    return ReportData(
        title=title,
        model=type(model if isinstance(model, nn.Module) else next(iter(model.values()))).__name__,
        group=str(group),
        within="over the whole group" if within is None else f"within {within!r}",
        element=told(g),
        layer=shown_weight(at(stops[-1])).name,
        picture=photograph(pictures[0], *shades),
        moved_picture=photograph(Pictures()(pictures[0], g), *shades),
        stops=tuple(
            stop(level, at(level), look.view(seen), trial)
            for level, seen in progress(work, "building the report", len(work))
        ),
        start=stops.index(given) if given is not None else len(stops) // 2,
        compared=tuple(compare(name, other, trial) for name, other in others.items()),
        confidence=confidence,
        samples=len(pictures),
        drawn=group.how_drawn(None if within == math.inf else within),
        settings={
            "made": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "pictures": f"{len(pictures)} of {' x '.join(map(str, pictures.shape[1:]))}",
            "labels": "none" if labels is None else "yes",
            "trained at each level": "no" if isinstance(model, nn.Module) else "yes",
            **versions(),
            **(settings or {}),
        },
    )


def check_pictures(pictures: Tensor, labels: Tensor | None) -> None:
    """A report needs at least one picture, and as many labels as pictures."""
    if not isinstance(pictures, Tensor) or pictures.ndim != 4 or not len(pictures):
        found = tuple(pictures.shape) if isinstance(pictures, Tensor) else type(pictures).__name__
        raise SoftEquivError(
            f"a report is made from pictures (N, C, H, W), scaled as the model takes them; got {found}"
        )
    if labels is not None and len(labels) != len(pictures):
        raise SoftEquivError(f"{len(pictures)} pictures came with {len(labels)} labels; every picture needs its own")


def checked(levels: Sequence[float] | Mapping[float, nn.Module], given: float | None = None) -> list[float]:
    """The levels of the dial, rising, the model's own among them."""
    found = sorted({*map(float, levels), *([] if given is None else [given])})
    if not found or not 0 <= found[0] <= found[-1] <= 1:
        raise SoftEquivError(f"the levels of the dial are numbers from 0 to 1; got {found}")
    return found


def dial_of(model: nn.Module, group: Group) -> float | None:
    """Where the dial of a soft model stands; None for a plain one, or where its weights differ or have another gain."""
    own = group_of(model)
    if own not in (None, group):
        raise SoftEquivError(f"this model is softened for {own}, and the report was asked for {group}: give {own}")
    gains = {weight.soft.gain for weight in soft_weights(model)}
    gain = next(iter(gains)) if len(gains) == 1 else None
    return float(gain.s) if isinstance(gain, softness) else None


def turned_to(model: nn.Module, group: Group, level: float) -> nn.Module:
    """A copy of the model at this softness."""
    soft = as_soft(model, group)
    for weight in soft_weights(soft):
        set_gain(weight, softness(level))
    return soft


def one_of(models: Mapping[float, nn.Module], group: Group, level: float) -> nn.Module:
    """A copy of the model that was given for this softness."""
    return as_soft(models[level], group)


def as_soft(model: nn.Module, group: Group) -> nn.Module:
    """A copy of the model that is soft: as it is, or with filters that keep everything."""
    own = copy.deepcopy(model)
    return soften(own, group, softness=1.0) if group_of(model) is None else own


def stop(level: float, model: nn.Module, view: View, trial: Trial) -> Stop:
    """One position of the dial: what is certified and measured, and who is to blame."""
    blamed = attribute(model, trial.pictures[:ATTRIBUTED], trial.group, trial.within)
    told_of = {part.name for part in sorted(blamed.parts, key=lambda part: -abs(part.share))[:MOST_BLAMED]}
    blames = tuple(
        Blame(part.name, part.share, "".join(cause.what for cause in part.causes[:1]))
        for part in blamed.parts
        if part.name in told_of
    )
    return Stop(
        softness=level,
        view=view,
        spectrum=levels_of(model),
        certified=trial.certificate(model).weights,
        answers=trial.answers(model),
        measured=trial.measured(model),
        verdict=blamed.verdict,
        blames=() if blamed.exact else blames,
    )


def compare(name: str, model: nn.Module, trial: Trial) -> Compared:
    """Another model on the same pictures."""
    return Compared(name, trial.certificate(model).error, trial.answers(model), trial.measured(model))


def levels_of(model: nn.Module) -> Levels:
    """The spectrum of the shown weight before and after its filter."""
    weight = shown_weight(model)
    rep, gain, layout = weight.soft.rep, weight.soft.gain, weight.soft.layout
    of = spectrum(rep)
    with torch.no_grad():
        before = of.energies(layout.read(weight.stored.detach().cpu(), rep))
        after = of.energies(weight.group_view().detach().cpu())
    # a gain that depends on the weight shows itself in what it did to each level
    gains = gain.gamma(of) if isinstance(gain, LevelGain) else (after / before.where(before > 0, 1.0)).sqrt()
    return Levels(
        levels=tuple(of.levels.tolist()),
        before=tuple(before.tolist()),
        after=tuple(after.tolist()),
        gains=tuple(gains.tolist()),
    )


def largest(parts: Sequence[Tensor]) -> float:
    """The size below which nearly all values of these tensors lie."""
    if not parts:
        return 1.0
    values = torch.cat([part.flatten() for part in parts]).abs()
    return float(values[:: -(-len(values) // MOST_VALUES)].quantile(BRIGHT)) or 1.0
