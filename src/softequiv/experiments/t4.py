"""T4: are masks better when their network is soft? Segmentation by SegFormer and by a linear head on a ViT.

`small` is CamVid, with a SegFormer-B0 from scratch and the ViT of CIFAR-10; `full` is PASCAL VOC with the paper's
backbones. The cut-offs, hard and smooth, stand beside the least distortion.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from softequiv.actions import Pictures
from softequiv.baselines.augmentation import Augmented
from softequiv.baselines.canonical import Canonical, WithPrior
from softequiv.experiments.arms import Armed, Setting, armed, restore_variance
from softequiv.experiments.backbones import CLASSIFIER, SEGMENTER, PatchwiseLinear, opened, with_head
from softequiv.experiments.base import Experiment, Scale, data_folder
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import beside_augmentation, curves, trade_off
from softequiv.experiments.finetune import (
    DIALS,
    beside_paper,
    claims_of,
    of,
    paper_rows,
    score_against_softness,
    seeded,
    shortened,
    stop_table,
    tables,
    trained_and_judged,
    values,
)
from softequiv.experiments.judged import TESTED, TRAINED, quarters, turns
from softequiv.experiments.pages import Figure, Page, Table
from softequiv.experiments.t2 import HALVES, RANGE
from softequiv.groups import SO, degrees
from softequiv.tasks.augment import Chain, Scaled
from softequiv.tasks.cifar import TEN
from softequiv.tasks.disc import InDisc
from softequiv.tasks.files import Normalised
from softequiv.tasks.folders import IMAGENET
from softequiv.tasks.masks import camvid, voc
from softequiv.tasks.segmentation import MASKS, Segmentation
from softequiv.training import Recipe

DATASETS = {"camvid": camvid, "voc": voc}
STOPS: dict[str, tuple[float, ...]] = {
    "plain": (1.0,),
    "ours": (0.5, 0.7, 0.9),
    "ours (target)": (0.3, 0.6, 0.9),
    "paper": (0.9,),
    "paper (smooth)": (0.9,),
    "canonical": (100.0,),
    "penalty": (1.0,),
    "held + labels": (0.02, 0.04),
}
# trained without turns
UPRIGHT = {"plain": (1.0,), "ours": (0.9,), "paper": (0.9,), "penalty": (1.0,), "held + labels": (0.02, 0.04)}
LOWER: dict[str, tuple[float, ...]] = {"ours": (0.0, 0.25), "paper": (0.25, 0.5, 0.7)}  # for the curve over softness
CUTOFFS = {"paper": (0.9,), "paper (smooth)": (0.9,), "ours": (0.9,), "ours (target)": (0.6, 0.9)}
SEEDS = 3
EVALUATIONS = 6  # of a training
BATCH = 16  # pictures judged at a time
SCORES = Pictures("bilinear")  # how scores of pixels move
SCRATCH = "segformer-b0, from scratch"


@dataclass(frozen=True)
class Tuned:
    """A backbone of this table: how it is trained, on pictures of which size, prepared how."""

    recipe: Recipe
    size: int
    normalised: Normalised = IMAGENET


FULL = Recipe(epochs=100, batch=32, rate=5e-5, weight_decay=0.01, warmup=8.0, precision="bf16")
BACKBONES = {
    # SegFormer's own rate, 6e-5, is for pretrained encoders; from scratch on 367 pictures fifteen times that
    SCRATCH: Tuned(replace(FULL, epochs=60, rate=9e-4, warmup=4.0, clip=1.0), 224),
    "vit-cifar10": Tuned(
        replace(FULL, epochs=30, rate=3e-4, head_rate=1e-3, warmup=2.0, clip=1.0), 128, TEN.normalised
    ),
    "google/vit-base-patch16-224": Tuned(FULL, 224, HALVES),
    "facebook/dinov2-base": Tuned(replace(FULL, rate=1e-5), 518),  # the paper's 512 is no multiple of patches of 14
    "nvidia/segformer-b0-finetuned-ade-512-512": Tuned(replace(FULL, rate=1e-4), 512),
}
SMALL, HUB = tuple(BACKBONES)[:2], tuple(BACKBONES)[2:]

PAPER_NAMES = ("mIoU", "aIoU", "cIoU", "eErr x 100")
PAPER_ROWS = {
    "google/vit-base-patch16-224": ("73.40 70.09 71.73 12.31", "65.36 61.93 63.62 20.39", "74.78 71.61 73.18 11.12"),
    "facebook/dinov2-base": ("89.57 88.10 88.83 4.06", "83.48 82.73 83.11 44.93", "89.48 88.70 89.09 3.70"),
    "nvidia/segformer-b0-finetuned-ade-512-512": (
        "65.34 61.17 63.22 11.03",
        "57.50 55.23 56.36 24.82",
        "66.34 62.52 64.40 10.64",
    ),
}
STANDS_FOR = {SCRATCH: HUB[2], "vit-cifar10": HUB[0]}
PAPER_CUTOFFS = "The paper's, for ViT-B/16 on PASCAL VOC (mIoU, aIoU, cIoU, eErr x 100): hard 73.92 69.70 71.78 11.74; \
smooth 74.78 71.61 73.18 11.12."

SHOWN = {
    "mIoU": ("mIoU", 100, 2),
    "aIoU": ("aIoU 30", 100, 2),
    "cIoU": ("cIoU 30", 100, 2),
    "eErr x 100": ("eErr 30", 100, 2),
}
BEYOND = {
    "aIoU 90°": ("aIoU 90", 100, 2),
    "eErr x 100 at 90°": ("eErr 90", 100, 2),
    "cIoU in the disc": ("cIoU disc", 100, 2),
    "eErr x 100 in the disc": ("eErr disc", 100, 2),
}


def cells(scale: Scale) -> list[Cell]:
    """The main table of the first seed first, then the lower stops of the curve, then more seeds."""
    if scale == "smoke":
        base = {"dataset": "camvid", "turned": True, "epochs": 1, "pictures": 8, "seed": 0}
        chosen = [
            (SCRATCH, 32, "plain", 1.0),
            (SCRATCH, 32, "ours", 0.9),
            (SCRATCH, 32, "canonical", 100.0),
            ("vit-cifar10", 48, "ours (target)", 0.6),
        ]
        return [
            Cell("T4", {**base, "backbone": name, "size": size, "arm": arm, "dial": dial})
            for name, size, arm, dial in chosen
        ]
    if scale == "full":
        main = [part for name in HUB for part in settings_of(name, "voc", True, STOPS)]
        lower = [part for name in HUB for part in settings_of(name, "voc", True, LOWER)]
    else:
        ways = [(name, *way) for name in SMALL for way in ((True, STOPS), (False, UPRIGHT))]
        main = [part for name, turned, stops in ways for part in settings_of(name, "camvid", turned, stops)]
        lower = [part for name in SMALL for part in settings_of(name, "camvid", True, LOWER)]
    first, rest = (0,), range(1, SEEDS)
    return [*seeded("T4", [*main, *lower], first), *seeded("T4", main, rest), *seeded("T4", lower, rest)]


def settings_of(
    backbone: str, dataset: str, turned: bool, stops: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Stops of a backbone in one way of training."""
    tuned = BACKBONES[backbone]
    base = {"backbone": backbone, "dataset": dataset, "size": tuned.size, "turned": turned}
    return [
        {**base, "epochs": tuned.recipe.epochs, "arm": arm, "dial": dial}
        for arm, dials in stops.items()
        for dial in dials
    ]


@lru_cache(maxsize=2)
def masks(dataset: str, size: int, normalised: Normalised, pictures: int | None) -> Segmentation:
    """The data set in squares, decoded once."""
    task = DATASETS[dataset](data_folder(dataset), size=size, prepare=normalised)
    return shortened(task, pictures).held()


def network(source: str, normalised: Normalised, size: int, classes: int) -> nn.Module:
    """A backbone that answers with scores of pixels: SegFormer's decoder, or a linear head on patches."""
    if source == SCRATCH:
        transformers: Any = importlib.import_module("transformers")
        return transformers.SegformerForSemanticSegmentation(
            transformers.SegformerConfig(num_labels=classes)  # its defaults are those of B0
        )
    model: Any = opened(source, normalised)
    if model.config.model_type == "segformer":
        return with_head(model, SEGMENTER, classes)
    return PatchwiseLinear(with_head(model, CLASSIFIER, model.config.num_labels, size=size).base_model, classes)


def armed_for_masks(name: str, model: nn.Module, dial: float, setting: Setting, size: int) -> Armed:
    """The arm of a name; that of canonicalisation turns scores back.

    Networks without a table of positions are given a margin of a quarter of the picture on all sides, so that nothing
    is turned out of their frame.
    """
    if name != "canonical":
        return armed(name, model, dial, setting)
    margin = 0 if isinstance(model, PatchwiseLinear) else size // 4
    upright = Canonical(model, setting.finite, setting.channels, outputs=SCORES, margin=margin)
    return Armed(upright, WithPrior(dial))


def judged_masks(model: nn.Module, task: Segmentation) -> dict[str, float]:
    """mIoU, and aIoU, cIoU, eErr within the range, at a quarter turn, and within the range in the inscribed disc."""
    moves = {
        "30": turns(task.acts, RANGE, seed=TESTED),
        "90": quarters(task.acts, 1),
    }
    found: dict[str, float] = {}
    for name, examples, by in (
        *((name, task.test, by) for name, by in moves.items()),
        ("disc", InDisc(task.test, task.acts.fill), moves["30"]),
    ):
        figures = task.figures(model, examples, by, batch=BATCH)
        found |= {f"{key} {name}": figures[key] for key in ("aIoU", "cIoU", "eErr")}
        found |= {"mIoU disc" if name == "disc" else "mIoU": figures["mIoU"]}
    return found


def work(settings: Settings) -> Figures:
    """Train one cell and judge it."""
    backbone, size = settings["backbone"], settings["size"]
    tuned = BACKBONES[backbone]
    torch.manual_seed(settings["seed"])
    task = masks(settings["dataset"], size, tuned.normalised, settings.get("pictures"))
    model = network(backbone, tuned.normalised, size, task.classes)
    setting = Setting(SO(2), degrees(RANGE), task.acts, 3, outputs=SCORES, labels=MASKS)
    arm = armed_for_masks(settings["arm"], model, settings["dial"], setting, size)
    if backbone == SCRATCH:
        restore_variance(arm.model)
    known = turns(task.acts, RANGE, seed=TRAINED)
    turning = (Augmented(known, known.on(MASKS)),) if settings["turned"] else ()
    recipe = replace(
        tuned.recipe,
        seed=settings["seed"],
        epochs=settings["epochs"],
        warmup=min(tuned.recipe.warmup, settings["epochs"] / 4),
        batch=min(tuned.recipe.batch, len(task.train)),
        evaluate_every=-(-settings["epochs"] // EVALUATIONS),
    )
    return trained_and_judged(arm, task, recipe, judged_masks, known, Chain((Scaled(size), *turning)))


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """Curves of each backbone trained with and without turns, all stops, the cut-offs, and the paper's figures."""
    panels = {
        f"{backbone}, {'with' if turned else 'without'} turns": curves(mine, "cIoU 30", "eErr 30")
        for backbone in values(rows, "backbone")
        for turned in (True, False)
        if (mine := of(rows, backbone=backbone, turned=turned))
    }
    with_turns = of(rows, turned=True)
    paper = paper_rows(PAPER_ROWS, STANDS_FOR)
    claims = [claim for name, found in panels.items() for claim in claims_of(name, found)]
    epochs = ", ".join(f"{name} {of(rows, backbone=name)[0]['epochs']}" for name in values(rows, "backbone"))
    sizes = ", ".join(f"{name} {of(rows, backbone=name)[0]['size']}" for name in values(rows, "backbone"))
    return Page(
        "T4. Segmentation",
        [
            f"{rows[0]['dataset']}: {rows[0]['trained on']:,} pictures to train, {rows[0]['tested on']:,} to test, "
            f"fitted into squares (pixels a side: {sizes}); AdamW, cosine, scaled, cropped and flipped in all arms "
            f"(epochs: {epochs}); {len({row['seed'] for row in rows})} seeds. 'With turns': training pictures and "
            f"masks are also turned within {RANGE} degrees. eErr counts valid pixels alone: those that were inside the "
            "frame before and after.",
            DIALS,
            *([STAND_IN] if scale != "full" else []),
        ],
        [replace(claim, text=claim.text.replace("accuracy", "IoU")) for claim in claims],
        [
            *([beside_paper(with_turns, PAPER_NAMES, SHOWN, "cIoU", paper)] if with_turns else []),
            *cutoff_tables(with_turns),
            *tables(rows, SHOWN | BEYOND),
        ],
        [
            trade_off("curves", beside_augmentation(panels), "combined IoU, %", "equivariance error (KL)"),
            *([softness_figure(rows)] if with_turns else []),
        ],
    )


STAND_IN = (
    "Stand-ins: CamVid for PASCAL VOC; a SegFormer-B0 from scratch for the pretrained one; for ViT-B/16 the ViT of "
    "CIFAR-10 with a linear head on its patches of 4 pixels, its 8 x 8 table of positions read bicubically once at the "
    "patches of the larger picture, so that the table that is filtered is the one in use. The paper's figures stand "
    "beside for their differences alone."
)


def cutoff_tables(rows: Sequence[Row]) -> list[Table]:
    """Hard against smooth against least distortion, a table for each backbone, of models trained with turns."""
    found = []
    for backbone in values(rows, "backbone"):
        chosen = [row for row in of(rows, backbone=backbone) if row["dial"] in CUTOFFS.get(row["arm"], ())]
        if chosen:
            table = stop_table(f"Hard, smooth and least distortion, {backbone}", chosen, SHOWN)
            names = {"paper": "hard (the paper's construction)", "paper (smooth)": "smooth (the paper's construction)"}
            names |= {"ours": "softness (hard, one level in part)", "ours (target)": "least distortion"}
            lines = [[names[arm], *rest] for arm, *rest in table.rows]
            found.append(Table(f"{table.caption}\n\n{PAPER_CUTOFFS}", ["cut-off", *table.header[1:]], lines))
    return found


def softness_figure(rows: Sequence[Row]) -> Figure:
    """Combined IoU against softness, of models trained with turns."""
    return score_against_softness("softness", of(rows, turned=True), "cIoU 30", "combined IoU, %")


T4 = Experiment("T4", "Segmentation", cells, work, page)
