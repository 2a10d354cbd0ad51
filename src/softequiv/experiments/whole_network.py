"""Does a dial hold for the whole network after training? Ways to hold it, beside augmentation, on T2's backbones.

The cells are T2's own where an arm is in that table too, so that all arms are trained and judged alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from softequiv.experiments import t2
from softequiv.experiments.arms import HALF_BATCHES, LONGER
from softequiv.experiments.augmentation import against_augmentation, beaten
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Row
from softequiv.experiments.compare import (
    Curves,
    beside_augmentation,
    curves,
    if_of_one_seed,
    in_short,
    of_one_seed,
    spearman,
    trade_off,
)
from softequiv.experiments.finetune import of, seed_counts, tables, values
from softequiv.experiments.pages import Claim, Page, Table, bullets

SEEDS = 3
STOPS: dict[str, tuple[float, ...]] = {
    "mixture + held": (0.3,),
    "ours + held": (0.06,),
}
UPRIGHT: dict[str, tuple[float, ...]] = {  # trained on upright pictures, or on those that the arm itself turns
    "plain (any angle)": (180.0,),
    "ours + noise": (0.5,),
    "ours + limit": (0.5,),
    "ours + frozen": (0.5,),
}
ARMS = bullets(
    "The other arms, and what their dials set:",
    {
        "held + labels": "an adaptive price holds the measured KL of the network at the dial; the network also learns "
        "from the pictures turned for the measurement",
        "mixture": "the answer is the mean over quarter turns, but for a share, the dial, that is the model's own",
        "mixture + held": "a mixture, with its share as the dial, held at a KL of 0.05; half of each batch is "
        "measured, and the pictures moved for that are not learnt from",
        "ours + held": "our filter, held likewise, with the KL as the dial",
        "ours + noise": "our filter, with noise of the size of the certified residual behind each filtered weight",
        "ours + limit": "our filter; no other weight may grow in norm",
        "ours + frozen": "our filter; of the other weights only norms and the head learn",
    },
)
ZERO = 1e-3  # of the plain model's error

# What an arm costs beside plain training, in forward passes of a step and of an answer, and what is guaranteed.
COSTS = {
    "plain": ("1 / 1", "nothing"),
    LONGER: ("1 / 1, twice as many steps", "nothing"),
    "plain (any angle)": ("1 / 1", "nothing"),
    "ours": ("1 / 1", "each filtered weight, by its levels; nothing of the network"),
    "ours (target)": ("1 / 1", "each filtered weight, by its error; nothing of the network"),
    "paper": ("1 / 1", "as ours, for the finite group"),
    "paper (smooth)": ("1 / 1", "nothing once it is trained"),
    "RPP": ("1 / 1", "nothing"),
    "canonical": ("1 + the scorer / 1 + the scorer", "multiples of 20 degrees, as far as turning pictures is exact"),
    "penalty": ("2 / 1", "nothing"),
    "held + labels": ("2 / 1", "nothing; measured on training batches at every step"),
    HALF_BATCHES: ("2 of half a batch / 1, twice as many steps", "as 'held + labels'"),
    "ours + held": ("1.5 / 1", "as ours"),
    "ours + noise": ("1 / 1", "as ours"),
    "ours + limit": ("1 / 1", "as ours, and that no other weight grew"),
    "ours + frozen": ("1 / 1", "as ours, and that no other weight changed"),
    "mixture": ("2 / 4", "the network: total variation at most the dial under quarter turns, exactly"),
    "mixture + held": ("3 / 4", "as the mixture"),
}


def cells(scale: Scale) -> list[Cell]:
    """T2's cells with all labels, and those of the arms that only this table has, seed by seed."""
    if scale == "smoke":
        one = t2.cells(scale)[0]
        return [
            one,
            *(
                Cell("T2", {**one.settings, "arm": arm, "dial": t2.STOPS[arm][0]})
                for arm in ("held + labels", "mixture")
            ),
        ]
    theirs = [cell for cell in t2.cells(scale) if cell.settings["epochs"]]
    backbones, data = (t2.HUB, "cifar10") if scale == "full" else (t2.STAND_INS, "cifar10")
    mine = [
        Cell("T2", {**settings, "seed": seed})
        for seed in range(SEEDS)
        for backbone in backbones
        for settings in (
            *t2.main_settings(backbone, data, STOPS),
            *(upright for upright in t2.main_settings(backbone, data, UPRIGHT) if not upright["turned"]),
        )
    ]
    return [*theirs, *mine]


def holds(name: str, found: Curves, arm: str) -> Claim:
    """Whether the dial moves the error monotonically from the plain model's to nothing."""
    stops, free = found[arm], found["plain"][0]
    errors = [*(stop.error.mean for stop in stops), free.error.mean]
    rank = spearman([float(place) for place in range(len(errors))], errors)
    return Claim(
        f"{name}: the dial of {arm} moves the error monotonically from the plain model's to zero",
        rank > 0.99 and min(errors) <= ZERO * free.error.mean and not of_one_seed([*stops, free]),
        f"rank correlation {rank:.2f} over {len(errors)} stops, KL from {free.error.mean:.3g} down to "
        f"{stops[0].error.mean:.3g}, accuracy from {free.gain.told(100, 2)} to {stops[0].gain.told(100, 2)} %"
        f"{if_of_one_seed([*stops, free])}",
        "Does the dial go from the plain model's error to zero?",
        arm,
        in_short(f"{free.error.mean:.2g} → {max(0.0, round(stops[0].error.mean, 6)):.2g}", [*stops, free]),
    )


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """How each dial stands, and what each way costs."""
    whole = [row for row in rows if row["labels"] == 1]
    panels: dict[str, Curves] = {}
    quarter: dict[str, Curves] = {}
    claims = []
    for backbone in values(whole, "backbone"):
        for turned in (True, False):
            mine = of(whole, backbone=backbone, turned=turned)
            if not of(mine, arm="plain"):
                continue
            name = f"{backbone}, {'with' if turned else 'without'} turns"
            panels[name] = curves(mine, "cAcc 30", "iErr 30")
            quarter[name] = curves(mine, "Acc", "iErr 90")
            if "mixture" in panels[name]:
                claims.append(holds(f"{name}, quarter turns", quarter[name], "mixture"))
            claims += [
                holds(f"{name}, within {t2.RANGE} degrees", panels[name], arm)
                for arm in ("held + labels", "ours")
                if arm in panels[name]
            ]
    claims += against_augmentation(rows, t2.JUDGED)
    return Page(
        "Does the dial hold for the whole network?",
        [
            "T2's backbones and training, with further arms. Augmentation is 'plain, with turns'; 'plain (any angle)' "
            "is trained on pictures turned by up to 180 degrees.",
            ARMS,
            f"Seeds: {seed_counts(whole)} for each arm.",
            *([t2.STAND_IN] if scale != "full" else []),
        ],
        claims,
        [
            Table(
                "## What each way costs and guarantees",
                ["arm", "passes of a step / of an answer", "guaranteed"],
                [[arm, *COSTS[arm]] for arm in COSTS if of(whole, arm=arm)],
            ),
            beaten(rows, t2.JUDGED),
            *dials(panels, quarter),
            *tables(rows, t2.SHOWN | t2.BEYOND),
        ],
        [
            trade_off(
                "range", beside_augmentation(panels), "combined accuracy, %", "invariance error (KL) within 30 degrees"
            ),
            trade_off("quarter", beside_augmentation(quarter), "accuracy upright, %", "KL under a quarter turn"),
        ],
    )


def dials(panels: dict[str, Curves], quarter: dict[str, Curves]) -> list[Table]:
    """How the network's error follows each dial with more than one stop, and what accuracy it costs."""
    lines = []
    for name, found in panels.items():
        for arm, stops in found.items():
            if len(stops) < 2:
                continue
            order = [stop.dial for stop in stops]
            ranks = [spearman(order, [s.error.mean for s in place[name][arm]]) for place in (panels, quarter)]
            least = min(stops, key=lambda stop: stop.error.mean)
            free = found["plain"][0]
            lines.append(
                [
                    name,
                    arm,
                    *(f"{rank:+.2f}" for rank in ranks),
                    f"{least.error.mean:.3f} of {free.error.mean:.3f}",
                    f"{100 * (least.gain.mean - free.gain.mean):+.2f}",
                ]
            )
    header = ["trained", "dial of", "Spearman, 30°", "Spearman, 90°", "least KL at 30°, of plain's", "cAcc there"]
    return [Table("## Does the error follow the dial?", header, lines)]


WHOLE_NETWORK = Experiment("whole-network", "A dial for the whole network", cells, t2.work, page)
