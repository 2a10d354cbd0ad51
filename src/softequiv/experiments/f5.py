"""F5: what do forecasts look like? Sample trajectories of Base, ours and EqAuto, from the rows of T5."""

from __future__ import annotations

from collections.abc import Sequence

from softequiv.experiments import t5
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.pages import Page

SHOWN = (t5.PLAIN, "ours", t5.STRICT)


def cells(scale: Scale) -> list[Cell]:
    """The cells of T5 that are drawn, of the first seed; they are T5's own."""
    return [cell for cell in t5.cells(scale) if cell.settings["arm"] in SHOWN and cell.settings["seed"] == 0]


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """The figure."""
    return Page(
        "F5. Sample trajectories",
        ["Test windows of ETH/UCY, 8 steps seen and 12 forecast by free running, first seed; T5 says how."],
        figures=[t5.samples_figure(rows)],
    )


F5 = Experiment("F5", "Sample trajectories", cells, t5.work, page)
