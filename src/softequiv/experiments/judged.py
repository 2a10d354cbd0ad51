"""By which figures is a classifier judged? Upright and turned: in its range, beyond it, and in the inscribed disc."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from torch import nn

from softequiv.actions import Moves, Pictures
from softequiv.groups import SO, O, degrees
from softequiv.groups.rotations import mirror
from softequiv.tasks.base import Examples
from softequiv.tasks.classification import Classification, figures_by_range
from softequiv.tasks.disc import InDisc

POOL = 1024  # turns that stand for a range
TRAINED, TESTED = 0, 1  # seeds: the turns of a training are not those of its test


@lru_cache
def turns(acts: Pictures, largest: float, *, flips: bool = False, seed: int = TESTED) -> Moves:
    """Rotations within +- `largest` degrees, drawn uniformly; with flips, every second one mirrored as well."""
    drawn = Moves(acts, SO(2), degrees(largest), count=POOL, seed=seed)
    if not flips:
        return drawn
    matrices = [g.matrix @ mirror(2) if i % 2 else g.matrix for i, g in enumerate(drawn.elements)]
    return Moves(acts, O(2), elements=[O(2).element_of(matrix) for matrix in matrices])


@lru_cache
def quarters(acts: Pictures, count: int) -> Moves:
    """Every sample turned by as many quarters, exactly."""
    return Moves(acts, SO(2), elements=[SO(2).element(degrees(90 * count))])


def judged(
    model: nn.Module, task: Classification, ranges: Mapping[str, Moves], *, disc: str | None = None, batch: int = 2000
) -> dict[str, float]:
    """Acc, and aAcc, cAcc, iErr for each range by name, on the test pictures; `disc` names one to repeat in a disc."""
    found = figures_of(model, task.test, ranges, batch)
    if disc is not None:
        inner = figures_of(model, InDisc(task.test, task.acts.fill), {"disc": ranges[disc]}, batch)
        found |= {"Acc disc" if name == "Acc" else name: value for name, value in inner.items()}
    return found


def figures_of(model: nn.Module, examples: Examples, ranges: Mapping[str, Moves], batch: int) -> dict[str, float]:
    """Acc, and the figures of each range with its name behind theirs."""
    found: dict[str, float] = {}
    for name, figures in figures_by_range(model, examples, ranges, batch).items():
        found |= {"Acc": figures["Acc"], **{f"{key} {name}": figures[key] for key in ("aAcc", "cAcc", "iErr")}}
    return found
