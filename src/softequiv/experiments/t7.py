"""T7: how long does it take to make a weight equivariant? Maps of n x n pictures: the paper's two ways, and ours.

Seconds are this machine's and the paper's are another's, so that what can be compared are ratios within each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.bench import fold
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import COLOURS, MARKS
from softequiv.experiments.pages import Claim, Figure, Page, Table
from softequiv.experiments.speed import spectrum_cost

SIZES: dict[Scale, tuple[int, ...]] = {"smoke": (4, 6), "small": (4, 6, 8, 10, 12, 14), "full": (4, 6, 8, 10, 12, 14)}
SVD_UP_TO: dict[Scale, int] = {"smoke": 4, "small": 8, "full": 14}  # 10 x 10 takes ten minutes; 14 x 14 has 11 GB
PAPER_SVD = {4: 0.17, 6: 0.50, 8: 10.0, 10: 45.0, 12: 280.0, 14: 890.0}  # seconds stated by the paper
PAPER_SCHUR = {4: 0.004, 6: 0.01, 8: 0.02, 10: 0.05, 12: 0.13, 14: 0.25}
WAYS = {"SVD": "svd", "Schur rule": "schur", "ours": "ours"}


def cells(scale: Scale) -> list[Cell]:
    """One size each; seconds are those of the machine, so they should run one after another."""
    return [Cell("T7", {"n": n, "action": "exact", "svd": n <= SVD_UP_TO[scale]}) for n in SIZES[scale]]


def work(settings: Settings) -> Figures:
    """Time every way at one size, in turns."""
    cost = spectrum_cost(settings["n"], settings["action"], svd=settings["svd"])
    return {**asdict(cost), "ours": cost.ours}


def faster(rows: Sequence[Row], way: str) -> Claim:
    """Whether ours takes less time than another way at every size at which that was run."""
    ratios = {row["n"]: row[WAYS[way]] / row["ours"] for row in rows if row[WAYS[way]] is not None}
    return Claim(
        f"ours is faster than the {way} at every size at which that was run",
        bool(ratios) and min(ratios.values()) > 1,
        "; ".join(f"{n} x {n}: {fold(ratio)}" for n, ratio in ratios.items()) or "it was not run",
    )


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """Seconds of each way beside the paper's."""
    rows = sorted(rows, key=lambda row: int(row["n"]))
    lines = [
        [
            f"{row['n']} x {row['n']}",
            *(told(row[figure]) for figure in WAYS.values()),
            *(fold(None if row[way] is None else row[way] / row["ours"]) for way in ("svd", "schur")),
            *(f"{known[row['n']]:g} s" if row["n"] in known else "-" for known in (PAPER_SVD, PAPER_SCHUR)),
        ]
        for row in rows
    ]
    header = ["n x n", *WAYS, "SVD / ours", "Schur rule / ours", "the paper's SVD", "the paper's Schur rule"]
    return Page(
        "T7. Seconds to make a weight equivariant",
        [
            "A linear map of n x n pictures has n^4 entries. SVD: singular vectors of the Kronecker matrix, one run. "
            "Schur rule: the paper's, for one generator, in plain Python. Ours: a spectrum built with an empty cache, "
            "and one weight filtered by it. Both start from the size of the picture: the Schur rule makes the matrix "
            "of the generator first, which ours does without. All in float64 on the CPU, in turns, the best of three "
            "rounds at least.",
            "The paper's seconds are another machine's. Its Schur rule answers for one normal generator and one "
            "cut-off; a spectrum serves any number of generators, every gain, and the certificates.",
        ],
        [faster(rows, way) for way in ("SVD", "Schur rule")],
        [Table("## Seconds", header, lines)],
        [growth(rows)],
    )


def told(seconds: float | None) -> str:
    """A time as people read it.

    >>> told(0.00123), told(113.2), told(None)
    ('0.0012 s', '113 s', '-')
    """
    return "-" if seconds is None else f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def growth(rows: Sequence[Row]) -> Figure:
    """Seconds against n, on logarithmic axes."""

    def draw(canvas: Any) -> None:
        axis = canvas.subplots()
        lines = {way: {row["n"]: row[figure] for row in rows if row[figure]} for way, figure in WAYS.items()}
        lines |= {"SVD, the paper's seconds": PAPER_SVD, "Schur rule, the paper's seconds": PAPER_SCHUR}
        for number, (way, points) in enumerate(lines.items()):
            style = {"color": COLOURS[number], "marker": MARKS[number], "markersize": 4, "linewidth": 1}
            axis.plot(list(points), list(points.values()), label=way, **style)
        axis.set(xscale="log", yscale="log", xlabel="n, pixels of a side", ylabel="seconds")
        axis.set_xticks([row["n"] for row in rows], [str(row["n"]) for row in rows])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)

    return Figure("growth", "seconds against the side of the picture for the SVD, the Schur rule and ours", draw)


T7 = Experiment("T7", "Seconds to make a weight equivariant", cells, work, page)
