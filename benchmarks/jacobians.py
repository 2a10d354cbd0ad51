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

import numpy as np
import torch
from PIL import Image
from pretrained import DATA, Logits
from torch import Tensor
from transformers import ResNetForImageClassification

import softequiv as se
from softequiv.actions import Pictures
from softequiv.errors import SoftEquivError
from softequiv.measure import jacobian_square
from softequiv.measure.plots import new_figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
GROUP, WITHIN = se.SO(2), se.degrees(30)


def resnet50() -> torch.nn.Module:
    """The pretrained model, float32, in eval mode."""
    return ResNetForImageClassification.from_pretrained(DATA / "resnet50-imagenet", dtype=torch.float32).eval()


def imagenet(count: int, crop: int) -> Tensor:
    """Validation images spread evenly over the classes, cropped and normalised: (count, 3, crop, crop)."""
    rows = (DATA / "imagenet-val-2k" / "labels.tsv").read_text().splitlines()
    names = [rows[i * len(rows) // count].split("\t")[0] for i in range(count)]
    folder = DATA / "imagenet-val-2k" / "images"
    images = torch.from_numpy(np.stack([np.asarray(Image.open(folder / name).convert("RGB")) for name in names]))
    preprocess = json.loads((DATA / "resnet50-imagenet" / "preprocess.json").read_text())
    mean, std = (torch.tensor(preprocess[key])[:, None, None] for key in ("image_mean", "image_std"))
    margin = (images.shape[1] - crop) // 2
    pixels = images[:, margin : margin + crop, margin : margin + crop].permute(0, 3, 1, 2).float() / 255
    return (pixels - mean) / std


def full_precision() -> None:
    """Products of float32 numbers as such, on devices that would round them to fewer digits."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def squares(model: torch.nn.Module, x: Tensor, probes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """||J||_F^2 and the standard error of its estimate, (N,) each."""
    if probes == 0:
        exact = jacobian_square(model, x)
        return exact, torch.zeros_like(exact)
    one, two = (jacobian_square(model, x, probes=probes // 2, generator=generator) for _ in range(2))
    return (one + two) / 2, (one - two).abs() / 2


def figures(images: int, device: str, probes: int, elements: int, batch: int, seed: int) -> dict[str, object]:
    """Norms and relative errors of every image."""
    model, generator = Logits(resnet50()).to(device), torch.Generator().manual_seed(seed)
    norms, errors, doubts = [], [], []
    for x in imagenet(images, 224).split(batch):
        x = x.to(device)
        square, doubt = squares(model, x, probes, generator)
        with torch.no_grad():
            y = model(x)
            moves = [GROUP.random(generator, WITHIN) for _ in range(elements)]
            change = torch.stack([(model(Pictures()(x, g)) - y).norm(dim=1) for g in moves]).mean(0)
        norms += square.sqrt().tolist()
        doubts += (doubt / (2 * square)).tolist()  # of the norm, relative
        errors += (change / (square.sqrt() * x.flatten(1).norm(dim=1))).tolist()
        print(f"{len(norms)} of {images} images", flush=True)
    return {
        "model": "ResNet-50, ImageNet",
        "images": images,
        "rotations": f"{elements} a batch of {batch}, uniform within {WITHIN}",
        "jacobian": "exact" if probes == 0 else f"{probes // 2 * 2} random probes",
        "relative standard error of a norm": math.sqrt(sum(d * d for d in doubts) / len(doubts)),
        "seed": seed,
        "torch": torch.__version__,
        "device": device,
        "norm": [float(f"{value:.5g}") for value in norms],
        "relative error": [float(f"{value:.5g}") for value in errors],
    }


def draw(found: dict[str, object], path: Path) -> None:
    """Two histograms, with logarithmic axes as both quantities are ratios."""
    figure = new_figure(9, 3.2)
    labels = {"norm": r"$\|J_F(x)\|_F$", "relative error": r"$\|F(gx) - F(x)\| \,/\, (\|J_F(x)\|_F \|x\|)$"}
    for axes, (key, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        values = np.array(found[key])
        edges = np.geomspace(values.min() * 0.999, values.max() * 1.001, 40)
        axes.hist(values, bins=edges, color="#4a6fa5")
        axes.axvline(float(np.median(values)), color="#c0392b", label=f"median {np.median(values):.3g}")
        axes.set_xscale("log")
        round_numbers = [m * 10.0**e for e in range(-6, 6) for m in (1, 2, 5)]
        ticks = [tick for tick in round_numbers if edges[0] <= tick <= edges[-1]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(label)
        axes.set_ylabel("images")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{found['model']}, {found['images']} images, rotations within 30 degrees", fontsize=10)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--probes", type=int, default=64, help="0 for the exact Jacobian")
    parser.add_argument("--elements", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder of jacobians.svg and results/")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    arguments = parser.parse_args()
    path = arguments.out / "results" / "jacobians.json"
    full_precision()
    if not arguments.draw:
        start = time.time()
        found = figures(
            arguments.images, arguments.device, arguments.probes, arguments.elements, arguments.batch, arguments.seed
        )
        found["seconds"] = round(time.time() - start)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    found = json.loads(path.read_text())
    print(f"\n{found['model']}, {found['images']} images, Jacobian: {found['jacobian']}\n")
    print("| | least | 5% | median | 95% | largest |\n|---|---|---|---|---|---|")
    for key in ("norm", "relative error"):
        levels = np.quantile(found[key], [0, 0.05, 0.5, 0.95, 1])
        print(f"| {key} | " + " | ".join(f"{value:.3g}" for value in levels) + " |")
    print(f"\nrelative standard error of a norm: {found['relative standard error of a norm']:.2g}")
    try:
        draw(found, arguments.out / "jacobians.svg")
    except SoftEquivError as missing:
        print(missing)


if __name__ == "__main__":
    main()
