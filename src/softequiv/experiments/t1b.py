"""T1b: how do relaxed group convolutions compare? The filter banks of Wang et al. (2022) on MNIST, beside soft CNNs.

All are CNNs of three layers with as many feature maps, on the digits and turns of T1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from softequiv.adapt import soften
from softequiv.baselines.group_cnn import GroupCNN
from softequiv.baselines.relaxed import RelaxedGroupCNN
from softequiv.experiments.arms import Armed, Setting, armed, restore_variance
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import curves, dials_move, lower_errors, trade_off
from softequiv.experiments.costs import plain_cnn
from softequiv.experiments.finetune import longer, of, values
from softequiv.experiments.pages import Page, bullets
from softequiv.experiments.t1 import ERROR, GAIN, RANGE, against_augmentation, digits, learnt, stop_table
from softequiv.experiments.whole_network import holds
from softequiv.gains import softness
from softequiv.groups import SO, C, degrees
from softequiv.networks.steerable import steerable_cnn
from softequiv.training import Recipe

GROUP = C(4)
WIDTHS = (8, 16, 32)
TYPED = "ours (typed)"
STOPS: dict[str, tuple[float, ...]] = {
    "plain": (1.0,),
    "relaxed": (1.0, 2.0, 3.0, 4.0),
    "ours": (0.0, 0.2, 0.5, 0.7, 0.8, 0.9),
    TYPED: (0.0, 0.01, 0.02, 0.05, 0.1, 0.3),
    "group CNN": (0.0,),
    "penalty": (0.3, 1.0, 3.0),
    "held + labels": (0.01, 0.02, 0.03),
    "mixture": (0.0, 0.1, 0.3),
}
TURNED: dict[str, tuple[float, ...]] = {  # what is trained on turned digits too
    "plain": (1.0,),
    "relaxed": (1.0, 2.0),
    TYPED: (0.0, 0.02, 0.1),
    "penalty": (1.0,),
    "held + labels": (0.03,),
    "mixture": (0.0,),
}
SOFT = max(STOPS[TYPED])
COMBINED: dict[str, tuple[float, ...]] = {"typed + penalty": (1.0, 3.0), "typed + held": (0.03, 0.06)}  # small scale
# how an arm whose network may be any is trained
WAYS = {arm: arm for arm in ("penalty", "held + labels", "mixture")}
WAYS |= {"typed + penalty": "penalty", "typed + held": "held + labels"}
KINDS = {"of weights": ("ours", TYPED), "of the network": ("held + labels", "mixture", *COMBINED)}
DIALS = [arm for arms in KINDS.values() for arm in arms]
RISING = [arm for arm in DIALS if WAYS.get(arm) != "penalty"]  # a stronger penalty means a smaller error
ARMS = {
    "relaxed": "the number of filter banks of a relaxed group CNN over C4; 1 is strict",
    "ours": "the softness of every kernel of a plain CNN under SO(2)",
    TYPED: "the softness of a CNN whose channels carry the frequencies 0, 1 and 2, with five maps where the "
    "others have four; 0 is strict, and more lets the frequencies mix",
    "penalty": "the strength of a penalty on the KL of the plain CNN",
    "held + labels": "the KL at which an adaptive price holds the plain CNN, which also learns from the digits turned "
    "for the measurement",
    "mixture": "the share of the plain CNN's answer that is not averaged over quarter turns",
    "typed + penalty": f"the same strength, for the typed CNN at softness {SOFT:g}",
    "typed + held": f"the same KL, for the typed CNN at softness {SOFT:g}",
}
PAPER = "The paper reports combined accuracies of 83.08 / 81.25 / 82.74 for 2 / 3 / 4 filter banks and 85.52 / 85.22 / \
85.11 for its own MLP at softness .7 / .8 / .9; it does not say how large the networks are."
RECIPE = Recipe(epochs=10, batch=512, optimizer="adam", rate=2e-3, weight_decay=1e-4, schedule="linear")
NARROW = {"labels": 0.1, "batch": 64, "widths": (2, 4, 8), "tested": 2000}  # as many steps as with all digits


def cells(scale: Scale) -> list[Cell]:
    """Banks, softness, and the strict ones; upright, and trained on turned digits."""
    base = {"symmetry": "rotation", "labels": 1.0, "epochs": RECIPE.epochs, "tested": None}
    if scale == "smoke":
        quick = {**base, "labels": 0.01, "epochs": 1, "turned": False, "tested": 100, "seed": 0}
        chosen = [("plain", 1.0), ("relaxed", 2.0), ("ours", 0.5)]
        return [Cell("T1b", {**quick, "arm": arm, "dial": dial}) for arm, dial in chosen]
    if scale == "small":
        base |= NARROW
    found = [
        {**base, "turned": turned, "arm": arm, "dial": stop}
        for turned, arms in ((False, STOPS if scale == "full" else STOPS | COMBINED), (True, TURNED))
        for arm, stops in arms.items()
        for stop in stops
    ]
    return [Cell("T1b", {**settings, "seed": seed}) for settings in (*found, longer(base)) for seed in range(3)]


def network(arm: str, dial: float, seed: int, widths: Sequence[int] = WIDTHS) -> nn.Module:
    """The network of an arm, all with as many feature maps but the typed ones, which have a quarter more."""
    if arm in COMBINED:
        arm, dial = TYPED, SOFT
    torch.manual_seed(seed)
    wide = [width * int(GROUP.order) for width in widths]
    if arm == "relaxed":
        return RelaxedGroupCNN(GROUP, 1, 10, banks=int(dial), widths=widths)
    if arm == "group CNN":
        return GroupCNN(GROUP, 1, 10, widths=widths)
    if arm == TYPED:
        return steerable_cnn(SO(2), 1, 10, widths=widths, gain=softness(dial))
    model: nn.Module = plain_cnn(wide, channels=1)
    if arm == "ours":
        soften(model, SO(2), softness=dial)
        restore_variance(model)
    return model


def work(settings: Settings) -> Figures:
    """Train one network and judge it."""
    arm, dial = settings["arm"], settings["dial"]
    model = network(arm, dial, settings["seed"], settings.get("widths", WIDTHS))
    recipe = replace(RECIPE, batch=settings.get("batch", RECIPE.batch))
    if arm in WAYS:
        setting = Setting(SO(2), degrees(RANGE), digits().acts, 1)
        return learnt(armed(WAYS[arm], model, dial, setting), settings, recipe)
    return learnt(Armed(model), settings, recipe)


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """Curves over banks and softness, trained upright and turned."""
    panels = {
        title: curves(mine, GAIN, ERROR)
        for title, turned in (("trained upright", False), ("trained on turned digits", True))
        if (mine := of(rows, turned=turned))
    }
    first = next(iter(panels.values()))
    quarter = curves(of(rows, turned=False), "Acc", "iErr 90")
    widths = rows[0].settings.get("widths", WIDTHS)
    return Page(
        "T1b. Relaxed group convolutions on MNIST",
        [
            f"CNNs of three 5 x 5 layers with {' / '.join(str(4 * width) for width in widths)} feature maps on "
            f"{100 * rows[0]['labels']:g} % of the digits, tested on {rows[0]['tested'] or 'all'} of the test digits; "
            f"{rows[0]['epochs']} epochs of Adam, {len({row['seed'] for row in rows})} seeds; "
            f"turned digits within {RANGE} degrees.",
            bullets("What the dial of each arm sets:", {arm: ARMS[arm] for arm in values(rows, "arm") if arm in ARMS}),
            PAPER,
        ],
        [
            replace(claim, text=f"without turns: {claim.text}")
            for claim in (
                *lower_errors(first, KINDS, ("relaxed", "group CNN", "penalty")),
                *dials_move(first, RISING),
                *(holds("under quarter turns", quarter, arm) for arm in (TYPED, "mixture") if arm in quarter),
            )
        ]
        + against_augmentation(rows, ("penalty", *DIALS)),
        [stop_table(title, of(rows, turned="turned" in title)) for title in panels],
        [trade_off("curves", panels, "combined accuracy, %", "invariance error (KL)")],
    )


T1B = Experiment("T1b", "Relaxed group convolutions on MNIST", cells, work, page)
