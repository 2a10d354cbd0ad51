"""Is softness a dial of a whole ViT where its tokens carry representations? MNIST under quarter turns, which pixels
follow exactly.

The typed network and the plain one are one class with as many numbers a token; the rivals are the plain network trained
on turned digits, and its mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import nn

from softequiv.actions import Moves, Pictures
from softequiv.baselines.augmentation import Augmented
from softequiv.experiments.arms import Setting, armed
from softequiv.experiments.augmentation import against
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import (
    Stop,
    apart,
    curves,
    dials_move,
    if_of_one_seed,
    in_short,
    of_one_seed,
    trade_off,
)
from softequiv.experiments.finetune import Shown, longer, of, seeded, stop_table, trained_and_judged, values
from softequiv.experiments.judged import TESTED, judged, turns
from softequiv.experiments.pages import Claim, Page
from softequiv.experiments.t1 import SIDE, digits
from softequiv.experiments.whole_network import holds
from softequiv.gains import softness
from softequiv.groups import C, degrees
from softequiv.networks.vision import VisionTransformer
from softequiv.tasks.base import Examples
from softequiv.training import Recipe

GROUP = C(4)
PATCH, WIDTH = 8, 60
RANGE = 30  # degrees, by which the networks are judged as well
TYPED = "ours (typed)"
STOPS: dict[str, tuple[float, ...]] = {
    "plain": (1.0,),
    TYPED: (0.0, 0.01, 0.03, 0.1, 1.0),
    "mixture": (0.0,),
}
SEEDS = 3
GAIN, ERROR = "cAcc quarters", "iErr quarters"
RECIPE = Recipe(rate=2e-3, weight_decay=0.05)
SIZES: dict[Scale, dict[str, int | None]] = {
    "smoke": {"layers": 1, "epochs": 1, "batch": 4, "taught": 64, "tested": 100},
    "small": {"layers": 2, "epochs": 2, "batch": 64, "taught": None, "tested": 2000},
    "full": {"layers": 4, "epochs": 30, "batch": 256, "taught": None, "tested": None},
}
SHOWN: Shown = {
    "Acc": ("Acc", 100, 2),
    "aAcc": ("aAcc quarters", 100, 2),
    "cAcc": ("cAcc quarters", 100, 2),
    "iErr": ("iErr quarters", 1, 3),
    f"aAcc {RANGE}°": (f"aAcc {RANGE}", 100, 2),
    f"iErr {RANGE}°": (f"iErr {RANGE}", 1, 3),
}


def cells(scale: Scale) -> list[Cell]:
    """The typed dial, the plain network and its mixture, trained upright; the plain one on turned digits as well."""
    base = SIZES[scale]
    if scale == "smoke":
        quick = {**base, "turned": False, "seed": 0}
        return [Cell("typed-vit", {**quick, "arm": arm, "dial": stops[0]}) for arm, stops in STOPS.items()]
    upright = [{**base, "turned": False, "arm": arm, "dial": stop} for arm, stops in STOPS.items() for stop in stops]
    turned = [{**base, "turned": True, "arm": "plain", "dial": 1.0}, longer(base)]
    return seeded("typed-vit", [*upright, *turned], range(SEEDS))


def network(settings: Settings) -> nn.Module:
    """The ViT of an arm."""
    torch.manual_seed(settings["seed"])
    group, gain = (GROUP, softness(settings["dial"])) if settings["arm"] == TYPED else (None, None)
    return VisionTransformer(SIDE, PATCH, 10, width=WIDTH, layers=settings["layers"], group=group, gain=gain)


@lru_cache
def quarters(acts: Pictures) -> Moves:
    """Turns by one, two and three quarters."""
    return Moves(acts, GROUP, elements=[GROUP.element(k) for k in (1, 2, 3)])


def work(settings: Settings) -> Figures:
    """Train one network and judge it."""
    arm, task, tested = settings["arm"], digits(), settings["tested"]
    task = replace(
        task,
        train=first(task.train, settings["taught"]),
        validation=first(task.validation, tested),
        test=first(task.test, tested),
    )
    setting, moves = Setting(GROUP, degrees(RANGE), task.acts, 1), quarters(task.acts)
    recipe = replace(RECIPE, seed=settings["seed"], epochs=settings["epochs"], batch=settings["batch"])
    return trained_and_judged(
        armed("plain" if arm == TYPED else arm, network(settings), settings["dial"], setting),
        task,
        recipe,
        partial(judged, ranges={"quarters": moves, str(RANGE): turns(task.acts, RANGE, seed=TESTED)}),
        moves,
        Augmented(Moves(task.acts, GROUP)) if settings["turned"] else None,
    )


def first(examples: Examples, count: int | None) -> Examples:
    """The first so many examples, or all."""
    return examples if count is None else examples.part(torch.arange(count))


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """The typed dial beside the plain network, its mixture, and augmentation."""
    upright, turned = (of(rows, turned=way) for way in (False, True))
    found, accuracy = (curves(upright, gain, ERROR) for gain in (GAIN, "Acc"))
    augmented = curves(turned, GAIN, ERROR)
    tables = {"Trained upright": upright, "Trained on digits turned by quarters": turned}
    claims = [replace(claim, text=f"quarter turns: {claim.text}") for claim in dials_move(found, [TYPED])]
    if {"plain", TYPED} <= accuracy.keys():
        claims.append(holds("quarter turns", accuracy, TYPED))
        claims.append(free_of_charge(accuracy[TYPED][0], accuracy["plain"][0]))
    claims += [
        replace(made[arm], text=f"quarter turns: {made[arm].text}")
        for made in against(found, augmented).values()
        for arm in (TYPED, "mixture")
        if arm in made
    ]
    shown = found | {arm.replace("plain", "augmented"): stops for arm, stops in augmented.items()}
    return Page(
        "A ViT whose tokens carry representations",
        [
            f"MNIST, {rows[0]['trained on']:,} digits to train, {rows[0]['tested on']:,} to test, padded; ViTs of "
            f"{rows[0]['layers']} layers, {WIDTH} numbers a token and patches of {PATCH}; {rows[0]['epochs']} epochs "
            f"of AdamW, {len(values(rows, 'seed'))} seeds. Errors and moved accuracies are those under one, two and "
            f"three quarter turns, and within {RANGE} degrees where that is said. The epoch with the best "
            "combined accuracy on the validation digits is tested.",
            f"'{TYPED}' has tokens of the frequencies 0, 1 and 2 of {GROUP}; its dial is the softness of every weight "
            "up to the mean over tokens: 0 is exactly invariant under quarter turns, 1 leaves all weights free. "
            "'mixture' is the plain network, its answers averaged over quarter turns: two passes a step, four an "
            "answer. Augmentation is the plain network trained on digits turned by quarters, for as many steps or "
            "twice as many.",
        ],
        claims,
        [stop_table(title, mine, SHOWN) for title, mine in tables.items() if mine],
        [trade_off("curves", {"quarter turns": shown}, "combined accuracy, %", "invariance error (KL)")],
    )


def free_of_charge(strict: Stop, plain: Stop) -> Claim:
    """Whether being exactly invariant costs no accuracy upright."""
    return Claim(
        f"quarter turns: at softness {strict.dial:g} {TYPED} is as accurate upright as plain, within the spread",
        not apart(strict.gain, plain.gain) and not of_one_seed([strict, plain]),
        f"{strict.gain.told(100, 2)} against {plain.gain.told(100, 2)} %, with an error of {strict.error.told(1, 6)} "
        f"against {plain.error.told(1, 3)}{if_of_one_seed([strict, plain])}",
        "Does the dial cost accuracy?",
        "dials of weights",
        in_short(f"{100 * strict.gain.mean:.1f} for {100 * plain.gain.mean:.1f}", [strict, plain]),
    )


TYPED_VIT = Experiment("typed-vit", "A ViT whose tokens carry representations", cells, work, page)
