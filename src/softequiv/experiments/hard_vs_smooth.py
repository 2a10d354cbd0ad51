"""Which cut-off? Hard against smooth, the paper's two, and ours by softness and by least distortion, from T4's rows."""

from __future__ import annotations

from collections.abc import Sequence

from softequiv.experiments import t4
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.compare import Stop, apart, curves, if_of_one_seed, stops_of
from softequiv.experiments.finetune import of, values
from softequiv.experiments.pages import Claim, Page
from softequiv.experiments.t2 import RANGE

PAIRS = (("paper (smooth)", "paper"), ("ours", "paper"), ("ours", "paper (smooth)"), ("ours (target)", "ours"))


def cells(scale: Scale) -> list[Cell]:
    """The cells of T4 at the softness where the paper compares its cut-offs, trained with turns; they are T4's own."""
    every = [cell for cell in t4.cells(scale) if cell.settings["turned"]]
    if scale == "smoke":
        return every
    return [cell for cell in every if cell.settings["dial"] in t4.CUTOFFS.get(cell.settings["arm"], ())]


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """A table for each backbone, and who is ahead."""
    claims = [
        ahead(name, better, worse, found)
        for name in values(rows, "backbone")
        for found in (curves(of(rows, backbone=name), "cIoU 30", "eErr 30"),)
        for better, worse in PAIRS
        if better in found and worse in found
    ]
    return Page(
        "Hard against smooth",
        [
            f"{rows[0]['dataset']}, trained with turns within {RANGE} degrees, "
            f"{len({row['seed'] for row in rows})} seeds; T4 says how. Each arm is judged at the stop that the "
            "validation pictures prefer.",
            *([t4.STAND_IN] if scale != "full" else []),
        ],
        claims,
        t4.cutoff_tables(rows),
    )


def ahead(name: str, better: str, worse: str, found: dict[str, list[Stop]]) -> Claim:
    """Whether one arm has a combined IoU above that of the other, beyond both spreads, each at the stop that the
    validation pictures prefer: the best on the test is the more often luck the more stops there are.
    """
    one, other = (max(stops_of(found, [arm]), key=lambda stop: stop.validation) for arm in (better, worse))
    return Claim(
        f"{name}: {better} has a higher combined IoU than {worse}",
        apart(other.gain, one.gain),
        f"{one.gain.told(100, 2)} against {other.gain.told(100, 2)}, errors x 100 {one.error.told(100, 2)} and "
        f"{other.error.told(100, 2)}{if_of_one_seed([one, other])}",
    )


HARD_VS_SMOOTH = Experiment("hard-vs-smooth", "Hard against smooth", cells, t4.work, page)
