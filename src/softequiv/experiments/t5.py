"""T5: do soft networks forecast where people walk? Transformers on ETH/UCY, judged by free running, also turned.

A window has 20 steps, and networks read displacements: one training by shifted teacher forcing therefore serves both
protocols, the paper's 10 steps to 10 and the usual 8 to 12.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from softequiv.actions import Moves
from softequiv.baselines.autoregressive import Autoregressive, ConstantVelocity
from softequiv.baselines.eqauto import EqAuto
from softequiv.baselines.group_cnn import free_parameters
from softequiv.baselines.paper import Cutoff, paper_gain
from softequiv.baselines.penalty import Penalised
from softequiv.errors import SoftEquivError
from softequiv.experiments.arms import kept
from softequiv.experiments.base import Experiment, Scale, data_folder
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import (
    COLOURS,
    Curves,
    Stop,
    apart,
    better_at_equal_gain,
    curves,
    dials_move,
    if_of_one_seed,
    trade_off,
)
from softequiv.experiments.finetune import of, stop_table
from softequiv.experiments.graphs import recorded
from softequiv.experiments.judged import TESTED, TRAINED
from softequiv.experiments.pages import Claim, Figure, Page, Table, bullets, spread_over_seeds
from softequiv.gains import softness
from softequiv.groups import SO, degrees
from softequiv.holding import HeldByMeasurement
from softequiv.networks.forecaster import Forecaster
from softequiv.nn import soft_weights
from softequiv.nn.layers import restored_scale
from softequiv.nn.weight import set_gain
from softequiv.tasks.trajectories import SCENES, SPLITS, Trajectories, as_examples, read_scene
from softequiv.training import Recipe, fit
from softequiv.training.loop import Objective, plain

GROUP = SO(2)
RANGE = 30
RANGES: dict[str, float | None] = {"30": degrees(RANGE), "all": None}
PROTOCOLS = {"10-10": (10, 10), "8-12": (8, 12)}
CHOSEN_BY = "10-10"  # the protocol whose validation figures choose the epoch
LENGTH = 20
POOL = 1024  # turns that stand for a range

PLAIN, TURNED, TURNED_ALL, STRICT, STILL = (
    "Base",
    "Base (turned 30)",
    "Base (turned all)",
    "EqAuto",
    "constant velocity",
)
STOPS: dict[str, tuple[float, ...]] = {
    PLAIN: (1.0,),
    "ours": (0.0, 0.1, 0.3, 0.6, 1.0),
    STRICT: (0.0,),
    "paper": (0.9,),
    "paper (smooth)": (0.9,),
    TURNED: (1.0,),
    TURNED_ALL: (1.0,),
    "penalty": (0.1, 1.0),
    "held": (1e-5, 1e-4),
    STILL: (0.0,),
}
SEEDS = 3
FULL = Recipe(epochs=100, batch=512, rate=5e-4, weight_decay=1e-5, evaluate_every=10)
SMALL = replace(FULL, batch=64, rate=2e-3)
STEPS = 512  # of a training of `small`
EVALUATIONS = 4
TAUGHT, ASKED = 8192, 512  # windows of a scene that `small` learns from, and that it chooses by and tests

DIALS = bullets(
    "What the dial of each arm sets:",
    {
        "ours": "the softness of every linear map of a typed network under SO(2)",
        "penalty": "the strength of a penalty on the squared distance, in square metres, between the plain network's "
        "next positions for a track turned by any angle and its turned next positions",
        "held": "the squared distance at which an adaptive price holds the network",
        "paper, paper (smooth)": "softness on the plain network, whose LayerNorm and GELU do not commute with turns. "
        "Every softness from .5 to .9 keeps the same directions: half of each map between vectors, and none of the "
        "embedding that reads the time. So .9 stands for .5 and .7 as well",
    },
)
PAPER_NAMES = ("cADE", "cFDE", "eErr x 100")
PAPER = {
    PLAIN: {
        "eth": "4.73 6.15 1.68",
        "univ": "7.91 8.16 .73",
        "zara1": "3.61 4.68 1.14",
        "zara2": "3.17 3.79 1.17",
        "hotel": "5.84 6.67 2.50",
    },
    STRICT: {
        "eth": "5.40 7.33 0",
        "univ": "8.16 8.33 0",
        "zara1": "3.66 4.98 0",
        "zara2": "2.94 3.63 0",
        "hotel": "6.16 6.78 0",
    },
    "ours": {
        "eth": "4.58 6.23 1.42",
        "univ": "7.85 8.07 .69",
        "zara1": "3.40 4.67 .39",
        "zara2": "2.91 3.60 .24",
        "hotel": "5.69 6.26 .41",
    },
}
SAMPLES = (0.5, 0.9)  # quantiles of the way to the last step, at which test windows are drawn


def cells(scale: Scale) -> list[Cell]:
    """Every arm in every scene with the first seed, then the other seeds."""
    if scale == "smoke":
        base = {"scene": "zara1", "seed": 0, "steps": 1, "windows": 32}
        chosen = [*((arm, stops[0]) for arm, stops in STOPS.items()), ("ours", 0.3)]
        return [Cell("T5", {"arm": arm, "dial": dial, **base}) for arm, dial in chosen]
    return [
        Cell(
            "T5",
            {
                "arm": arm,
                "dial": dial,
                "scene": scene,
                "seed": seed,
                "steps": STEPS if scale == "small" else None,
                "windows": TAUGHT if scale == "small" else None,
            },
        )
        for seed in range(SEEDS)
        for arm, dials in STOPS.items()
        if arm != STILL or seed == 0
        for dial in dials
        for scene in SCENES
    ]


def network(arm: str, dial: float, seed: int) -> Autoregressive:
    """The forecaster of an arm: 4 layers, 4 heads, a stream of 64 numbers."""
    torch.manual_seed(seed)
    if arm == "ours":
        return Forecaster(group=GROUP, gain=softness(dial))
    if arm in ("paper", "paper (smooth)"):
        return papers_network(dial, "smooth" if "smooth" in arm else "hard")
    if arm == STRICT:
        return EqAuto(GROUP)
    if arm == STILL:
        return ConstantVelocity()
    if arm in (PLAIN, TURNED, TURNED_ALL, "penalty", "held"):
        return Forecaster()
    raise SoftEquivError(f"there is no arm {arm!r}; choose one of {', '.join(STOPS)}")


def papers_network(dial: float, cutoff: Cutoff = "hard") -> Forecaster:
    """The plain network with the paper's filter on each linear map, every feature a vector's coordinate.

    Maps between vectors have two levels, 0 and 2, of one size; those from scalars to vectors one more, 1, which is
    nearly all of the embedding. From .5 to .9 every softness therefore keeps level 0 alone.
    """
    start = dict(Forecaster().named_parameters())  # not that of our layers, which is equivariant
    model = Forecaster(group=GROUP, gain=softness(1), typed=False)
    for weight in soft_weights(model):
        set_gain(weight, paper_gain(weight.soft.rep, dial, cutoff))
        with torch.no_grad():
            weight.stored.copy_(start[weight.name])
            if weight.attribute == "weight":
                weight.stored.mul_(restored_scale(weight.soft, weight.stored))
    return model


@lru_cache
def turns(name: str, seed: int) -> Moves:
    """Rotations of tracks about their last observed position, within a range by its name."""
    return Moves(Trajectories.acts, GROUP, RANGES[name], count=POOL, seed=seed)


@dataclass(frozen=True)
class TurnedTracks:
    """Each window of a batch turned by an element drawn from a pool."""

    moves: Moves

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        turned = self.moves(y, self.moves.draw(len(y), generator))
        return turned[:, :-1], turned


@lru_cache(maxsize=len(SCENES))
def windows(scene: str) -> Mapping[str, Tensor]:
    """The windows of a scene left out; they are the same for both protocols."""
    return read_scene(data_folder("ethucy.zip"), scene, 10, LENGTH - 10)


def task_of(settings: Settings, past: int) -> Trajectories:
    """A scene by one protocol, or some of its windows, evenly spaced: free forecasts take longer than training, so
    that fewer are asked for."""
    train, validation, test = (as_examples(windows(settings["scene"])[split], past) for split in SPLITS)
    if most := settings["windows"]:
        train = train.part(evenly(len(train), most))
        validation, test = (part.part(evenly(len(part), min(most, ASKED))) for part in (validation, test))
    return Trajectories(train, validation, test, past)


def evenly(count: int, most: int) -> Tensor:
    """At most so many numbers below `count`, evenly spaced.

    >>> evenly(10, 3).tolist()
    [0, 3, 6]
    """
    return torch.arange(min(count, most)) * count // min(count, most)


def work(settings: Settings) -> Figures:
    """Train one network and judge it by both protocols, turned within 30 degrees and by any angle."""
    model = network(settings["arm"], settings["dial"], settings["seed"])
    task = task_of(settings, PROTOCOLS[CHOSEN_BY][0])
    chosen: Figures = {}
    if settings["arm"] != STILL:
        chosen = train(model, task, settings)
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    return {
        **judged(model, settings, device),
        **chosen,
        "samples": samples(model, settings, device) if settings["seed"] == 0 else None,
        "kept": kept(model),
        "parameters": free_parameters(model),
        "trained on": len(task.train),
        "tested on": len(task.test),
        "data": task.test.fingerprint[:16],
    }


def train(model: Autoregressive, task: Trajectories, settings: Settings) -> Figures:
    """Fit a network by its cell's recipe; the validation figure that chose its weights."""
    recipe = replace(FULL, seed=settings["seed"])
    if settings["steps"]:
        batch = min(SMALL.batch, len(task.train) // 2)
        epochs = math.ceil(settings["steps"] / (len(task.train) // batch))
        recipe = replace(recipe, batch=batch, rate=SMALL.rate, epochs=epochs)
        recipe = replace(recipe, evaluate_every=math.ceil(epochs / EVALUATIONS))
    seen = {TURNED: "30", TURNED_ALL: "all"}.get(settings["arm"])
    transform = TurnedTracks(turns(seen, TRAINED)) if seen else None
    objective = objective_of(settings["arm"], settings["dial"])
    answered = recipe.batch * (2 if settings["arm"] == "held" else 1)  # at a time
    recorded(model, task.train.batch(torch.arange(answered))[0], calls=2 if settings["arm"] == "penalty" else 1)
    fitted = fit(model, task, recipe, turns("30", TRAINED), objective=objective, transform=transform)
    best = fitted.history[fitted.best or 0]
    return {"validation cADE": best[task.score], "epoch": best["epoch"], "recipe": asdict(recipe)}


def objective_of(arm: str, dial: float) -> Objective:
    """What an arm minimises: the error alone, or with a price on how far answers to tracks turned by any angle are from
    the turned answers, in square metres of the next position."""
    moves, acts = turns("all", TRAINED), Trajectories.acts
    if arm == "penalty":
        return Penalised(moves, dial, acts)
    if arm == "held":
        return HeldByMeasurement(moves, dial, divergence="squared", outputs=acts)
    return plain


def judged(model: Autoregressive, settings: Settings, device: torch.device) -> dict[str, float]:
    """All figures of the test windows: `ADE 10-10`, `FDE 10-10`, and others with their range, as `cADE 10-10 30`."""
    found: dict[str, float] = {}
    for protocol, (past, _) in PROTOCOLS.items():
        task = task_of(settings, past).to(device)
        for name in RANGES:
            figures = task.figures(model, task.test, turns(name, TESTED), batch=len(task.test))
            for figure, value in figures.items():
                found[f"{figure} {protocol}" + ("" if figure in ("ADE", "FDE") else f" {name}")] = value
    return found


def samples(model: Autoregressive, settings: Settings, device: torch.device) -> list[dict[str, Any]]:
    """A few test windows, 8 steps to 12, with the model's forecasts: past, future and forecast as [x, y] in metres."""
    past, future = PROTOCOLS["8-12"]
    test = task_of(settings, past).test
    _, tracks = test.batch(torch.arange(len(test)))
    walked = tracks[:, -1].norm(dim=-1).argsort()
    tracks = tracks[[int(walked[int(share * (len(walked) - 1))]) for share in SAMPLES]]
    with torch.no_grad():
        forecasts = model.forecast(tracks[:, :past].to(device), future).cpu()
    return [
        {name: told(points) for name, points in (("past", t[:past]), ("future", t[past:]), ("forecast", f))}
        for t, f in zip(tracks, forecasts, strict=True)
    ]


def told(points: Tensor) -> list[list[float]]:
    """Points to the centimetre."""
    return [[round(float(x), 2) for x in point] for point in points]


def over_scenes(rows: Sequence[Row]) -> list[Row]:
    """One row for each arm, stop and seed: the mean of every figure over the scenes, where all scenes are there."""
    scenes = {row["scene"] for row in rows}
    together: dict[tuple[str, float, int], list[Row]] = {}
    for row in rows:
        together.setdefault((row["arm"], row["dial"], row["seed"]), []).append(row)
    averaged = []
    for (arm, dial, seed), members in together.items():
        if {row["scene"] for row in members} == scenes:
            numbers = [name for name, value in members[0].figures.items() if isinstance(value, float)]
            figures = {name: sum(row[name] for row in members) / len(members) for name in numbers}
            settings = {"arm": arm, "dial": dial, "seed": seed}
            averaged.append(replace(members[0], settings=settings, figures=figures))
    return averaged


def curves_of(averaged: Sequence[Row], protocol: str, name: str) -> Curves:
    """The stops of each arm: what is gained is -cADE, what it costs eErr."""
    cade, eerr = f"cADE {protocol} {name}", f"eErr {protocol} {name}"
    return curves([replace(row, figures={"-cADE": -row[cade], "eErr": row[eerr]}) for row in averaged], "-cADE", "eErr")


def best_stop(averaged: Sequence[Row], arm: str) -> float:
    """The stop of a dial with the least validation cADE: tests choose nothing."""
    found = spread_over_seeds(of(averaged, arm=arm), "validation cADE", "dial")
    ((dial,), _) = min(found.items(), key=lambda item: item[1].mean)
    return float(dial)


def distance(stop: Stop) -> str:
    """cADE in metres, with its spread."""
    return replace(stop.gain, mean=-stop.gain.mean).told(1, 3)


def less_than(found: Curves, dial: float, other: str, where: str) -> list[Claim]:
    """Whether ours at a stop is no further from the truth than another arm, and less moved by turns."""
    mine = next(stop for stop in found["ours"] if stop.dial == dial)
    theirs = found[other][0]
    if other == STILL:  # nothing of it is drawn
        gain, error = (replace(part, std=0.0, count=mine.gain.count) for part in (theirs.gain, theirs.error))
        theirs = Stop(theirs.dial, gain, error)
    once = if_of_one_seed([mine, theirs])
    nearer = Claim(
        f"{where}: ours at softness {dial:g}, chosen on validation, has no larger cADE than {other}, beyond the spread",
        not once and not apart(mine.gain, theirs.gain),
        f"{distance(mine)} against {distance(theirs)} m{once}",
    )
    steadier = Claim(
        f"{where}: ours at softness {dial:g} has a lower eErr than {other}, beyond the spread",
        apart(mine.error, theirs.error),
        f"{mine.error.told(1, 4)} against {theirs.error.told(1, 4)} m{once}",
    )
    return [nearer] if other in (STRICT, STILL) else [nearer, steadier]


def claims(averaged: Sequence[Row]) -> list[Claim]:
    """Ours against Base, the strict network, the paper's construction and augmentation; and what the dial does."""
    dial, made = best_stop(averaged, "ours"), []
    for protocol in PROTOCOLS:
        for name in RANGES:
            found = curves_of(averaged, protocol, name)
            where = f"{protocol.replace('-', ' to ')}, {turned_by(name)}"
            rivals = (PLAIN, STRICT, STILL) if name == "30" else (PLAIN,)
            made += [claim for other in rivals if other in found for claim in less_than(found, dial, other, where)]
            tunable = ("paper", "paper (smooth)", TURNED) if name == "30" else (TURNED_ALL,)
            made += [
                replace(
                    better_at_equal_gain(found, (arm,), other),
                    text=f"{where}: at a cADE equal within one standard deviation, {arm} has a lower eErr than "
                    f"{other}, beyond the spread",
                )
                for arm in ("ours", "penalty", "held")
                for other in tunable
                if arm in found and other in found
            ]
            made += [replace(claim, text=f"{where}: {claim.text}") for claim in dials_move(found, ["ours"])]
    return made


def turned_by(name: str) -> str:
    """A range as one reads it."""
    return "turned by any angle" if name == "all" else f"turned within {name}°"


def average_table(protocol: str, averaged: Sequence[Row]) -> Table:
    """All figures of a protocol, mean over the scenes and spread over seeds."""
    shown = {"ADE": f"ADE {protocol}", "FDE": f"FDE {protocol}"}
    shown |= {f"{figure} ±30°": f"{figure} {protocol} 30" for figure in ("aADE", "aFDE", "cADE", "cFDE", "eErr")}
    shown |= {f"{figure} all angles": f"{figure} {protocol} all" for figure in ("cADE", "cFDE", "eErr")}
    digits = {head: (figure, 1, 4 if "eErr" in head else 3) for head, figure in shown.items()}
    return stop_table(f"{protocol.replace('-', ' to ')}: mean over the scenes, in metres", averaged, digits)


def scene_table(protocol: str, rows: Sequence[Row]) -> Table:
    """cADE, cFDE and eErr within 30 degrees, scene by scene, and the paper's below where the protocol is its own."""
    scenes = [scene for scene in SCENES if any(row["scene"] == scene for row in rows)]
    parts = [
        spread_over_seeds(rows, f"{figure} {protocol} 30", "arm", "dial", "scene")
        for figure in ("cADE", "cFDE", "eErr")
    ]
    lines = []
    for arm, dial in dict.fromkeys(key[:2] for key in parts[0]):
        entries = [
            " / ".join(
                (f"{part[arm, dial, scene].mean * scale:.2f}" for part, scale in zip(parts, (1, 1, 100), strict=True))
            )
            if (arm, dial, scene) in parts[0]
            else ""
            for scene in scenes
        ]
        lines.append([arm, f"{dial:g}", *entries])
    if protocol == CHOSEN_BY:
        lines += [
            [f"the paper's {name}", "", *(" / ".join(figures[scene].split()) for scene in scenes)]
            for name, figures in PAPER.items()
        ]
    caption = f"## {protocol.replace('-', ' to ')} by scene: {' / '.join(PAPER_NAMES)}, turned within 30°"
    return Table(caption, ["arm", "dial", *scenes], lines)


def curves_figure(protocol: str, averaged: Sequence[Row]) -> Figure:
    """cADE against eErr by one protocol, a panel for each range of turns."""
    panels = {
        f"{protocol.replace('-', ' to ')}, {turned_by(name)}": {
            arm: stops for arm, stops in curves_of(averaged, protocol, name).items() if arm != STILL
        }
        for name in RANGES
    }
    return trade_off(f"curves-{protocol}", panels, "-cADE, m", "eErr, m", scale=1.0)


def samples_figure(rows: Sequence[Row]) -> Figure:
    """F5: past, truth and forecasts of a few test windows of each scene, from the rows of the first seed."""
    dial = best_stop(over_scenes(rows), "ours")
    shown = {(PLAIN, 1.0): "Base", ("ours", dial): f"ours at {dial:g}", (STRICT, 0.0): "EqAuto"}
    first = {(row["scene"], row["arm"], row["dial"]): row["samples"] for row in rows if row["samples"]}
    scenes = [scene for scene in SCENES if any(key[0] == scene for key in first)]

    def draw(canvas: Any) -> None:
        axes = canvas.subplots(len(SAMPLES), len(scenes), squeeze=False)
        for column, scene in enumerate(scenes):
            for number, axis in enumerate(axes[:, column]):
                known = next(found for key, found in first.items() if key[0] == scene)[number]
                axis.plot(*zip(*known["past"], strict=True), "o-", color="#000000", markersize=3, label="past")
                future = [known["past"][-1], *known["future"]]
                axis.plot(*zip(*future, strict=True), "o--", color="#999999", markersize=3, mfc="none", label="truth")
                for colour, ((arm, stop), label) in zip(COLOURS, shown.items(), strict=False):
                    if (scene, arm, stop) in first:
                        ahead = [known["past"][-1], *first[scene, arm, stop][number]["forecast"]]
                        axis.plot(*zip(*ahead, strict=True), "-", color=colour, linewidth=1.2, label=label)
                axis.set_aspect("equal", "datalim")
                axis.grid(alpha=0.3)
            axes[0, column].set_title(scene)
        axes[0, -1].legend(fontsize=7)

    alt = (
        f"Forecasts of 12 steps from 8 by {', '.join(shown.values())}, in metres: for each scene the test windows "
        "whose last step lies at the median and at the 90th percentile of distances"
    )
    return Figure("samples", alt, draw, (2.6 * len(scenes) + 0.6, 2.4 * len(SAMPLES)))


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """A table for each protocol, averaged and by scene; the paper's figures beside; curves and sample tracks."""
    averaged = over_scenes(rows)
    recipe = next(row["recipe"] for row in rows if row["arm"] != STILL)
    length, fewer = f"{recipe['epochs']} epochs", ""
    if rows[0]["steps"]:
        length = f"{rows[0]['steps']:,} steps"
        fewer = (
            f" At this scale {rows[0]['windows']:,} windows of a scene are learnt from, and {ASKED:,} each choose and "
            "test, evenly spaced."
        )
    return Page(
        "T5. ETH/UCY: where people walk",
        [
            f"Causal transformers (4 layers, 4 heads, a stream of 64 numbers) on displacements; "
            f"{len({row['scene'] for row in rows})} scenes, each left out in turn; {length} of AdamW with batches of "
            f"{recipe['batch']}, a rate of {recipe['rate']:g} that falls by a cosine and a weight decay of "
            f"{recipe['weight_decay']:g}, mean squared error, {len({row['seed'] for row in averaged})} seeds. The "
            f"paper trains for {FULL.epochs} epochs at a rate of {FULL.rate:g}; it gives neither batch nor width. Each "
            "step is learnt from the true ones before it, and no network sees what it is asked for. Networks say how "
            "the next displacement differs from the last, so that one which says 0 walks on. One training serves both "
            "protocols. Of its evaluations, the one with the least cADE of free running on validation windows, 10 to "
            f"10 and turned within 30°, gives the weights that are tested.{fewer}",
            "ADE and FDE are true means in metres, of free running; aADE and aFDE those of turned tracks, cADE and "
            "cFDE the means of both, eErr the mean norm of F(gx) - gF(x). Spreads are standard deviations over seeds.",
            DIALS,
            "The paper's figures are no yardstick for these: its decoder saw its own target, and its ADE is a sum over "
            "time. They stand below the table by scene of its protocol, 10 to 10, for the order of its methods.",
        ],
        claims(averaged),
        [
            *(average_table(protocol, averaged) for protocol in PROTOCOLS),
            *(scene_table(protocol, rows) for protocol in PROTOCOLS),
        ],
        [*(curves_figure(protocol, averaged) for protocol in PROTOCOLS), samples_figure(rows)],
    )


T5 = Experiment("T5", "ETH/UCY: where people walk", cells, work, page)
