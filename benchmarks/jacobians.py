"""How are ||J_F(x)||_F and the paper's relative error distributed over images? Figure F3, for a pretrained ResNet-50.

||F(gx) - F(x)|| / (||J_F(x)||_F ||x||) with logits F, ImageNet validation images x from SOFTEQUIV_DATA (or
../shared/data) and rotations g of up to 30 degrees. The Jacobian of 1,000 logits is estimated by random probes, in two
halves whose difference tells the estimate's own error; `--probes 0` takes it exactly, one backward pass a logit.
Writes docs/results/jacobians.json and draws docs/jacobians.svg from it; `--draw` only draws.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch

from softequiv.experiments.backbones import opened
from softequiv.experiments.f3 import (
    BATCH,
    QUANTILES,
    RANGE,
    SHOWN,
    Logits,
    distribution,
    full_precision,
    histograms,
    quantile,
    validation_pictures,
)
from softequiv.experiments.pages import drawn
from softequiv.experiments.t3 import SIZE, normalisation

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODEL = "resnet50-imagenet"


def figures(images: int, device: str, probes: int, elements: int, seed: int) -> dict[str, object]:
    """Norms and relative errors of every image."""
    pictures, _ = validation_pictures(MODEL, images, SIZE)
    model = Logits(opened(MODEL, normalisation(MODEL))).eval().to(device)
    found = distribution(model, pictures.to(device), probes, elements, seed)
    doubts = found.pop("doubt")
    return {
        "model": "ResNet-50, ImageNet",
        "images": images,
        "rotations": f"{elements} a batch of {BATCH}, uniform within {RANGE} degrees",
        "jacobian": "exact" if probes == 0 else f"{probes // 2 * 2} random probes",
        "relative standard error of a norm": math.sqrt(sum(d * d for d in doubts) / len(doubts)),
        "seed": seed,
        "torch": torch.__version__,
        "device": device,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--probes", type=int, default=64, help="0 for the exact Jacobian")
    parser.add_argument("--elements", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of jacobians.svg and results/")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    arguments = parser.parse_args()
    path = arguments.out / "results" / "jacobians.json"
    full_precision()
    if not arguments.draw:
        start = time.time()
        found = figures(arguments.images, arguments.device, arguments.probes, arguments.elements, arguments.seed)
        found["seconds"] = round(time.time() - start)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    found = json.loads(path.read_text())
    print(f"\n{found['model']}, {found['images']} images, Jacobian: {found['jacobian']}\n")
    print(f"| | {' | '.join(QUANTILES)} |\n|---{'|---' * len(QUANTILES)}|")
    for key in SHOWN:
        levels = [quantile(found[key], q) for q in QUANTILES.values()]
        print(f"| {key} | " + " | ".join(f"{value:.3g}" for value in levels) + " |")
    print(f"\nrelative standard error of a norm: {found['relative standard error of a norm']:.2g}")
    try:
        (arguments.out / "jacobians.svg").write_bytes(drawn(histograms({key: found[key] for key in SHOWN})))
    except ImportError as missing:
        print(missing)


if __name__ == "__main__":
    main()
