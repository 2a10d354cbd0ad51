"""What does full equivariance cost? Softness 0 in fine-tuned classifiers, ours and the paper's, beside plain ones."""

from __future__ import annotations

from collections.abc import Sequence

from softequiv.experiments import t2
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.compare import apart
from softequiv.experiments.finetune import by_training, stop_table
from softequiv.experiments.pages import Claim, Page, spread_over_seeds

STOPS = {"plain": (1.0,), "ours": (0.0,), "paper": (0.0,)}
PAPER = (
    "The paper's combined accuracies at softness 0, for ViT-B/16, DINOv2-B and ResNet-50: CIFAR-10 84.10 / 93.07 / "
    "73.21, CIFAR-100 66.98 / 81.99 / 58.85."
)


def cells(scale: Scale) -> list[Cell]:
    """T2's cells at softness 0 and without a filter."""
    if scale == "smoke":
        strict = t2.cells(scale)[1]
        return [Cell("T2", {**strict.settings, "dial": 0.0})]
    backbones, data = (t2.HUB, ("cifar10", "cifar100")) if scale == "full" else (t2.STAND_INS, ("cifar10",))
    return [
        Cell("T2", {**setting, "seed": seed})
        for seed in range(5 if scale == "full" else 3)
        for source in data
        for backbone in backbones
        for setting in t2.main_settings(backbone, source, STOPS)
    ]


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """A table for each backbone and way of training, and whether ours is ahead of the paper's."""
    ways = by_training(rows)
    return Page(
        "Full equivariance",
        [
            f"{rows[0]['dataset']}, fine-tuned as in T2 with every filterable weight at softness 0; turned pictures "
            f"within {t2.RANGE} degrees, {len({row['seed'] for row in rows})} seeds.",
            PAPER,
        ],
        [claim for name, mine in ways.items() for claim in ahead(name, mine)],
        [stop_table(name, mine, t2.SHOWN) for name, mine in ways.items()],
    )


def ahead(name: str, rows: Sequence[Row]) -> list[Claim]:
    """Whether our strict model has a combined accuracy above the paper's."""
    found = spread_over_seeds(rows, "cAcc 30", "arm")
    if ("ours",) not in found or ("paper",) not in found:
        return []
    ours, paper = found["ours",], found["paper",]
    errors = spread_over_seeds(rows, "iErr 30", "arm")
    return [
        Claim(
            f"{name}: at softness 0 ours has a higher combined accuracy than the paper's, beyond the spread",
            apart(paper, ours),
            f"{ours.told(100, 2)} against {paper.told(100, 2)}, with an error of {errors['ours',].told()} against "
            f"{errors['paper',].told()}",
        )
    ]


FULL_EQUIVARIANT = Experiment("full-equivariant", "Full equivariance", cells, t2.work, page)
