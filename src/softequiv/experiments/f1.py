"""F1: what does softness do to weights, features and their errors? The first filtered layer of a ViT, for C4 and C36.

The pictures are those of `report.figures.dial_figure`; beside them stands the error that they show, as a number.
"""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.experiments.backbones import opened
from softequiv.experiments.base import Experiment, Scale, data_folder, data_root
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.compare import spearman
from softequiv.experiments.pages import Claim, Figure, Page, Table
from softequiv.experiments.speed import small_models
from softequiv.experiments.t2 import HALVES
from softequiv.groups.parse import as_group
from softequiv.report.build import turned_to
from softequiv.report.figures import SOFTNESS, dial_figure
from softequiv.report.layer import show, shown_element, told
from softequiv.tasks.cifar import TEN, cifar10

GROUPS = ("C4", "C36")
STAND_IN, RANDOM, HUB = "vit-cifar10", "random ViT", "google/vit-base-patch16-224"
PICTURES = "cifar10/cifar10_2k2k.npz"
HUB_SIZE, RANDOM_SIZE = 224, 32
SHOWN = 1  # number of the picture among those of the test


def cells(scale: Scale) -> list[Cell]:
    """One for each group; the stand-in where it is there."""
    model = HUB if scale == "full" else STAND_IN if there(STAND_IN) and there(PICTURES) else RANDOM
    levels = SOFTNESS if scale != "smoke" else (0.0, 1.0)
    return [Cell("F1", {"model": model, "group": group, "levels": list(levels)}) for group in GROUPS]


def there(name: str) -> bool:
    """Whether something is in the data folder."""
    return (data_root() / name).exists()


def model_and_picture(name: str) -> tuple[nn.Module, Tensor]:
    """A ViT and one picture (C, H, W) as it wants it."""
    if name == RANDOM:
        torch.manual_seed(0)
        build = next(build for own, build in small_models(RANDOM_SIZE).items() if own.startswith("ViT"))
        return build().eval(), torch.randn(3, RANDOM_SIZE, RANDOM_SIZE)
    picture = cifar10(data_folder(PICTURES)).test.batch(torch.tensor([SHOWN]))[0]
    if name == STAND_IN:
        return opened(name, TEN.normalised), picture[0]
    raw = TEN.normalised.bytes(picture)
    larger = torch.nn.functional.interpolate(raw.float(), (HUB_SIZE, HUB_SIZE), mode="bicubic", antialias=True)
    return opened(name, HALVES), HALVES(larger.clamp(0, 255))[0]


def work(settings: Settings) -> Figures:
    """Draw one group, and measure what is drawn."""
    model, picture = model_and_picture(settings["model"])
    group, levels = as_group(settings["group"]), settings["levels"]
    g = shown_element(group, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dial.png"
        dial_figure(path, model, picture, groups=(group,), levels=levels)
        drawn = base64.b64encode(path.read_bytes()).decode("ascii")
    return {
        "error": [show(turned_to(model, group, level), picture, g).error for level in levels],
        "moved by": told(g),
        "drawn": [drawn],
    }


def grows(row: Row) -> Claim:
    """Whether the error of the shown features grows with softness, from nothing."""
    rank = spearman(row["levels"], row["error"])
    return Claim(
        f"{row['group']}: the error of the features grows with softness",
        rank > 0.99,
        f"rank correlation {rank:.2f}, from {row['error'][0]:.2g} to {row['error'][-1]:.2g}",
    )


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """A sheet and a line of errors for each group."""
    levels, model = rows[0]["levels"], rows[0]["model"]
    stand_in = {STAND_IN: " (a stand-in for the paper's ViT-B/16)", RANDOM: " (random weights: a stand-in for any)"}
    lines = [[row["group"], row["moved by"], *(f"{error:.3g}" for error in row["error"])] for row in rows]
    return Page(
        "F1. What softness does to a layer",
        [
            f"The first filtered layer of {model}{stand_in.get(model, '')}, not trained further, for one picture x and "
            "one step g of the group: the strongest kernels, g f(x), f(gx), and where the two differ. Columns are "
            "softness; shades mean the same in all columns of a row.",
        ],
        [grows(row) for row in rows],
        [
            Table(
                "## Error |f(gx) - g f(x)| / |f(x)| inside the frame",
                ["group", "moved by", *(f"softness {level:g}" for level in levels)],
                lines,
            )
        ],
        [sheet(row) for row in rows],
    )


def sheet(row: Row) -> Figure:
    """The picture that a row holds."""

    def draw(canvas: Any) -> None:
        from matplotlib.image import imread

        axis = canvas.subplots()
        axis.imshow(imread(io.BytesIO(base64.b64decode(row["drawn"][0])), format="png"))
        axis.set_axis_off()

    alt = f"weights, features and error maps at softness {', '.join(f'{level:g}' for level in row['levels'])}"
    return Figure(row["group"], f"{alt}, for {row['group']}", draw, (1.9 * len(row["levels"]) + 0.6, 6.6))


F1 = Experiment("F1", "What softness does to a layer", cells, work, page)
