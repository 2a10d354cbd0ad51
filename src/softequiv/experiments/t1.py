"""T1: does the dial move a small network from invariant to free? A two-layer MLP on MNIST, from scratch.

The paper's figure of tunability, for rotations and roto-reflections within 60 degrees, with the paper's own
construction, residual pathways, and what needs no architecture beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from softequiv.baselines.augmentation import Augmented
from softequiv.experiments.arms import HALF_BATCHES, Armed, Setting, armed, batch_of, restore_variance
from softequiv.experiments.augmentation import RIVALS, against
from softequiv.experiments.base import Experiment, Scale, data_folder
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import (
    Curves,
    as_good_as_plain,
    curves,
    dials_move,
    lower_errors,
    trade_off,
)
from softequiv.experiments.finetune import KINDS, OURS, longer, of, seed_counts, trained_and_judged, values
from softequiv.experiments.judged import TESTED, TRAINED, judged, quarters, turns
from softequiv.experiments.pages import Claim, Page, Table, bullets, spread_over_seeds
from softequiv.groups import SO, O, degrees
from softequiv.tasks.classification import Classification
from softequiv.tasks.mnist import mnist
from softequiv.tasks.splits import few
from softequiv.training import Recipe

RANGE = 60
WIDTH, SIDE = 256, 40  # hidden units; pixels of a side, 28 padded by 6
DIAL = (0.0, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.6, 0.9)
STOPS: dict[str, tuple[float, ...]] = {
    "plain": (1.0,),
    "ours": DIAL,
    "ours (levels)": (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0),
    "ours (target)": (0.05, 0.2, 0.5, 0.8, 1.1),
    "paper": DIAL,
    "paper (smooth)": (0.0, 0.05, 0.2, 0.6, 0.9),
    "RPP": DIAL,
    "penalty": (0.3, 1.0, 3.0),
    "held": (0.03, 0.1, 0.3),
    "held + labels": (0.0015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1),
    HALF_BATCHES: (0.03, 0.04, 0.08),
    "mixture": (0.0, 0.1, 0.3),
}
SEEDS = {"penalty": 3, "held": 3, "held + labels": 3, HALF_BATCHES: 3, "mixture": 3}  # of the others 5
SYMMETRIES = ("rotation", "roto-reflection")
OTHERS = ("paper", "paper (smooth)", "RPP", "penalty")
SEEING_TURNS = ("penalty", "held", "held + labels", HALF_BATCHES)  # which turn digits themselves in training
DIALLED = (*OURS, "paper", "paper (smooth)", "RPP")  # a penalty is a strength: more of it is less error
TURNED = [
    ("plain", 1.0),
    *(("ours", stop) for stop in (0.025, 0.05, 0.1, 0.35)),
    ("paper", 0.1),
    ("RPP", 0.1),
    ("penalty", 1.0),
    ("held", 0.03),
]
FEW = [
    ("plain", 1.0),
    *((arm, stop) for arm in ("ours", "paper", "RPP") for stop in (0.0, 0.025, 0.05, 0.1)),
    ("penalty", 1.0),
    ("held", 0.1),
    ("held + labels", 0.1),
    (HALF_BATCHES, 0.1),
]
FEW_LABELS = {0.01: 300, 0.1: 100}  # share of the labels, and epochs: with few digits an epoch is a few steps
STEPS_AT_LEAST = 8  # of an epoch
GAIN, ERROR = "cAcc in range", "iErr in range"
DIALS = bullets(
    "What the dial of each arm sets:",
    {
        "ours, paper, paper (smooth)": "softness, of our filter and of the paper's construction",
        "RPP": "the factor on the free path",
        "ours (levels)": "the highest rotation frequency that is kept, as a constraint that training cannot undo: "
        "softness scales the level on which its count falls, and training can undo a scale",
        "ours (target)": f"the certified relative error of the first layer within {RANGE} degrees",
        "penalty": "the strength of a penalty on the KL of the network",
        "held": "the KL at which an adaptive price holds the network, measured on half of each batch",
        "held + labels": "the same, measured on whole batches and learning from the digits turned for it",
        HALF_BATCHES: "as 'held + labels', with half as many digits a step and twice as many steps",
        "mixture": "the share of the answer that is not averaged over quarter turns (and flips)",
    },
)
RECIPE = Recipe(epochs=30, batch=512, optimizer="adam", rate=1e-3, weight_decay=1e-4, schedule="linear")


def cells(scale: Scale) -> list[Cell]:
    """Every arm at every stop of its dial, trained upright; then some trained on turned digits, and with few labels."""
    if scale == "smoke":
        base = {"symmetry": "rotation", "turned": False, "labels": 0.02, "epochs": 1, "tested": 200, "seed": 0}
        chosen = [("plain", 1.0), ("ours", 0.05), ("ours", 0.2), ("RPP", 0.1)]
        return [Cell("T1", {**base, "arm": arm, "dial": dial}) for arm, dial in chosen]
    found: list[tuple[int, dict[str, Any]]] = []
    for symmetry in SYMMETRIES:
        base = {"symmetry": symmetry, "turned": False, "labels": 1.0, "epochs": RECIPE.epochs, "tested": None}
        found += [
            (SEEDS.get(arm, 5), {**base, "arm": arm, "dial": stop}) for arm, stops in STOPS.items() for stop in stops
        ]
        found += [(3, {**base, "turned": True, "arm": arm, "dial": stop}) for arm, stop in TURNED]
        found += [(3, longer(base))]
    for labels, epochs in FEW_LABELS.items():
        base = {"symmetry": "rotation", "turned": False, "labels": labels, "epochs": epochs, "tested": None}
        found += [(3, {**base, "arm": arm, "dial": stop}) for arm, stop in FEW]
        found += [(3, {**base, "turned": True, "arm": "plain", "dial": 1.0}), (3, longer(base))]
    return [Cell("T1", {**settings, "seed": seed}) for seeds, settings in found for seed in range(seeds)]


@lru_cache(maxsize=1)
def digits() -> Classification:
    """MNIST with a tenth held out, the same tenth for all."""
    return mnist(data_folder("mnist"))


def network(seed: int) -> nn.Module:
    """Two layers; the first sees the flattened picture."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def work(settings: Settings) -> Figures:
    """Train one cell and judge it."""
    flips = settings["symmetry"] == "roto-reflection"
    setting = Setting(O(2) if flips else SO(2), degrees(RANGE), digits().acts, 1, {"1": (1, SIDE, SIDE)})
    arm = armed(settings["arm"], network(settings["seed"]), settings["dial"], setting)
    restore_variance(arm.model)
    return learnt(arm, settings, RECIPE)


def learnt(arm: Armed, settings: Settings, recipe: Recipe) -> Figures:
    """A model of digits: trained with all or few labels, on upright or turned digits; judged in range and beyond."""
    task, flips = digits(), settings["symmetry"] == "roto-reflection"
    if settings["labels"] < 1:
        task = replace(task, train=few(task.train, settings["labels"], settings["seed"]))
    if settings["tested"]:
        first = torch.arange(settings["tested"])
        task = replace(task, validation=task.validation.part(first), test=task.test.part(first))
    recipe = replace(
        recipe,
        seed=settings["seed"],
        epochs=settings["epochs"],
        batch=batch_of(settings["arm"], min(recipe.batch, max(64, len(task.train) // STEPS_AT_LEAST))),
        evaluate_every=max(1, settings["epochs"] // 30),
    )
    known, unseen = (turns(task.acts, RANGE, flips=flips, seed=seed) for seed in (TRAINED, TESTED))
    ranges = {"in range": unseen, "90": quarters(task.acts, 1), "180": quarters(task.acts, 2)}
    judge = partial(judged, ranges=ranges, disc="in range")
    return trained_and_judged(arm, task, recipe, judge, known, Augmented(known) if settings["turned"] else None)


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """Curves of both symmetries, and what became of turned training and few labels."""
    most = max(row["labels"] for row in rows)
    whole = of(rows, labels=most, turned=False)
    panels = {symmetry: curves(of(whole, symmetry=symmetry), GAIN, ERROR) for symmetry in values(whole, "symmetry")}
    claims = [
        replace(claim, text=f"{symmetry}: {claim.text}")
        for symmetry, found in panels.items()
        for claim in (
            *lower_errors(found, KINDS, OTHERS),
            *as_good_as_plain(found, KINDS),
            *dials_move(found, DIALLED),
        )
    ]
    claims += against_augmentation(rows, ("ours", *SEEING_TURNS))
    return Page(
        "T1. MNIST: from invariant to free",
        [
            f"A two-layer MLP ({SIDE * SIDE} to {WIDTH} to 10) on MNIST, {len(digits().train):,} digits to train, "
            f"{len(digits().test):,} to test, padded to {SIDE} x {SIDE}; {rows[0]['epochs']} epochs of Adam as in the "
            f"paper, {seed_counts(rows)} seeds. Trained on upright digits unless said otherwise; the model of the "
            "epoch with the best combined accuracy on the validation digits is tested. Turned digits: within "
            f"{RANGE} degrees, for roto-reflections half of them also mirrored; what turns leave empty is black. "
            "The padding keeps every turned digit inside the inscribed disc, so that no pixel is lost to corners.",
            DIALS,
            "The paper's figure gives no numbers to compare with.",
        ],
        claims,
        [
            *(stop_table(symmetry, of(whole, symmetry=symmetry)) for symmetry in panels),
            *(
                stop_table(title, chosen)
                for title, chosen in (
                    ("Trained on turned digits", of(rows, turned=True, labels=most)),
                    ("1 % of the labels", [row for row in rows if row["labels"] == 0.01 < most]),
                    ("10 % of the labels", [row for row in rows if row["labels"] == 0.1 < most]),
                )
                if chosen
            ),
        ],
        [
            trade_off(name, shown, "combined accuracy, %", "invariance error (KL)")
            for name, shown in (("curves", panels), ("augmentation", beside_augmentation(rows)))
            if shown
        ],
    )


def beside_augmentation(rows: Sequence[Row]) -> dict[str, Curves]:
    """What sees turned digits in training, near augmentation: dials of the network trained on upright digits with all
    labels, and augmentation by its names."""
    whole = of(rows, labels=1)
    shown: dict[str, Curves] = {}
    for symmetry in values(whole, "symmetry"):
        upright, turned = (curves(of(whole, symmetry=symmetry, turned=way), GAIN, ERROR) for way in (False, True))
        dials = {arm: upright[arm] for arm in SEEING_TURNS if arm in upright}
        rivals = {name: turned[arm] for name, (arm, *_) in RIVALS.items() if arm in turned}
        if dials and rivals:
            shown[symmetry] = dials | rivals
    return shown


def against_augmentation(rows: Sequence[Row], arms: Sequence[str]) -> list[Claim]:
    """Whether arms trained on upright digits, or on turned ones, beat the plain network trained on turned ones, for all
    labels and few.
    """
    claims = []
    for symmetry in values(rows, "symmetry"):
        for labels in sorted(values(rows, "labels"), reverse=True):
            mine = of(rows, symmetry=symmetry, labels=labels)
            upright, turned = (curves(of(mine, turned=way), GAIN, ERROR) for way in (False, True))
            claims += [
                replace(made[arm], text=f"{symmetry}, {100 * labels:g} % of the labels{seen}: {made[arm].text}")
                for seen, found in (("", upright), (", trained on turned digits", turned))
                for made in against(found, turned).values()
                for arm in arms
                if arm in made
            ]
    return claims


def stop_table(title: str, rows: Sequence[Row]) -> Table:
    """All figures of all stops, mean and spread over seeds."""
    shown = {
        "Acc": ("Acc", 100, 2),
        "aAcc": ("aAcc in range", 100, 2),
        "cAcc": ("cAcc in range", 100, 2),
        "iErr": ("iErr in range", 1, 3),
        "aAcc 90°": ("aAcc 90", 100, 1),
        "aAcc 180°": ("aAcc 180", 100, 1),
    }
    by = ("symmetry", "arm", "dial", "turned")
    spreads = {head: spread_over_seeds(rows, figure, *by) for head, (figure, _, _) in shown.items()}
    lines = []
    for key in spreads["Acc"]:
        symmetry, arm, dial, turned = key
        name = f"{arm}{', turned in training' if turned else ''}"
        told = [spreads[head][key].told(scale, digits) for head, (_, scale, digits) in shown.items()]
        lines.append([symmetry, name, f"{dial:g}", *told])
    return Table(f"## {title}", ["symmetry", "arm", "dial", *shown], lines)


T1 = Experiment("T1", "MNIST: from invariant to free", cells, work, page)
