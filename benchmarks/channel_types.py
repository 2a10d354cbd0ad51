"""Do the channels of pretrained networks carry a representation of quarter turns, which typed features would need?

A kernel K is equivariant for types R_out and R_in of its channels if turn(K) = R_out K R_in^T. Here each layer alone
may choose the orthogonal matrices that come nearest: by turns a polar decomposition for each side, from the identity;
of a first layer, whose inputs are colours and stay as they are, that is the best there is. What even they leave,
|turn(K) - R_out K R_in^T| / |K|, no typing can make good: types must also agree between layers, be permutations where a
ReLU follows, and have R^4 = 1. `--json PATH` writes the figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from softequiv.experiments.backbones import opened
from softequiv.tasks.cifar import TEN
from softequiv.tasks.folders import IMAGENET

MODELS = {"resnet56-cifar10": TEN.normalised, "resnet50-imagenet": IMAGENET}
ROUNDS = 30
WIDEST = 128  # channels; decompositions of more take minutes and tell the same


def polar(matrix: Tensor) -> Tensor:
    """The orthogonal matrix nearest to a square one."""
    u, _, v = torch.linalg.svd(matrix)
    return u @ v


def turned_and_left(kernel: Tensor, free_inputs: bool) -> tuple[float, float]:
    """What a quarter turn changes in a kernel (out, in, k, k), and what the best types of its channels leave."""
    turned, inputs = kernel.rot90(1, (-2, -1)), torch.eye(kernel.shape[1], dtype=kernel.dtype)
    outputs = torch.eye(kernel.shape[0], dtype=kernel.dtype)
    for _ in range(ROUNDS if free_inputs else 1):
        outputs = polar(torch.einsum("oiab,piab->op", turned, torch.einsum("piab,ji->pjab", kernel, inputs)))
        if free_inputs:
            inputs = polar(torch.einsum("ojab,oiab->ji", turned, torch.einsum("op,piab->oiab", outputs, kernel)))
    typed = torch.einsum("op,piab,ji->ojab", outputs, kernel, inputs)
    norm = kernel.norm()
    return float((turned - kernel).norm() / norm), float((turned - typed).norm() / norm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    torch.manual_seed(0)
    figures: dict[str, dict[str, list[float]]] = {}
    print("| model | kernel | changed by a quarter turn | left by the best types | of random weights |")
    print("|---|---|---|---|---|")
    for model, normalised in MODELS.items():
        kernels = {
            name: weight.detach().double()
            for name, weight in opened(model, normalised).named_parameters()
            if weight.ndim == 4 and weight.shape[-1] > 1 and max(weight.shape) <= WIDEST
        }
        for number, (name, kernel) in enumerate(kernels.items()):
            changed, left = turned_and_left(kernel, number > 0)
            _, random = turned_and_left(torch.randn_like(kernel), number > 0)
            figures.setdefault(model, {})[name] = [round(value, 4) for value in (changed, left, random)]
            print(f"| {model} | {name} | {changed:.2f} | {left:.2f} | {random:.2f} |", flush=True)
    if path:
        path.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
