"""How is an arm trained and judged, alike for all tables, and how are its stops told? By one function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from softequiv.actions import Moves
from softequiv.baselines.canonical import Canonical
from softequiv.baselines.group_cnn import free_parameters
from softequiv.experiments.arms import HALF_BATCHES, LONGER, Armed, kept
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import (
    COLOURS,
    SCORE,
    Curves,
    as_good_as_plain,
    dials_move,
    known,
    lower_errors,
    style,
)
from softequiv.experiments.pages import Claim, Figure, Table, bullets, spread_over_seeds
from softequiv.tasks.base import Task
from softequiv.training import Recipe, fit
from softequiv.training.loop import Loss, Transform

AnyTask = TypeVar("AnyTask", bound=Task)
Shown = Mapping[str, tuple[str, float, int]]  # a column: the figure, what it is multiplied by, and digits

OF_WEIGHTS = ("ours", "ours (levels)", "ours (target)")
OF_THE_NETWORK = ("held", "held + labels", HALF_BATCHES, "mixture")  # which turn samples themselves in training
OURS = (*OF_WEIGHTS, *OF_THE_NETWORK)
KINDS = {"of weights": OF_WEIGHTS, "of the network": OF_THE_NETWORK}
SCORER_STEPS, SCORER_BATCH, SCORER_RATE = 400, 250, 1e-3
SCORER_PASSES = 4  # over the pictures, at most, for each epoch of the training that follows
DIALS = bullets(
    "What the dial of each arm sets:",
    {
        "ours, paper, paper (smooth)": "softness, of our filter and of the paper's construction",
        "ours (target)": "the certified relative error of every weight within the range",
        "RPP": "the factor on the free path",
        "canonical": "the strength of the prior. The scorer is first trained by the prior alone, for about "
        f"{SCORER_STEPS} steps on upright pictures: training that no other arm gets",
        "penalty": "the strength of the penalty",
        "held + labels": "the KL at which an adaptive price holds the network, which also learns from the pictures "
        "turned for the measurement",
        HALF_BATCHES: "the same, with half as many pictures a step and twice as many steps",
        "mixture": "the share of the answer that is not averaged over quarter turns",
    },
)


def trained_and_judged(
    arm: Armed,
    task: AnyTask,
    recipe: Recipe | None,
    judge: Callable[[nn.Module, AnyTask], Mapping[str, float]],
    moves: Moves,
    transform: Transform | None = None,
) -> Figures:
    """The figures of an armed model, after training by the recipe, or before any where there is none.

    `moves` are those under which validation chooses the model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: Figures = {}
    if recipe is not None:
        if isinstance(arm.model, Canonical):
            teach_orientation(arm.model, task, recipe, moves)
        fitted = fit(
            arm.model,
            task,
            recipe,
            moves,
            objective=arm.objective,
            transform=transform,
            after_step=arm.after_step,
        )
        best = fitted.history[-1 if fitted.best is None or recipe.keep == "last" else fitted.best]
        found = {
            "kept epoch": best["epoch"],
            SCORE: best[task.score],
            "last loss": fitted.history[-1]["loss"],
            "training seconds": round(fitted.seconds, 2),
        }
    model = arm.model.to(device)
    # judging takes as many passes as training, and three digits of an answer are enough for its figures
    with torch.autocast("cuda", torch.float16, enabled=device.type == "cuda"):
        figures = judge(model, task.to(device))
    return {
        **figures,
        **found,
        "kept": kept(model),
        "parameters": free_parameters(model),
        "trained on": len(task.train) if recipe is not None else 0,
        "tested on": len(task.test),
        "data": task.test.fingerprint[:16],
    }


def teach_orientation(model: Canonical, task: Task, recipe: Recipe, moves: Moves) -> None:
    """Train the scorer of a canonicaliser by its prior alone, on upright pictures, with the model behind it at rest.

    The scorer is new where the model is pretrained: at the rate that suits the one the other would not move, and a
    canonicaliser that never learnt to see orientation would be no fair baseline.
    """
    batch = min(SCORER_BATCH, recipe.batch)
    epochs = min(SCORER_PASSES * recipe.epochs, -(-SCORER_STEPS * batch // len(task.train)))
    alone = replace(
        recipe,
        epochs=epochs,
        batch=batch,
        rate=SCORER_RATE,
        head_rate=None,
        layer_decay=1.0,
        warmup=0.0,
        ema=None,
        keep="last",
        evaluate_every=epochs,
    )
    learning = [weight for weight in model.model.parameters() if weight.requires_grad]
    for weight in learning:
        weight.requires_grad_(False)
    fit(model, task, alone, moves, objective=orientation_alone)
    for weight in learning:
        weight.requires_grad_(True)


def orientation_alone(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, generator: torch.Generator) -> Tensor:
    """The objective mean -log p(g x)_g, an element g drawn for each sample; nothing of the task enters."""
    return next(part for part in model.modules() if isinstance(part, Canonical)).prior(x, generator)


def longer(settings: Settings) -> dict[str, Any]:
    """Settings of augmentation with as many passes as arms have that ask the model twice a step."""
    return {**settings, "turned": True, "epochs": 2 * settings["epochs"], "arm": LONGER, "dial": 1.0}


def seeded(experiment: str, found: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[Cell]:
    """Cells of all settings with the first seed, then with the next: a run that ends early has all arms."""
    return [Cell(experiment, {**settings, "seed": seed}) for seed in seeds for settings in found]


def shortened(task: AnyTask, pictures: int | None) -> AnyTask:
    """The first so many examples of each part; the whole task where nothing is said."""
    if pictures is None:
        return task
    return task.mapped(lambda examples: examples.part(torch.arange(pictures)))


def of(rows: Sequence[Row], **settings: Any) -> list[Row]:
    """The rows of these settings."""
    return [row for row in rows if all(row.settings.get(name) == value for name, value in settings.items())]


def values(rows: Sequence[Row], setting: str) -> list[Any]:
    """All values of a setting, in the order in which they come."""
    return list(dict.fromkeys(row.settings[setting] for row in rows))


def seed_counts(rows: Sequence[Row]) -> str:
    """How many seeds the arms have, such as "3 or 5"."""
    counts = {len({row["seed"] for row in of(rows, arm=arm)}) for arm in values(rows, "arm")}
    return " or ".join(map(str, sorted(counts)))


def told(settings: Settings) -> str:
    """How a model was trained, in words.

    >>> told({"turned": True, "labels": 0.1, "epochs": 5})
    'trained with turns, 10 % of the labels'
    """
    if not settings["epochs"]:
        return "before any training"
    share = settings.get("labels", 1.0)
    labels = "" if share == 1 else f", {100 * share:g} % of the labels"
    return f"trained {'with' if settings['turned'] else 'without'} turns{labels}"


def stop_table(title: str, rows: Sequence[Row], shown: Shown) -> Table:
    """All figures of all stops, mean and spread over seeds."""
    spreads = {head: spread_over_seeds(rows, figure, "arm", "dial") for head, (figure, _, _) in shown.items()}
    lines = [
        [
            arm,
            f"{dial:g}",
            *(spreads[head][arm, dial].told(scale, digits) for head, (_, scale, digits) in shown.items()),
        ]
        for arm, dial in next(iter(spreads.values()))
    ]
    return Table(f"## {title}", ["arm", "dial", *shown], lines)


def by_training(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each backbone and way of training, by both in words."""
    found: dict[str, list[Row]] = {}
    for backbone in values(rows, "backbone"):
        for row in of(rows, backbone=backbone):
            found.setdefault(f"{backbone}, {told(row.settings)}", []).append(row)
    return found


def tables(rows: Sequence[Row], shown: Shown, data: str = "") -> list[Table]:
    """A table for each backbone and each way of training; `data` is named in their titles."""
    return [stop_table(data + name, mine, shown) for name, mine in by_training(rows).items()]


def claims_of(name: str, found: Curves) -> list[Claim]:
    """What was to be shown of one set of curves, as far as its arms are there.

    Dials of the network turn samples in training and ask the model twice, so that they are told apart from those of
    weights.
    """
    rivals = [arm for arm in found if arm != "plain" and not arm.startswith("plain (") and arm not in OURS]
    claims = [*lower_errors(found, KINDS, rivals), *as_good_as_plain(found, KINDS), *dials_move(found, OURS)]
    return [replace(claim, text=f"{name}: {claim.text}") for claim in claims]


def paper_rows(rows: Mapping[str, Sequence[str]], stands_for: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """The paper's figures by backbone and row, from a text for each row; a stand-in has those of its original.

    >>> paper_rows({"ViT": ("97 96", "93 92", "98 97")}, {"small ViT": "ViT"})["small ViT"]["Ours"]
    ['98', '97']
    """
    every = {**rows, **{name: rows[source] for name, source in stands_for.items()}}
    titles = ("Base", "Canon.", "Ours")
    return {name: dict(zip(titles, map(str.split, texts), strict=False)) for name, texts in every.items()}


def beside_paper(
    rows: Sequence[Row],
    names: Sequence[str],
    shown: Shown,
    score: str,
    paper: Mapping[str, Mapping[str, Sequence[str]]],
    chosen_on: str = "the validation pictures",
) -> Table:
    """Arms that the paper has too, ours at the stop that has the best score on the pictures to choose on, with the
    paper's figures in columns of their own; `paper` is backbone -> row -> figures under `names`."""
    asked = {
        "Base": ("plain",),
        "Canon.": ("canonical",),
        "Ours": OF_WEIGHTS,
        "Ours, of the network": OF_THE_NETWORK,
        "its construction, here": ("paper", "paper (smooth)"),
    }
    lines = []
    for backbone in values(rows, "backbone"):
        for title, arms in asked.items():
            mine = [row for row in of(rows, backbone=backbone) if row["arm"] in arms]
            if not mine:
                continue
            chosen = spread_over_seeds(mine, SCORE, "arm", "dial")
            arm, dial = max(chosen, key=lambda stop: chosen[stop].mean)
            best = of(mine, arm=arm, dial=dial)
            figures = [
                spread_over_seeds(best, figure, "arm", "dial")[arm, dial].told(scale, digits)
                for figure, scale, digits in shown.values()
            ]
            theirs = paper.get(backbone, {}).get(title, ["–"] * len(names))
            lines.append([backbone, f"{title} ({arm} {dial:g})", *figures, *theirs])
    header = ["backbone", "arm and stop", *shown, *(f"the paper's {name}" for name in names)]
    return Table(f"## Beside the paper\n\nEach at the stop with the best {score} on {chosen_on}.", header, lines)


def score_against_softness(name: str, rows: Sequence[Row], figure: str, label: str) -> Figure:
    """A figure of merit in per cent over softness, a panel for each backbone, a line for each arm with that dial."""
    arms = [arm for arm in ("ours", "paper", "paper (smooth)") if of(rows, arm=arm)]
    backbones = values(rows, "backbone")

    def draw(canvas: Any) -> None:
        axes = canvas.subplots(1, len(backbones), squeeze=False)[0]
        for axis, backbone in zip(axes, backbones, strict=True):
            mine = of(rows, backbone=backbone)
            for arm in arms:
                spreads = spread_over_seeds(of(mine, arm=arm), figure, "dial")
                stops = sorted(dial for (dial,) in spreads)
                axis.errorbar(
                    stops,
                    [100 * spreads[(stop,)].mean for stop in stops],
                    yerr=[100 * known(spreads[(stop,)].std) for stop in stops],
                    label=arm,
                    **style(arm, arms),
                )
            free = spread_over_seeds(of(mine, arm="plain"), figure, "arm")
            for spread in free.values():
                axis.axhline(100 * spread.mean, color=COLOURS[-1], linewidth=1, linestyle="--", label="plain")
            axis.set_title(backbone)
            axis.set_xlabel("softness")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(label)
        axes[-1].legend(fontsize=8)

    alt = f"{label} against softness for {', '.join(arms)} on {', '.join(backbones)}"
    return Figure(name, alt, draw, (3.4 * len(backbones) + 0.6, 3.4))
