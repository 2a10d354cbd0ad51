"""F4: which softness suits a segmenter? Combined IoU over softness, from the rows of T4."""

from __future__ import annotations

from collections.abc import Sequence

from softequiv.experiments import t4
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.finetune import of, stop_table, values
from softequiv.experiments.pages import Page
from softequiv.experiments.t2 import RANGE

DIALLED = ("plain", "ours", "paper", "paper (smooth)")


def cells(scale: Scale) -> list[Cell]:
    """The cells of T4 with a softness that were trained with turns; they are T4's own."""
    return [cell for cell in t4.cells(scale) if cell.settings["turned"] and cell.settings["arm"] in DIALLED]


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """The figure, and the table that it shows."""
    return Page(
        "F4. Combined IoU over softness",
        [
            f"{rows[0]['dataset']}, {rows[0]['trained on']:,} pictures to train, trained with turns within {RANGE} "
            f"degrees, {len({row['seed'] for row in rows})} seeds; T4 says how.",
            *([t4.STAND_IN] if scale != "full" else []),
        ],
        tables=[stop_table(name, of(rows, backbone=name), t4.SHOWN) for name in values(rows, "backbone")],
        figures=[t4.softness_figure(rows)],
    )


F4 = Experiment("F4", "Combined IoU over softness", cells, t4.work, page)
