"""F2: what does one pay for equivariance, and what does the dial do? The curves of T1, from the rows of T1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from softequiv.experiments import t1
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.compare import Curves, curves, dials_move, known, lower_errors, style, trade_off
from softequiv.experiments.finetune import KINDS, OF_THE_NETWORK, of, values
from softequiv.experiments.pages import Figure, Page

DIALLED = ("ours", "paper", "RPP", *OF_THE_NETWORK)  # whose dials run from 0 to 1
LEAST = 0.01  # stops crowd near 0: from here on an axis of dials is logarithmic


def cells(scale: Scale) -> list[Cell]:
    """The cells of T1 that were trained on upright digits with all their labels; they are T1's own."""
    every = t1.cells(scale)
    most = max(cell.settings["labels"] for cell in every)
    return [cell for cell in every if cell.settings["labels"] == most and not cell.settings["turned"]]


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """Accuracy against error, and both against the dial, for each symmetry."""
    panels = {own: curves(of(rows, symmetry=own), t1.GAIN, t1.ERROR) for own in values(rows, "symmetry")}
    claims = [
        replace(claim, text=f"{symmetry}: {claim.text}")
        for symmetry, found in panels.items()
        for claim in (*lower_errors(found, KINDS, ("RPP", "paper")), *dials_move(found, ["ours"]))
    ]
    return Page(
        "F2. Tunability on MNIST",
        [
            "Combined accuracy and invariance error of the two-layer MLP of T1 within "
            f"{t1.RANGE} degrees, mean and standard deviation over seeds. The paper's figure shows ours and RPP, and "
            "gives no numbers to set beside these.",
        ],
        claims,
        figures=[trade_off("trade-off", panels, "combined accuracy, %", "invariance error (KL)"), by_dial(panels)],
    )


def by_dial(panels: dict[str, Curves]) -> Figure:
    """Both figures against the dial, a column for each symmetry."""

    def draw(canvas: Any) -> None:
        axes = canvas.subplots(2, len(panels), squeeze=False, sharex=True, sharey="row")
        for column, (title, found) in enumerate(panels.items()):
            for arm in (arm for arm in DIALLED if arm in found):
                dials = [stop.dial for stop in found[arm]]
                for row, spreads in enumerate(zip(*((stop.gain, stop.error) for stop in found[arm]), strict=True)):
                    axes[row, column].errorbar(
                        dials,
                        [spread.mean * (1 if row else 100) for spread in spreads],
                        yerr=[known(spread.std) * (1 if row else 100) for spread in spreads],
                        label=arm,
                        **style(arm, DIALLED),
                    )
            axes[0, column].set_title(title)
            axes[1, column].set_xlabel("dial")
            axes[1, column].set_xscale("symlog", linthresh=LEAST)
        axes[0, 0].set_ylabel("combined accuracy, %")
        axes[1, 0].set_ylabel("invariance error (KL)")
        axes[0, -1].legend(fontsize=8)
        for axis in axes.flat:
            axis.grid(alpha=0.3)

    return Figure("dial", "combined accuracy and invariance error against the dial", draw, (3.8 * len(panels), 5.6))


F2 = Experiment("F2", "Tunability on MNIST", cells, t1.work, page)
