"""What is on a report? Plain values, one `Stop` for each position of the dial; pictures are data URIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from softequiv.certify.statistical import BoundedFigure
from softequiv.certify.weight import WeightCertificate
from softequiv.measure.measurement import Row


@dataclass(frozen=True)
class Levels:
    """The spectrum of the shown weight: energy at each level before and after the filter, and the gain between them."""

    levels: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    gains: tuple[float, ...]


@dataclass(frozen=True)
class View:
    """The shown layer as pictures: its weights, f(x), g f(x), f(gx) and |f(gx) - g f(x)|.

    `error` is ||f(gx) - g f(x)|| / ||f(x)|| for the shown picture, where g f(x) lies inside the frame. The features are
    None where the layer's output is no map.
    """

    weights: str
    features: str | None
    turned: str | None
    moved: str | None
    difference: str | None
    error: float | None


@dataclass(frozen=True)
class Blame:
    """One part of the network, its share of the error, and why."""

    part: str
    share: float
    why: str


@dataclass(frozen=True)
class Answers:
    """What holds for a model's answers on average over inputs like the pictures; where nothing can be said, why not."""

    figures: tuple[BoundedFigure, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class Stop:
    """Everything that the page shows at one position of the dial."""

    softness: float
    view: View
    spectrum: Levels
    certified: tuple[WeightCertificate, ...]
    answers: Answers
    measured: tuple[Row, ...]
    verdict: str
    blames: tuple[Blame, ...]


@dataclass(frozen=True)
class Compared:
    """Another model beside the dial: the largest certified error of its weights, what holds for its answers, and what
    was measured.
    """

    name: str
    certified: float
    answers: Answers
    measured: tuple[Row, ...]


@dataclass(frozen=True)
class ReportData:
    """One report; `start` is the stop that the page opens with, `layer` the weight that it shows.

    The bounds on all models' answers hold together with `confidence`, over `samples` pictures with one move each, which
    is `drawn` as these words say.
    """

    title: str
    model: str
    group: str
    within: str
    element: str
    layer: str
    picture: str
    moved_picture: str
    stops: tuple[Stop, ...]
    start: int
    compared: tuple[Compared, ...]
    confidence: float
    samples: int
    drawn: str
    settings: Mapping[str, str]


def value_of(rows: tuple[Row, ...], *names: str) -> Row | None:
    """The first of these figures that was measured."""
    found = {row.name: row for row in rows}
    return next((found[name] for name in names if name in found), None)
