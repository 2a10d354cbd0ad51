"""F3: how are ||J_F(x)||_F and the paper's relative error distributed over pictures? Logits of a pretrained ResNet.

    ||F(gx) - F(x)|| / (||J_F(x)||_F ||x||),     x ImageNet validation pictures, g rotations of up to 30 degrees.

The Jacobian of 1,000 logits is estimated by random probes, in two halves whose difference tells the estimate's own
error; with 0 probes it is exact, one backward pass a logit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.actions import Pictures
from softequiv.asking.answers import tensor_of
from softequiv.experiments.backbones import opened
from softequiv.experiments.base import Experiment, Scale, data_folder
from softequiv.experiments.cells import Cell, Figures, Row, Settings
from softequiv.experiments.pages import Figure, Page, Table
from softequiv.experiments.t3 import CROP, SIZE, normalisation
from softequiv.groups import SO, degrees
from softequiv.measure import jacobian_square
from softequiv.tasks.files import Files, Labelled, Normalised
from softequiv.tasks.folders import IMAGENET, labelled

RANGE = 30
BATCH = 16
QUANTILES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "largest": 1.0}
SHOWN = {"norm": r"$\|J_F(x)\|_F$", "relative error": r"$\|F(gx) - F(x)\| \,/\, (\|J_F(x)\|_F \|x\|)$"}
BARS = 40
SIZES: dict[Scale, dict[str, Any]] = {
    "smoke": {"model": "resnet50-imagenet", "pictures": 2, "parts": 1, "probes": 2, "elements": 1, "size": 64},
    "small": {"model": "resnet50-imagenet", "pictures": 512, "parts": 8, "probes": 64, "elements": 4, "size": SIZE},
    "full": {"model": "microsoft/resnet-18", "pictures": 50000, "parts": 100, "probes": 0, "elements": 4, "size": SIZE},
}


def cells(scale: Scale) -> list[Cell]:
    """The pictures in parts of equal size."""
    return [Cell("F3", {**SIZES[scale], "part": part, "seed": 0}) for part in range(SIZES[scale]["parts"])]


class Logits(nn.Module):
    """A classifier that answers with its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return tensor_of(self.model(x))


def validation_pictures(model: str, count: int, size: int, part: int = 0, parts: int = 1) -> tuple[Tensor, str]:
    """Part of `count` validation pictures spread evenly over the classes, (N, 3, size, size), and their fingerprint."""
    hub = "/" in model
    prepare: Normalised = IMAGENET if hub else normalisation(model)
    items, _ = labelled(data_folder("imagenet") / "val" if hub else data_folder("imagenet-val-2k"))
    every = Files(items, Labelled(size, CROP), prepare)
    own = every.part(torch.tensor([i * len(items) // count for i in range(count)][part::parts]))
    return own.batch(torch.arange(len(own)))[0], own.fingerprint


def squares(model: nn.Module, x: Tensor, probes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """||J||_F^2 and the standard error of its estimate, (N,) each."""
    if probes == 0:
        exact = jacobian_square(model, x)
        return exact, torch.zeros_like(exact)
    one, two = (jacobian_square(model, x, probes=probes // 2, generator=generator) for _ in range(2))
    return (one + two) / 2, (one - two).abs() / 2


def full_precision() -> None:
    """Products of float32 numbers as such, on devices that would round them to fewer digits."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def distribution(model: nn.Module, pictures: Tensor, probes: int, elements: int, seed: int) -> Figures:
    """Norms, their own relative errors, and relative errors of the network, one of each for every picture."""
    generator = torch.Generator().manual_seed(seed)
    norms: list[float] = []
    errors: list[float] = []
    doubts: list[float] = []
    for x in pictures.split(BATCH):
        square, doubt = squares(model, x, probes, generator)
        with torch.no_grad():
            y = model(x)
            moves = [SO(2).random(generator, degrees(RANGE)) for _ in range(elements)]
            change = torch.stack([(model(Pictures()(x, g)) - y).norm(dim=1) for g in moves]).mean(0)
        norms += square.sqrt().tolist()
        doubts += (doubt / (2 * square)).tolist()  # of the norm, relative
        errors += (change / (square.sqrt() * x.flatten(1).norm(dim=1))).tolist()
    rounded = {"norm": norms, "relative error": errors, "doubt": doubts}
    return {name: [float(f"{value:.5g}") for value in values] for name, values in rounded.items()}


def work(settings: Settings) -> Figures:
    """One part of the pictures."""
    full_precision()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = settings["model"]
    pictures, fingerprint = validation_pictures(
        name, settings["pictures"], settings["size"], settings["part"], settings["parts"]
    )
    normalised = IMAGENET if "/" in name else normalisation(name)
    model = Logits(opened(name, normalised)).eval().to(device)
    seed = settings["seed"] + settings["part"]
    found = distribution(model, pictures.to(device), settings["probes"], settings["elements"], seed)
    return {**found, "data": fingerprint[:16]}


def page(rows: Sequence[Row], scale: Scale) -> Page:
    """Two histograms and their quantiles."""
    first = rows[0]
    found = {name: [value for row in rows for value in row[name]] for name in (*SHOWN, "doubt")}
    count, probes = len(found["norm"]), first["probes"] // 2 * 2
    doubt = math.sqrt(statistics.fmean(value**2 for value in found["doubt"]))
    how = f"{probes} random probes (relative standard error of a norm {doubt:.2g})" if probes else "one pass a logit"
    stand_in = "" if "/" in first["model"] else ", a stand-in for the paper's ResNet-18"
    return Page(
        "F3. Norms of Jacobians, and relative errors",
        [
            f"Logits of {first['model']}{stand_in}, not trained further; {count:,} ImageNet validation pictures of "
            f"{first['size']} pixels, {first['elements']} rotations within {RANGE} degrees for each batch of {BATCH}. "
            f"The Jacobian is taken by {how}, in float32.",
            "A relative error of 1 would mean that a turn changes the logits as much as a change of the picture as "
            "large as itself could to first order. The paper's figure gives no numbers to set beside these.",
        ],
        tables=[
            Table(
                "## Quantiles",
                ["", *QUANTILES],
                [[name, *(f"{quantile(found[name], q):.3g}" for q in QUANTILES.values())] for name in SHOWN],
            )
        ],
        figures=[histograms({name: found[name] for name in SHOWN})],
    )


def quantile(values: Sequence[float], q: float) -> float:
    """With linear interpolation.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))


def histograms(found: dict[str, list[float]]) -> Figure:
    """A histogram of each, on logarithmic axes since both are ratios."""

    def draw(canvas: Any) -> None:
        for axis, (name, values) in zip(canvas.subplots(1, len(found)), found.items(), strict=True):
            low, high = math.log(min(values) * 0.999), math.log(max(values) * 1.001)
            edges = [math.exp(low + (high - low) * i / BARS) for i in range(BARS + 1)]
            axis.hist(values, bins=edges, color="#4a6fa5")
            median = statistics.median(values)
            axis.axvline(median, color="#c0392b", label=f"median {median:.3g}")
            axis.set_xscale("log")
            ticks = [t for e in range(-6, 6) for m in (1, 2, 5) if edges[0] <= (t := m * 10.0**e) <= edges[-1]]
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_xticks([], minor=True)
            axis.set(xlabel=SHOWN[name], ylabel="pictures")
            axis.legend(frameon=False)
            axis.spines[["top", "right"]].set_visible(False)

    return Figure("jacobians", "histograms of the Jacobian's norm and of the relative error", draw, (9.0, 3.2))


F3 = Experiment("F3", "Norms of Jacobians, and relative errors", cells, work, page)
