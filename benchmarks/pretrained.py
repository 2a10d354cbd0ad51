"""What does softening do to pretrained models before any training? Accuracy upright, at up to 30 degrees, and turned.

Real weights and images from the folder in SOFTEQUIV_DATA (or ../shared/data): ResNet-50 and EfficientNet-lite0 on 2,000
ImageNet validation images, ResNet-56 and a ViT on the first 2,000 CIFAR-10 test images. Softness 1 must give their
own accuracy. `--json PATH` writes the figures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import ResNetForImageClassification, ViTForImageClassification

import softequiv as se
from softequiv.experiments.backbones import ResNet56
from softequiv.experiments.base import data_root
from softequiv.experiments.f3 import Logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DATA = data_root()


class SameConv(nn.Conv2d):
    """Convolution with TensorFlow's padding: the odd pixel goes to the right and below."""

    def forward(self, x: Tensor) -> Tensor:
        n, s, k = x.shape[-1], self.stride[0], self.kernel_size[0]
        total = max((math.ceil(n / s) - 1) * s + k - n, 0)
        before, after = total // 2, total - total // 2
        return super().forward(F.pad(x, (before, after, before, after)))


def norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class MobileBlock(nn.Module):
    """Expand, depthwise, project."""

    def __init__(self, width_in: int, width: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = width_in * expand
        self.skip, self.expand = stride == 1 and width_in == width, expand > 1
        if self.expand:
            self.conv_pw, self.bn1 = nn.Conv2d(width_in, inner, 1, bias=False), norm(inner)
            self.conv_dw, self.bn2 = SameConv(inner, inner, kernel, stride, groups=inner, bias=False), norm(inner)
            self.conv_pwl, self.bn3 = nn.Conv2d(inner, width, 1, bias=False), norm(width)
        else:
            self.conv_dw, self.bn1 = SameConv(inner, inner, kernel, stride, groups=inner, bias=False), norm(inner)
            self.conv_pw, self.bn2 = nn.Conv2d(inner, width, 1, bias=False), norm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.expand:
            y = F.relu6(self.bn2(self.conv_dw(F.relu6(self.bn1(self.conv_pw(x))))))
            y = self.bn3(self.conv_pwl(y))
        else:
            y = self.bn2(self.conv_pw(F.relu6(self.bn1(self.conv_dw(x)))))
        return x + y if self.skip else y


# width, depth, kernel, stride, expansion
STAGES = [
    (16, 1, 3, 1, 1),
    (24, 2, 3, 2, 6),
    (40, 2, 5, 2, 6),
    (80, 3, 3, 2, 6),
    (112, 3, 5, 1, 6),
    (192, 4, 5, 2, 6),
    (320, 1, 3, 1, 6),
]


class EfficientNetLite0(nn.Module):
    """EfficientNet-lite0 with the parameter names of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn1 = SameConv(3, 32, 3, 2, bias=False), norm(32)
        blocks, width_in = [], 32
        for width, depth, kernel, stride, expand in STAGES:
            stage = []
            for i in range(depth):
                stage.append(MobileBlock(width_in, width, kernel, stride if i == 0 else 1, expand))
                width_in = width
            blocks.append(nn.Sequential(*stage))
        self.blocks = nn.Sequential(*blocks)
        self.conv_head, self.bn2 = nn.Conv2d(320, 1280, 1, bias=False), norm(1280)
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu6(self.bn1(self.conv_stem(x))))
        return self.classifier(F.relu6(self.bn2(self.conv_head(x))).mean((-2, -1)))


@dataclass(frozen=True)
class Case:
    """A model, its images (uint8), labels, and normalisation."""

    build: Callable[[], nn.Module]
    images: Callable[[], tuple[Tensor, Tensor]]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop: int


def loaded(model: nn.Module, path: Path) -> nn.Module:
    model.load_state_dict(
        {key: value.float() if value.is_floating_point() else value for key, value in load_file(path).items()}
    )
    return model


def cifar() -> tuple[Tensor, Tensor]:
    archive = np.load(DATA / "cifar10" / "cifar10_2k2k.npz")
    images, labels = (archive[next(key for key in archive if "test" in key and mark in key)] for mark in ("x", "y"))
    return torch.from_numpy(images), torch.from_numpy(labels).long().flatten()


def imagenet() -> tuple[Tensor, Tensor]:
    rows = [line.split("\t") for line in (DATA / "imagenet-val-2k" / "labels.tsv").read_text().splitlines()]
    images = [np.asarray(Image.open(DATA / "imagenet-val-2k" / "images" / name).convert("RGB")) for name, _ in rows]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), torch.tensor([int(label) for _, label in rows])


def cases() -> dict[str, Case]:
    preprocess = json.loads((DATA / "resnet50-imagenet" / "preprocess.json").read_text())
    half = (0.5, 0.5, 0.5)
    return {
        "ViT (CIFAR-10)": Case(
            lambda: Logits(ViTForImageClassification.from_pretrained(DATA / "vit-cifar10", dtype=torch.float32)),
            cifar, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 32,
        ),
        "ResNet-56 (CIFAR-10)": Case(
            lambda: loaded(ResNet56(), DATA / "resnet56-cifar10" / "resnet56_cifar10.safetensors"),
            cifar, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 32,
        ),
        "EfficientNet-lite0 (ImageNet)": Case(
            lambda: loaded(EfficientNetLite0(), DATA / "efficientnet-lite0" / "tf_efficientnet_lite0_timm.safetensors"),
            imagenet, half, half, 224,
        ),
        "ResNet-50 (ImageNet)": Case(
            lambda: Logits(ResNetForImageClassification.from_pretrained(DATA / "resnet50-imagenet", dtype=torch.float)),
            imagenet, tuple(preprocess["image_mean"]), tuple(preprocess["image_std"]), 224,
        ),
    }  # fmt: skip


def turned(x: Tensor, degrees: Tensor) -> Tensor:
    """Each picture turned counter-clockwise by its own angle, bicubic, black outside."""
    angle = torch.deg2rad(degrees)
    rows = [torch.stack([angle.cos(), -angle.sin()], -1), torch.stack([angle.sin(), angle.cos()], -1)]
    matrix = torch.cat([torch.stack(rows, -2), torch.zeros(len(x), 2, 1, device=x.device)], -1)
    return F.grid_sample(
        x, F.affine_grid(matrix, list(x.shape), align_corners=False), "bicubic", align_corners=False
    ).clamp(0, 1)


@torch.no_grad()
def accuracies(model: nn.Module, case: Case, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Per cent right upright, at random angles within 30 degrees, and after a quarter turn."""
    model = model.to(DEVICE).eval()
    generator = torch.Generator().manual_seed(0)
    angles = 60 * torch.rand(len(images), generator=generator) - 30
    mean, std = (torch.tensor(value, device=DEVICE)[:, None, None] for value in (case.mean, case.std))
    right = {"upright": 0, "30 degrees": 0, "quarter turn": 0}
    for start in range(0, len(images), 250):
        x = images[start : start + 250].to(DEVICE).float() / 255
        y = labels[start : start + 250].to(DEVICE)
        views = {
            "upright": x,
            "30 degrees": turned(x, angles[start : start + 250].to(DEVICE)),
            "quarter turn": x.rot90(1, (-2, -1)),
        }
        for name, view in views.items():
            margin = (view.shape[-1] - case.crop) // 2
            view = view[..., margin : margin + case.crop, margin : margin + case.crop]
            right[name] += int((model((view - mean) / std).argmax(-1) == y).sum())
    return {name: 100 * count / len(images) for name, count in right.items()}


SETTINGS: dict[str, dict[str, object]] = {
    **{f"softness {s:g}": {"softness": s} for s in (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.25, 0.0)},
    "softness 0.9, paper's bilinear grid": {"softness": 0.9, "action": "bilinear"},
    "softness 0.7, paper's bilinear grid": {"softness": 0.7, "action": "bilinear"},
    "softness 0.5, paper's bilinear grid": {"softness": 0.5, "action": "bilinear"},
    "error 0.5 within 30 degrees": {"error": 0.5, "within": se.degrees(30)},
    "error 0.3 within 30 degrees": {"error": 0.3, "within": se.degrees(30)},
    "error 0.1 within 30 degrees": {"error": 0.1, "within": se.degrees(30)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    arguments = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for title, case in cases().items():
        images, labels = (part[: arguments.images] for part in case.images())
        print(
            f"\n{title}, {len(images)} images\n\n| setting | upright | 30 degrees | quarter turn |\n|---|---|---|---|"
        )
        figures[title] = {}
        for setting, choice in SETTINGS.items():
            model = se.soften(case.build(), "SO(2)", **choice)
            found = accuracies(model, case, images, labels)
            figures[title][setting] = found
            print(f"| {setting} | " + " | ".join(f"{value:.1f}" for value in found.values()) + " |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
