"""T3: does softness help a classifier of ImageNet? Before any training, and after fine-tuning, all arms alike.

`small` has a ResNet-50 and two validation pictures of each class, one to fine-tune on and one to test; `full` is timm's
recipe on the whole of ImageNet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from softequiv.actions import Moves
from softequiv.baselines.augmentation import Augmented
from softequiv.experiments.arms import HALF_BATCHES, Setting, armed, batch_of, trained_so
from softequiv.experiments.augmentation import against_augmentation, beaten
from softequiv.experiments.backbones import CLASSIFIER, opened, with_head
from softequiv.experiments.base import Experiment, Scale, data_folder
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import beside_augmentation, curves, trade_off
from softequiv.experiments.finetune import (
    DIALS,
    beside_paper,
    by_training,
    claims_of,
    longer,
    of,
    paper_rows,
    seeded,
    shortened,
    tables,
    trained_and_judged,
)
from softequiv.experiments.judged import TRAINED, judged, turns
from softequiv.experiments.pages import Page
from softequiv.experiments.t2 import BEYOND, HALVES, JUDGED, PAPER_NAMES, RANGE, SHOWN, ranges
from softequiv.groups import SO, degrees
from softequiv.tasks.augment import Chain, CutMix, Either, Erased, Flip, Mixup, RandAugment
from softequiv.tasks.augment import Transform as Varied
from softequiv.tasks.classification import Classification
from softequiv.tasks.files import Files, Labelled, Normalised
from softequiv.tasks.folders import IMAGENET, image_folder, labelled
from softequiv.tasks.splits import of_each_class
from softequiv.training import Recipe

CLASSES, SIZE, CROP = 1000, 224, 0.875
STAND_IN = "resnet50-imagenet"
STOPS: dict[str, tuple[float, ...]] = {
    "plain": (1.0,),
    "ours": (0.7, 0.9, 0.95),
    "ours (target)": (0.6,),  # an error of .9 is that of ResNet-50 as it is
    "paper": (0.9,),
    "canonical": (100.0,),
    "penalty": (1.0,),
    "held + labels": (0.2, 0.4),
    HALF_BATCHES: (0.2,),
    "mixture": (0.0, 0.3),
}
UNTRAINED = ("plain", "ours", "ours (target)", "paper")

# One picture of each class to learn from: the rate of the paper's smaller table, for head and backbone alike, since the
# head is the one that the backbone was trained with. The last weights are kept: there is nothing to choose them by.
SMALL = Recipe(
    epochs=5, batch=50, rate=1e-5, weight_decay=0.01, clip=1.0, precision="bf16", keep="last", evaluate_every=5
)
FULL = Recipe(
    epochs=15,
    batch=128,
    rate=1e-4,
    weight_decay=0.05,
    warmup=4.0,
    clip=1.0,
    layer_decay=0.65,
    ema=0.99,
    precision="bf16",
)
SMOOTHING, DROP_PATH = 0.1, 0.1
HUB = {
    "google/vit-base-patch16-224": HALVES,
    "facebook/dinov2-base-imagenet1k-1-layer": IMAGENET,
    "microsoft/resnet-50": IMAGENET,
}
PAPER_ROWS = {
    "google/vit-base-patch16-224": ("81.67 77.29 79.40 .36", "76.51 75.81 76.15 .15", "82.28 80.56 81.40 .15"),
    "facebook/dinov2-base-imagenet1k-1-layer": (
        "84.27 82.82 83.52 .13",
        "83.22 82.54 82.87 .07",
        "85.31 84.44 84.87 .05",
    ),
    "microsoft/resnet-50": ("77.91 75.12 76.48 .24", "72.07 70.89 71.46 .24", "77.96 75.52 76.72 .11"),
}
PAPER_ANGLES = (
    "The paper's aAcc at 15 / 45 / 60 degrees: ViT Base 79.04 / 74.83 / 72.66, Ours 81.23 / 79.36 / 77.55; DINOv2 Base "
    "83.63 / 81.78 / 80.37, Ours 84.80 / 84.08 / 82.74; ResNet Base 75.77 / 73.42 / 70.70, Ours 76.47 / 73.70 / 71.27."
)


def cells(scale: Scale) -> list[Cell]:
    """Zero-shot first, as it is cheap and tells most; then every arm with and without turns, seed by seed."""
    if scale == "smoke":
        base = {"backbone": STAND_IN, "turned": True, "pictures": 4, "size": 64, "seed": 0}
        chosen = [("plain", 1.0, 1), ("ours", 0.9, 1), ("paper", 0.9, 0)]
        return [Cell("T3", {**base, "epochs": epochs, "arm": arm, "dial": dial}) for arm, dial, epochs in chosen]
    if scale == "full":
        found = [settings for name in HUB for settings in settings_of(name, FULL.epochs, (True,))]
        return seeded("T3", found, range(3))
    before = {"backbone": STAND_IN, "turned": False, "epochs": 0}
    untrained = [{**before, "arm": arm, "dial": dial} for arm in UNTRAINED for dial in STOPS[arm]]
    return seeded("T3", [*untrained, *settings_of(STAND_IN, SMALL.epochs, (True, False))], range(3))


def settings_of(backbone: str, epochs: int, trained: Sequence[bool]) -> list[dict[str, Any]]:
    """Every stop of every arm of a backbone, by whether turns are trained on, and augmentation for twice as long."""
    base = {"backbone": backbone, "epochs": epochs}
    stops = [(arm, dial) for arm, dials in STOPS.items() for dial in dials]
    return [
        *(
            {**base, "turned": turned, "arm": arm, "dial": dial}
            for turned in trained
            for arm, dial in stops
            if trained_so(arm, turned)
        ),
        longer(base),
    ]


@lru_cache(maxsize=3)
def one_of_each(seed: int, pictures: int | None, size: int) -> Classification:
    """Two pictures of each class, drawn by the seed: one to learn from, one for the test; decoded once, as bytes.

    There is none to choose a model by, so that what stands for validation are the pictures of training.
    """
    items, _ = labelled(data_folder("imagenet-val-2k"))
    every = Files(items, Labelled(size, CROP), normalisation(STAND_IN))
    asked = of_each_class(every.labels(), 0.5, seed)
    others = torch.tensor(sorted(set(range(len(every))) - set(asked.tolist())))
    train, test = (every.part(numbers) for numbers in (others, asked))
    return shortened(Classification(train, train, test, CLASSES), pictures).held()


def small(settings: Settings) -> Classification:
    """The pictures of a cell with the stand-in."""
    return one_of_each(settings["seed"], settings.get("pictures"), settings.get("size", SIZE))


@lru_cache(maxsize=3)
def imagenet(normalised: Normalised) -> Classification:
    """The ImageNet folder, train/ and val/; training pictures are random rectangles, drawn anew in every epoch."""
    task = image_folder(
        data_folder("imagenet"),
        size=SIZE,
        crop=CROP,
        prepare=normalised,
        validation=0.02,
        crops=True,
        classes=CLASSES,
    )
    return replace(task, label_smoothing=SMOOTHING)


def normalisation(backbone: str) -> Normalised:
    """How a backbone wants its pictures."""
    if backbone in HUB:
        return HUB[backbone]
    told = json.loads((data_folder(backbone) / "preprocess.json").read_text(encoding="utf-8"))
    return Normalised(tuple(told["image_mean"]), tuple(told["image_std"]))


def classifier(source: str, normalised: Normalised) -> nn.Module:
    """A backbone with its own head of a thousand classes."""
    model = opened(source, normalised)
    return with_head(model, CLASSIFIER, CLASSES, drop_path=DROP_PATH) if "/" in source else model


def varied(known: Moves, normalised: Normalised, turned: bool, full: bool) -> Varied:
    """Flips and turns; timm's recipe also takes RandAugment, mixup or cutmix, and erasing."""
    turning: tuple[Varied, ...] = (Augmented(known),) if turned else ()
    if not full:
        return Chain((Flip(), *turning))
    mixed = Either(Mixup(CLASSES, 0.8), CutMix(CLASSES, 1.0))
    return Chain((Flip(), RandAugment(normalised), *turning, Erased(0.25), mixed))


def work(settings: Settings) -> Figures:
    """Fine-tune one cell, or not, and judge it."""
    backbone, full = settings["backbone"], settings["backbone"] in HUB
    torch.manual_seed(settings["seed"])
    normalised = normalisation(backbone)
    task = imagenet(normalised) if full else small(settings)
    arm = armed(
        settings["arm"],
        classifier(backbone, normalised),
        settings["dial"],
        Setting(SO(2), degrees(RANGE), task.acts, 3),
    )
    known = turns(task.acts, RANGE, seed=TRAINED)
    recipe = replace(FULL if full else SMALL, seed=settings["seed"], epochs=max(settings["epochs"], 4 if full else 1))
    batch = batch_of(settings["arm"], min(recipe.batch, len(task.train)))
    return trained_and_judged(
        arm,
        task,
        replace(recipe, batch=batch) if settings["epochs"] else None,
        partial(judged, ranges=ranges(task.acts), disc=str(RANGE), batch=100),
        known,
        varied(known, normalised, settings["turned"], full),
    )


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """Curves before training, with and without turns; all stops; the paper's figures."""
    panels = {name: curves(mine, "cAcc 30", "iErr 30") for name, mine in by_training(rows).items()}
    with_turns = [row for row in of(rows, turned=True) if row["epochs"]]
    first = next((row for row in rows if row["epochs"]), rows[0])
    chosen_on = "the validation pictures" if scale == "full" else "the training pictures, as there are no others"
    paper = paper_rows(PAPER_ROWS, {STAND_IN: "microsoft/resnet-50"})
    return Page(
        "T3. ImageNet",
        [
            STAND_IN_SENTENCE if scale != "full" else FULL_SENTENCE,
            f"{first['trained on']:,} pictures to train, {first['tested on']:,} to test, "
            f"{first.settings.get('size', SIZE)} pixels a side; "
            f"{first['epochs']} epochs of AdamW; {len({row['seed'] for row in rows})} seeds. 'With turns': training "
            f"pictures are also turned within {RANGE} degrees; what turns leave empty has the mean colour.",
            DIALS,
            PAPER_ANGLES,
        ],
        [
            *(claim for name, found in panels.items() for claim in claims_of(name, found)),
            *against_augmentation(rows, JUDGED),
        ],
        [
            *([beside_paper(with_turns, PAPER_NAMES, SHOWN, "cAcc", paper, chosen_on)] if with_turns else []),
            beaten(rows, JUDGED),
            *tables(rows, SHOWN | BEYOND),
        ],
        [trade_off("curves", beside_augmentation(panels), "combined accuracy, %", "invariance error (KL)")],
    )


STAND_IN_SENTENCE = (
    "A stand-in for the paper's table: a ResNet-50 of ImageNet and two validation pictures of each of the thousand "
    "classes, of which the seed draws one to fine-tune on and one to test. With one picture of a class fine-tuning "
    "teaches turns and the filtered weights, not classes. 'Before any training' needs none."
)
FULL_SENTENCE = (
    "The paper's backbones with timm's recipe on ImageNet: mixup 0.8 or cutmix 1.0, erasing 0.25, "
    f"rand-m9-mstd0.5-inc1, label smoothing {SMOOTHING:g}, layer decay 0.65, EMA 0.99; drop path {DROP_PATH:g} "
    "where transformers' architecture has it (DINOv2). A fiftieth of the training pictures chooses the model."
)


T3 = Experiment("T3", "ImageNet", cells, work, page)
