"""Which layers of real models break rotation, and does the error fall as predicted once the culprit is fixed?

ResNet-50 at 224 pixels, fixed by 225 (strides then cover the maps evenly), and the ViT on CIFAR-10, fixed by filtered
positions or patches; under a quarter turn (C4) and under rotations of up to 30 degrees (SO(2)). Predicted is the error
without the parts whose first cause is what the fix removes. Models and images from SOFTEQUIV_DATA (or ../shared/data).
Writes docs/results/attribution.json and draws docs/attribution-*.svg from it; `--draw` only draws.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jacobians import DOCS, MODEL, full_precision
from pretrained import DATA, cifar
from torch import Tensor, nn
from transformers import ViTForImageClassification

import softequiv as se
from softequiv.errors import SoftEquivError
from softequiv.experiments.backbones import opened
from softequiv.experiments.base import data_folder
from softequiv.experiments.t3 import normalisation
from softequiv.measure import Attribution, attribute
from softequiv.measure.plots import share_bars
from softequiv.tasks.cifar import TEN
from softequiv.tasks.files import Files, Labelled
from softequiv.tasks.folders import labelled

STORED = 256  # pixels of a side of the images in the data folder


def resnet50() -> nn.Module:
    """The pretrained ResNet, float32, in eval mode."""
    return opened(MODEL, normalisation(MODEL)).eval()


def imagenet(count: int, size: int) -> Tensor:
    """Validation images spread evenly over the classes, the middle of each, normalised: (count, 3, size, size)."""
    items, _ = labelled(data_folder("imagenet-val-2k"))
    chosen = tuple(items[i * len(items) // count] for i in range(count))
    return Files(chosen, Labelled(size, size / STORED), normalisation(MODEL)).batch(torch.arange(count))[0]


def vit() -> nn.Module:
    """The pretrained ViT, float32, in eval mode."""
    return ViTForImageClassification.from_pretrained(DATA / "vit-cifar10", dtype=torch.float32).eval()


def cifar_images(count: int) -> Tensor:
    """The first test images, normalised: (count, 3, 32, 32)."""
    return TEN.normalised(cifar()[0][:count])


def filtered(build: Callable[[], nn.Module], group: str, *only: str) -> nn.Module:
    """The model with some or all of its grids filtered to softness 0, as a plain model."""
    return se.bake(se.soften(build(), group, softness=0.0, only=only or None))


@dataclass(frozen=True)
class Move:
    """What the pictures are moved by."""

    title: str
    group: str
    within: float | None
    elements: int

    def chosen(self) -> Any:
        """One quarter turn, or so many drawn elements."""
        group = se.parse_group(self.group)
        return [group.element(1)] if self.within is None else self.elements


MOVES = (Move("quarter turn", "C4", None, 1), Move("30 degrees", "SO(2)", se.degrees(30), 4))

State = Callable[[str, int], tuple[nn.Module, Tensor]]  # (group, images) -> model and inputs

POSITIONS, PATCHES = "*position_embeddings", "*projection.weight"
STATES: dict[str, State] = {
    "ResNet-50, 224 px": lambda group, n: (resnet50(), imagenet(n, 224)),
    "ResNet-50, 225 px": lambda group, n: (resnet50(), imagenet(n, 225)),
    "ResNet-50 filtered, 224 px": lambda group, n: (filtered(resnet50, group), imagenet(n, 224)),
    "ResNet-50 filtered, 225 px": lambda group, n: (filtered(resnet50, group), imagenet(n, 225)),
    "ViT": lambda group, n: (vit(), cifar_images(n)),
    "ViT, positions filtered": lambda group, n: (filtered(vit, group, POSITIONS), cifar_images(n)),
    "ViT, patches filtered": lambda group, n: (filtered(vit, group, PATCHES), cifar_images(n)),
    "ViT, both filtered": lambda group, n: (filtered(vit, group), cifar_images(n)),
}

# before, after, and the kind of cause that is gone then
FIXES = (
    ("ResNet-50, 224 px", "ResNet-50, 225 px", "geometry"),
    ("ResNet-50 filtered, 224 px", "ResNet-50 filtered, 225 px", "geometry"),
    ("ViT", "ViT, positions filtered", "position embedding"),
    ("ViT", "ViT, patches filtered", "patch embedding"),
    ("ViT, patches filtered", "ViT, both filtered", "position embedding"),
    ("ViT, positions filtered", "ViT, both filtered", "patch embedding"),
)


def kinds_of(found: Attribution, kind: str) -> list[str]:
    """The parts whose first cause is of this kind."""
    return [part.name for part in found.parts if part.causes and part.causes[0].kind == kind]


def file_name(state: str, move: str) -> str:
    """attribution-resnet-50-224-px-quarter-turn.svg and the like."""
    words = f"{state} {move}".lower().replace(",", "").split()
    return f"attribution-{'-'.join(words)}.svg"


def measured(images: int, device: str, batch: int, seed: int) -> dict[str, Any]:
    """Every state under every move, and what was predicted for every fix."""
    states: dict[str, Any] = {}
    fixes = []
    for move in MOVES:
        found: dict[str, Attribution] = {}
        for state, build in STATES.items():
            model, inputs = build(move.group, images)
            found[state] = attribute(
                model.to(device),
                inputs,
                move.group,
                move.within,
                elements=move.chosen(),
                batch_size=batch,
                seed=seed,
            )
            states[f"{state} | {move.title}"] = found[state].to_dict()
            print(f"\n{state}, {move.title}\n{found[state]}", flush=True)
        for before, after, kind in FIXES:
            gone = kinds_of(found[before], kind)
            culprit = found[before].culprit
            fixes.append(
                {
                    "move": move.title,
                    "before": before,
                    "after": after,
                    "culprit": culprit.name if culprit else "",
                    "share": culprit.share if culprit else 0.0,
                    "cause": culprit.causes[0].kind if culprit and culprit.causes else "",
                    "fixed": kind,
                    "fixed parts": gone,
                    "fixed share": sum(part.share for part in found[before].parts if part.name in gone),
                    "error": found[before].error,
                    "predicted": found[before].error * found[before].without(*gone),
                    "error after": found[after].error,
                }
            )
    return {
        "images": images,
        "seed": seed,
        "torch": torch.__version__,
        "device": device,
        "states": states,
        "fixes": fixes,
    }


def table(fixes: list[dict[str, Any]]) -> str:
    """One line a fix, in Markdown."""
    lines = [
        "| move | from | to | culprit (share) | fixed parts' share | error | predicted | error after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in fixes:
        culprit = f"{row['culprit']}, {row['cause']} ({100 * row['share']:.0f}%)"
        figures = (f"{row[key]:.3g}" for key in ("error", "predicted", "error after"))
        cells = [row["move"], row["before"], row["after"], culprit, f"{100 * row['fixed share']:.0f}%", *figures]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


DRAWN = ("ResNet-50, 224 px", "ResNet-50 filtered, 224 px", "ViT")


def draw(found: dict[str, Any], folder: Path) -> None:
    """A bar chart for the states before any fix."""
    for title, state in found["states"].items():
        name, move = title.split(" | ")
        if name in DRAWN:
            shares = {part["name"]: part["share"] for part in state["parts"]}
            heading = f"{name}, {move}: error {state['error']:.3g} of the answer"
            share_bars(list(shares), list(shares.values()), folder / file_name(name, move), heading)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of attribution-*.svg and results/")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    arguments = parser.parse_args()
    path = arguments.out / "results" / "attribution.json"
    full_precision()
    if not arguments.draw:
        start = time.time()
        found = measured(arguments.images, arguments.device, arguments.batch, arguments.seed)
        found["seconds"] = round(time.time() - start)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
    found = json.loads(path.read_text())
    print(f"\n{found['images']} images; errors are relative to the answer, root mean square\n\n{table(found['fixes'])}")
    try:
        draw(found, arguments.out)
    except SoftEquivError as missing:
        print(missing)


if __name__ == "__main__":
    main()
