"""How much more do our certificates say than the paper's bound? Every filtered layer of ViT-B/16, ResNet-50 and
SegFormer-B0, softened at several levels and not at all, over the whole of SO(2) and within 30 degrees.

Random weights from the configurations, and real ones of a ResNet-50 and a CIFAR-10 ViT where SOFTEQUIV_DATA (or
../shared/data) holds them. Prints a Markdown table and writes docs/results/bounds.json: `python benchmarks/bounds.py`.
The paper's b sqrt(n_G) r is taken without its unknown residual, with b the largest level that the weight contains.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

import softequiv as se
from softequiv._files import written_whole
from softequiv.certify import WeightCertificate, certify
from softequiv.certify.weight import stored_rounding
from softequiv.experiments.base import data_root

ROOT = Path(__file__).resolve().parents[1]
RANGES = {"whole group": math.inf, "30 degrees": se.degrees(30)}
SOFTNESS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # 1 is the model as it was


def models() -> dict[str, Callable[[], nn.Module]]:
    """What is compared; real weights only where they are."""
    out: dict[str, Callable[[], nn.Module]] = {
        "ViT-B/16, random": lambda: transformers.ViTForImageClassification(transformers.ViTConfig()),
        "ResNet-50, random": lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig()),
        "SegFormer-B0, random": lambda: transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig()),
    }
    real = {
        "ResNet-50, ImageNet": ("resnet50-imagenet", transformers.ResNetForImageClassification),
        "ViT, CIFAR-10": ("vit-cifar10", transformers.ViTForImageClassification),
    }
    for title, (folder, kind) in real.items():
        path = data_root() / folder
        if (path / "config.json").is_file():
            out[title] = lambda path=path, kind=kind: kind.from_pretrained(path, dtype=torch.float32)
    return out


@dataclass(frozen=True)
class Row:
    """The layers of one model at one softness for one range."""

    model: str
    softness: float
    range: str
    layers: int
    ours: float  # median certified error
    paper: float  # median of the paper's bound
    ratio: float  # median of ours / paper over layers where the paper's is not zero
    larger: int  # layers on which ours is larger by more than the rounding of stored weights
    paper_vacuous: int  # layers on which the paper's is 2 or more
    ours_says: int  # those of them on which ours is below 2


def compared(title: str, softness: float, name: str, weights: tuple[WeightCertificate, ...]) -> Row:
    """One row of the table."""
    pairs = [(w.error, w.paper) for w in weights]  # certified for this range
    slack = 3 * stored_rounding(torch.float32)
    vacuous = [ours for ours, paper in pairs if paper >= 2]
    ratios = [ours / paper for ours, paper in pairs if paper > 0]
    return Row(
        model=title,
        softness=softness,
        range=name,
        layers=len(pairs),
        ours=statistics.median(ours for ours, _ in pairs),
        paper=statistics.median(paper for _, paper in pairs),
        ratio=statistics.median(ratios) if ratios else math.nan,
        larger=sum(ours > paper + slack for ours, paper in pairs),
        paper_vacuous=len(vacuous),
        ours_says=sum(ours < 2 for ours in vacuous),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "bounds.json")
    path = parser.parse_args().json
    torch.manual_seed(0)
    rows: list[Row] = []
    print("| model | softness | range | layers | ours | paper | ours / paper | ours larger | paper >= 2 | ours < 2 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for title, build in models().items():
        net = se.soften(build(), "SO(2)", softness=1.0)
        for softness in SOFTNESS:
            se.set_softness(net, softness)
            for name, within in RANGES.items():
                row = compared(title, softness, name, certify(net, within).weights)
                rows.append(row)
                ratio = "-" if math.isnan(row.ratio) else f"{row.ratio:.3f}"
                print(
                    f"| {title} | {softness:g} | {name} | {row.layers} | {row.ours:.3g} | {row.paper:.3g} | {ratio} "
                    f"| {row.larger} | {row.paper_vacuous} | {row.ours_says} |",
                    flush=True,
                )
    for name in RANGES:
        own = [row for row in rows if row.range == name]
        ratios = [row.ratio for row in own if not math.isnan(row.ratio)]
        print(
            f"\n{name}: {sum(row.layers for row in own)} layers, ours larger on {sum(row.larger for row in own)}, the "
            f"paper's vacuous on {sum(row.paper_vacuous for row in own)}, ours not on "
            f"{sum(row.ours_says for row in own)} of these; median ratio {statistics.median(ratios):.3f}"
        )
    entries = [{key: None if value != value else value for key, value in asdict(row).items()} for row in rows]
    with written_whole(path) as part:
        part.write_text(json.dumps({"torch": torch.__version__, "seed": 0, "rows": entries}, indent=1))


if __name__ == "__main__":
    main()
