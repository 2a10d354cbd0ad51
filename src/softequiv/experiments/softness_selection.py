"""Which softness should one take? The stop that validation prefers, and what it loses on the test, from T2's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from softequiv.experiments import t2
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.compare import SCORE
from softequiv.experiments.finetune import by_training, of, told
from softequiv.experiments.pages import Claim, Page, Table, spread_over_seeds

DIALS = ("ours", "ours (target)", "paper")


def cells(scale: Scale) -> list[Cell]:
    """The cells of T2 that were trained with all labels; they are T2's own."""
    return [
        cell
        for cell in t2.cells(scale)
        if cell.settings["arm"] in DIALS and cell.settings["labels"] == 1 and cell.settings["epochs"]
    ]


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """What validation would choose, for each backbone, way of training and dial."""
    lines, lost, freest, once = [], [], 0, 0
    for mine in by_training(rows).values():
        backbone, way = mine[0]["backbone"], told(mine[0].settings)
        for arm in (arm for arm in DIALS if of(mine, arm=arm)):
            validated = spread_over_seeds(of(mine, arm=arm), SCORE, "dial")
            tested = spread_over_seeds(of(mine, arm=arm), "cAcc 30", "dial")
            (chosen,), (best,) = (max(found, key=lambda key: found[key].mean) for found in (validated, tested))
            lost.append(tested[best,].mean - tested[chosen,].mean)
            freest += chosen == max(tested)[0]
            once += math.isnan(tested[chosen,].std)
            scores = [tested[stop,].told(100, 2) for stop in (chosen, best)]
            lines.append([backbone, way, arm, f"{chosen:g}", scores[0], f"{best:g}", scores[1]])
    return Page(
        "Choosing softness",
        [
            "The stop of each dial with the best combined accuracy on the validation pictures, beside the stop that "
            "would have been best on the test. T2 says how the models were trained."
        ],
        [
            Claim(
                "choosing the dial by validation loses less than half a point of combined accuracy on the test",
                max(lost) < 0.005,
                f"at most {max(lost) * 100:.2f} points over {len(lost)} dials, {once} of which with one seed; at "
                f"{freest} of them it chooses the freest stop",
            )
        ],
        [
            Table(
                "## The dial that validation prefers",
                ["backbone", "trained", "dial of", "chosen", "cAcc, %", "best on the test", "cAcc, %"],
                lines,
            )
        ],
        [t2.softness_figure(rows)] if of(rows, turned=True) else [],
    )


SOFTNESS_SELECTION = Experiment("softness-selection", "Choosing softness", cells, t2.work, page)
