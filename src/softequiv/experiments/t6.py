"""T6: which dial suits a function that is invariant but for a part? O(5) regression, with gamma of symmetry broken.

The networks of all seeds of a cell are trained side by side, each on data of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from softequiv.actions import Moves
from softequiv.baselines.emlp import EMLP, EMLPRPP, MLP
from softequiv.baselines.group_cnn import free_parameters
from softequiv.baselines.paper import paper_linear
from softequiv.errors import SoftEquivError
from softequiv.experiments.arms import kept
from softequiv.experiments.base import Experiment, Scale
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import apart, known, style
from softequiv.experiments.graphs import recorded
from softequiv.experiments.pages import Claim, Figure, Page, Spread, Table, bullets
from softequiv.experiments.side_by_side import SideBySide, together
from softequiv.gains import Gain, least_distortion, softness
from softequiv.groups import degrees
from softequiv.nn import SoftLinear
from softequiv.reps import Rep
from softequiv.tasks.regression import Regression, o5_target, synthetic_o5
from softequiv.training import Recipe, fit

GAMMAS = (0.0, 0.3, 0.4, 0.5)
RATES = (1e-3, 3e-3)
WITHIN = 30  # degrees of the error target
DECAY = (0.0, 0.1, 1.0)
STOPS: dict[str, tuple[float, ...]] = {  # as many for every arm: with the rates, the same number of trials
    "MLP": DECAY,
    "EMLP": DECAY,
    "EMLP-RPP": (0.03, 0.1, 0.3),
    "paper": (0.45, 0.7, 0.9),
    "ours": (0.2, 0.4, 0.7),
    "ours (target)": (0.05, 0.2, 0.5),
}
SOLVED = "ours (target)"  # a step of which takes several times as long
SOLVED_AT = (0.4,)  # gammas at which it runs on the full scale
OURS = ("ours", "ours (target)")
DECAYING = ("MLP", "EMLP")  # which have no dial: theirs is weight decay
PAPER = {
    "EMLP": (0.78, 0.88, 1.00),
    "EMLP-RPP": (0.79, 0.81, 0.84),
    "MLP": (1.21, 1.20, 1.29),
    "ours": (0.72, 0.74, 0.81),
}
BROKEN = GAMMAS[1:]  # the paper's, in the order of its columns
POOL = 64  # elements of O(5) by which the error is measured
TESTED = 1000  # at a time
LOOKS = 15  # evaluations of a training, of which the best is kept
RECIPE = Recipe(optimizer="adamw", schedule="cosine")
SIZES: dict[Scale, dict[str, Any]] = {
    "smoke": {"train": 100, "test": 200, "channels": 24, "layers": 1, "batch": 50, "epochs": 2, "seeds": 2},
    "small": {"train": 1000, "test": 5000, "channels": 96, "layers": 3, "batch": 250, "epochs": 100, "seeds": 5},
    "full": {"train": 10000, "test": 5000, "channels": 384, "layers": 3, "batch": 500, "epochs": 300, "seeds": 5},
}


def cells(scale: Scale) -> list[Cell]:
    """Every arm at every stop of its dial and every rate, for each gamma; all seeds of one are a cell."""
    gammas, rates = (GAMMAS, RATES) if scale != "smoke" else ((0.3,), RATES[:1])
    return [
        Cell("T6", {**SIZES[scale], "gamma": gamma, "arm": arm, "dial": dial, "rate": rate})
        for arm, dials in reversed(STOPS.items())  # the longest first
        for dial in (dials if scale != "smoke" else dials[:1])
        for gamma in (SOLVED_AT if arm == SOLVED and scale == "full" else gammas)
        for rate in rates
    ]


def network(arm: str, dial: float, source: Rep, target: Rep, channels: int, layers: int) -> nn.Module:
    """The network of an arm; all but the MLP have one body and differ in their linear maps.

    >>> task = synthetic_o5(0.3, train=8)
    >>> network("ours", 0.1, task.source, task.target, 24, 1)(torch.zeros(5, 10)).shape
    torch.Size([5, 1])
    """
    if arm not in STOPS:
        raise SoftEquivError(f"there is no arm {arm!r}; choose one of {', '.join(STOPS)}")
    if arm == "MLP":
        return MLP(source, target, channels, layers)
    if arm == "EMLP-RPP":
        return EMLPRPP(source, target, channels, layers, mix=dial)
    if arm == "paper":
        return EMLP(source, target, channels, layers, linear=partial(paper_linear, softness=dial))
    gain: Gain = softness(dial if arm == "ours" else 0)
    if arm == "ours (target)":
        gain = least_distortion(dial, degrees(WITHIN))
    return EMLP(source, target, channels, layers, linear=partial(SoftLinear, gain=gain))


@lru_cache(maxsize=1)
def elements() -> Moves:
    """The elements of O(5) by which every network is judged."""
    task = synthetic_o5(train=1, validation=1, test=1)
    return Moves(task.acts, task.source.group, count=POOL)


def broken_share(task: Regression, gamma: float) -> float:
    """The relative MSE of the invariant part of the truth, plus a constant: about the least that a strict arm can have.

    >>> broken_share(synthetic_o5(0.0, train=10), 0.0)
    0.0
    """
    x = task.test.batch(torch.arange(len(task.test)))[0].double()
    whole = o5_target(x, gamma)
    return float((whole - o5_target(x, 0.0)).var(correction=0) / whole.square().mean())


def work(settings: Settings) -> Figures:
    """Train one network for each seed, on data of its own, and judge each."""
    tasks = [
        synthetic_o5(settings["gamma"], train=settings["train"], test=settings["test"], seed=seed)
        for seed in range(settings["seeds"])
    ]
    networks = []
    for seed in range(settings["seeds"]):
        torch.manual_seed(seed)
        sizes = (settings["channels"], settings["layers"])
        networks.append(network(settings["arm"], settings["dial"], tasks[0].source, tasks[0].target, *sizes))
    figures = {"kept": kept(networks[0]), "parameters": free_parameters(networks[0])}
    model = SideBySide(networks)
    recipe = replace(
        RECIPE,
        epochs=settings["epochs"],
        batch=settings["batch"],
        rate=settings["rate"],
        weight_decay=settings["dial"] if settings["arm"] in DECAYING else 0.0,
        evaluate_every=max(1, settings["epochs"] // LOOKS),
    )
    task = together(tasks)
    recorded(model, task.train.batch(torch.arange(recipe.batch))[0])
    fitted = fit(model, task, recipe, elements())
    assert fitted.best is not None
    best = fitted.history[fitted.best]
    tested = [
        task.to(fitted.device).figures(own, task.test, elements(), batch=TESTED)
        for task, own in zip(tasks, model.apart(), strict=True)
    ]
    return {
        "validation": best["MSE"],
        "epoch": best["epoch"],
        **{name: [figures[name] for figures in tested] for name in tested[0]},
        "broken": [broken_share(task, settings["gamma"]) for task in tasks],
        **figures,
        "data": tasks[0].test.fingerprint[:16],
    }


Chosen = dict[tuple[str, float], Row]


def chosen(rows: Sequence[Row]) -> Chosen:
    """Of each arm's trials at each gamma the one with the least validation error, mean over seeds; where some trials
    are still to come, nothing is chosen.
    """
    trials: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        trials.setdefault((row["arm"], row["gamma"]), []).append(row)
    most = max(map(len, trials.values()))
    return {
        key: min(tried, key=lambda row: float(row["validation"])) for key, tried in trials.items() if len(tried) == most
    }


def at_most(best: Chosen, arm: str, other: str) -> Claim:
    """Whether an arm has at most another's relative MSE wherever symmetry is broken, seeds compared one by one."""
    told, holds = [], True
    for gamma in compared(best, arm, other):
        own, theirs = best[arm, gamma]["relMSE"], best[other, gamma]["relMSE"]
        mine, other_mean = Spread.of(own), Spread.of(theirs)
        wins = sum(a <= b for a, b in zip(own, theirs, strict=True))
        holds &= mine.mean <= other_mean.mean
        told.append(f"{gamma:g}: {mine.told(10, 4)} against {other_mean.told(10, 4)}, {wins} of {len(own)} seeds")
    return Claim(
        f"on average, {arm} has at most the relative MSE of {other} at every gamma above 0 at which both ran",
        holds,
        "; ".join(told),
    )


def lower_error(best: Chosen, arm: str, other: str) -> Claim:
    """Whether an arm is less moved by the group than another, wherever symmetry is broken."""
    pairs = [
        (gamma, Spread.of(best[arm, gamma]["eErr"]), Spread.of(best[other, gamma]["eErr"]))
        for gamma in compared(best, arm, other)
    ]
    return Claim(
        f"as chosen for their MSE, {arm} has a lower equivariance error than {other}, beyond the spread",
        all(apart(own, theirs) for _, own, theirs in pairs),
        "; ".join(f"{gamma:g}: {own} against {theirs}" for gamma, own, theirs in pairs),
    )


def loses_nothing(best: Chosen, arm: str) -> Claim:
    """Whether an arm is as good as the strict network where nothing is broken, within the spread of both."""
    own, strict = (Spread.of(best[name, 0.0]["relMSE"]) for name in (arm, "EMLP"))
    return Claim(
        f"where nothing is broken (gamma 0), {arm} is within the spread of EMLP",
        not apart(strict, own),
        f"{own.told(10, 4)} against {strict.told(10, 4)}",
    )


def gammas_of(best: Chosen) -> list[float]:
    """The gammas there are."""
    return sorted({gamma for _, gamma in best})


def compared(best: Chosen, arm: str, other: str) -> list[float]:
    """The gammas above 0 at which both arms are there."""
    return [gamma for gamma in gammas_of(best) if gamma > 0 and (arm, gamma) in best and (other, gamma) in best]


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """The best of each arm beside the paper's, what was chosen, and every trial."""
    best, first = chosen(rows), rows[0]
    present = [arm for arm in STOPS if any(key[0] == arm for key in best)]
    others = [arm for arm in present if arm not in OURS]
    pairs = [(arm, other) for arm in OURS for other in others if compared(best, arm, other)]
    claims = [at_most(best, arm, other) for arm, other in pairs]
    claims += [lower_error(best, arm, other) for arm, other in pairs if other in ("MLP", "EMLP-RPP")]
    if ("EMLP", 0.0) in best:
        claims += [loses_nothing(best, arm) for arm in OURS if (arm, 0.0) in best]
    trials = max(sum((row["arm"], row["gamma"]) == key for row in rows) for key in best)
    steps = first["epochs"] * max(1, first["train"] // first["batch"])
    return Page(
        "T6. O(5) regression: invariant but for gamma",
        [
            f"Two vectors in five dimensions to a number that O(5) leaves alone but for gamma times a ratio of "
            f"coordinates: {first['train']:,} examples to train, 1,000 to choose by, {first['test']:,} to test; "
            f"{first['layers']} hidden layers of {first['channels']} channels, {steps:,} steps of AdamW on batches of "
            f"{first['batch']}, {first['seeds']} seeds, each with data of its own.",
            f"Trials of every arm: {trials}, the stops of its dial at each rate ({told_rates(rows)}). The "
            "trial and the epoch with the least mean squared error on the validation examples are tested. All but the "
            "MLP share one body, linear maps beside bilinear layers and gates.",
            bullets(
                "What the dial of each arm sets:",
                {
                    "ours, paper": "softness, of our filter and of the paper's construction",
                    "ours (target)": f"the certified error of each weight within {WITHIN} degrees",
                    "EMLP-RPP": "the factor on the free path",
                    "MLP, EMLP": "weight decay, as they have no dial of their own",
                },
            ),
            "On tensors of O(5) the paper's hard cut-off and our `hard` are the same filter, which keeps whole levels "
            "and is a constraint; below its first stop here it keeps level 0 alone, which is EMLP. Softness scales the "
            "level on which its count falls: the first one above 0 holds "
            "about a third of all directions, so smaller softness is a starting point that training may leave.",
            "Relative MSE is the sum of squared errors over the sum of squared targets, times 10. The paper does not "
            "give its denominator, its sizes or its epsilon, so its columns can be compared within themselves alone. "
            "The ratio has a heavy tail: the spread over seeds is mostly one of data, which all arms share.",
        ],
        claims,
        [best_table(best, present), choice_table(best, present), trial_table(rows)],
        [error_by_gamma(best, present)],
    )


def told_rates(rows: Sequence[Row]) -> str:
    """The rates that were tried."""
    return ", ".join(f"{rate:g}" for rate in sorted({row["rate"] for row in rows}))


def best_table(best: Chosen, present: Sequence[str]) -> Table:
    """Relative MSE times 10 of the chosen trials beside the paper's, and what strict ones cannot learn."""
    gammas = gammas_of(best)
    lines = []
    for arm in present:
        paper = PAPER.get(arm)
        ours = [Spread.of(best[arm, gamma]["relMSE"]).told(10, 4) if (arm, gamma) in best else "-" for gamma in gammas]
        lines.append([arm, *ours, *(f"{value:.2f}" for value in paper or ()), *["-"] * (0 if paper else len(BROKEN))])
    floors = [Spread.of(next(row for (_, own), row in best.items() if own == gamma)["broken"]) for gamma in gammas]
    lines.append(["the broken part itself", *(floor.told(10, 4) for floor in floors), *["-"] * len(BROKEN)])
    header = ["arm", *(f"gamma {gamma:g}" for gamma in gammas), *(f"the paper's at {gamma:g}" for gamma in BROKEN)]
    return Table("## Relative MSE, times 10", header, lines)


def choice_table(best: Chosen, present: Sequence[str]) -> Table:
    """What was chosen for each arm, and how equivariant it came out."""
    lines = [
        [
            arm,
            f"{gamma:g}",
            f"{row['dial']:g}",
            f"{row['rate']:g}",
            str(row["epoch"]),
            f"{row['validation']:.4f}",
            str(Spread.of(row["eErr"])),
            f"{row['parameters']:,}",
            "-" if row["kept"] is None else f"{row['kept']:.3f}",
        ]
        for arm in present
        for gamma in gammas_of(best)
        if (row := best.get((arm, gamma)))
    ]
    header = ["arm", "gamma", "dial", "rate", "epoch", "validation MSE", "eErr", "parameters", "directions kept"]
    return Table("## What was chosen", header, lines)


def trial_table(rows: Sequence[Row]) -> Table:
    """Every stop of every dial, at the rate that suits it."""
    stops: dict[tuple[str, float, float], Row] = {}
    for row in rows:
        key = (row["arm"], row["gamma"], row["dial"])
        if key not in stops or row["validation"] < stops[key]["validation"]:
            stops[key] = row
    lines = [
        [
            arm,
            f"{gamma:g}",
            f"{dial:g}",
            f"{row['rate']:g}",
            f"{row['validation']:.4f}",
            Spread.of(row["relMSE"]).told(10, 4),
            str(Spread.of(row["eErr"])),
        ]
        for (arm, gamma, dial), row in sorted(stops.items())
    ]
    header = ["arm", "gamma", "dial", "rate", "validation MSE", "relative MSE, times 10", "eErr"]
    return Table("## Every stop, at its better rate", header, lines)


def error_by_gamma(best: Chosen, present: Sequence[str]) -> Figure:
    """Relative MSE of each arm at its best against how much symmetry is broken."""

    def draw(canvas: Any) -> None:
        axis = canvas.subplots()
        for arm in present:
            points = [
                (gamma, Spread.of(best[arm, gamma]["relMSE"])) for gamma in gammas_of(best) if (arm, gamma) in best
            ]
            axis.errorbar(
                [gamma for gamma, _ in points],
                [spread.mean for _, spread in points],
                yerr=[known(spread.std) for _, spread in points],
                label=arm,
                **style(arm, present),
            )
        axis.set(xlabel="gamma, how much symmetry is broken", ylabel="relative MSE", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)

    return Figure("gamma", f"relative MSE against gamma for {', '.join(present)}; lower is better", draw)


T6 = Experiment("T6", "O(5) regression: invariant but for gamma", cells, work, page)
