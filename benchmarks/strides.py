"""Do shift generators in the Laplacian of strided kernels pay? The strided 3 x 3 kernels of a CIFAR-10 ResNet-56 are
filtered by M = M_rotation, M_shift or their sum at equal kept energy, and tried on real pictures.

M_shift is that of a kernel on an unbounded grid, ||S_x w - w||^2 + ||S_y w - w||^2 with zeros around it: for a white
picture exactly the change of the layer's output under shifts by one pixel. The gain of a direction with eigenvalue m is
1 / (1 + mu (m - m_min)), with mu for the energy. Needs resnet56-cifar10 and cifar10 where SOFTEQUIV_DATA (or
../shared/data) is. Prints a Markdown table: `python benchmarks/strides.py`.
"""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import softequiv as se
from softequiv.actions import Pictures
from softequiv.asking import kl_divergence
from softequiv.experiments.backbones import RESNET56, ResNet56
from softequiv.experiments.base import data_folder

SIDE, BATCH, HALVINGS = 3, 250, 80
ENERGIES = (0.9, 0.7, 0.5)


def rotations() -> Tensor:
    """M of plane rotations on 3 x 3 pixels, (9, 9)."""
    of = se.spectrum(se.grid(se.SO(2), SIDE, SIDE))
    pixels = torch.eye(SIDE**2, dtype=torch.float64).unflatten(1, (SIDE, SIDE))
    return of.scale(pixels, of.levels**2).flatten(1)


def shifts() -> Tensor:
    """M of shifts along both axes, (9, 9)."""
    ones = torch.ones(SIDE - 1, dtype=torch.float64)
    line = 2 * torch.eye(SIDE, dtype=torch.float64) - ones.diag(1) - ones.diag(-1)
    still = torch.eye(SIDE, dtype=torch.float64)
    return torch.kron(line, still) + torch.kron(still, line)


def filtered(weight: Tensor, laplacian: Tensor, energy: float) -> Tensor:
    """The weight (out, in, 3, 3) with this share of its energy left."""
    values, basis = torch.linalg.eigh(laplacian)
    parts = weight.double().flatten(2) @ basis
    energies = parts.square().sum((0, 1))
    low, high = 1e-6, 1e6
    for _ in range(HALVINGS):
        mu = math.sqrt(low * high)
        gain = 1 / (1 + mu * (values - values.min()))
        low, high = (mu, high) if float((gain**2 * energies).sum() / energies.sum()) > energy else (low, mu)
    return ((parts * gain) @ basis.T).reshape(weight.shape).to(weight)


@torch.no_grad()
def figures(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Accuracy, and mean KL[F(x) || F(g x)] for shifts by one pixel and for turns by 15 degrees."""
    wide = functional.pad(x, (1, 1, 1, 1), mode="reflect")
    shifted = (wide[..., 1:-1, 2:], wide[..., 2:, 1:-1])
    turned = [Pictures()(x, se.SO(2).element(math.radians(angle))) for angle in (15, -15)]
    answers = asked(model, x)
    right = float((answers.argmax(1) == y).float().mean())
    far = [
        sum(float(kl_divergence(answers, asked(model, moved), 1).mean()) for moved in moves) / len(moves)
        for moves in (shifted, turned)
    ]
    return right, far[0], far[1]


def asked(model: nn.Module, x: Tensor) -> Tensor:
    """F(x), in batches."""
    return torch.cat([model(part) for part in x.split(BATCH)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=500)
    count: int = parser.parse_args().pictures
    stored = numpy.load(next(Path(data_folder("cifar10")).glob("*.npz")))
    x = torch.tensor(stored["x_test"][:count]).float() / 255
    y = torch.tensor(stored["y_test"][:count]).long()
    model = ResNet56()
    model.load_state_dict(load_file(data_folder("resnet56-cifar10") / RESNET56))
    model = model.float().eval()
    print("| energy | generators | accuracy | KL, one pixel | KL, 15 degrees |\n|---|---|---|---|---|")
    print("| 1 | none | {:.1%} | {:.4f} | {:.3f} |".format(*figures(model, x, y)), flush=True)
    laplacians = {"rotation": rotations(), "shifts": shifts(), "both": rotations() + shifts()}
    for energy in ENERGIES:
        for name, laplacian in laplacians.items():
            own = copy.deepcopy(model)
            for layer in own.modules():
                if isinstance(layer, nn.Conv2d) and layer.stride[0] > 1 and layer.kernel_size == (SIDE, SIDE):
                    layer.weight.data.copy_(filtered(layer.weight.detach(), laplacian, energy))
            line = "| {:g} | {} | {:.1%} | {:.4f} | {:.3f} |"
            print(line.format(energy, name, *figures(own, x, y)), flush=True)


if __name__ == "__main__":
    main()
