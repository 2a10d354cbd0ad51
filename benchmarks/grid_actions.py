"""Which rotation of pixels is closest to a true one, and which keeps most of a picture at a given error?

Compares the actions of ``softequiv.reps.pixels`` on patches of photographs that were rotated with a bicubic filter and
their real surroundings, and prints Markdown tables: ``python benchmarks/grid_actions.py [--json PATH]``.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from softequiv.experiments.base import data_root
from softequiv.reps import pixels

SIZES = (3, 5, 7, 14, 16, 32)
ANGLES = (10, 30)
RANKS = (0.05, 0.10, 0.20, 0.40)
ENERGIES = (0.80, 0.85, 0.90, 0.95)
PHOTOGRAPHS = 300
PATCHES_PER_PHOTOGRAPH = 8


@dataclass(frozen=True)
class Action:
    """A basis (k^2, k^2) with the level of each column, and the rotation that it stands for."""

    basis: Tensor
    levels: Tensor
    rotation: Callable[[float], Tensor]


def photographs() -> list[np.ndarray]:
    """Greyscale photographs with values in [0, 1]: two samples of scikit-learn and, where present, ImageNet's."""
    found = sorted((data_root() / "imagenet-val-2k" / "images").glob("*"))
    pictures = [Image.fromarray(picture) for picture in load_sample_images().images]
    pictures += [Image.open(path) for path in found[:PHOTOGRAPHS]]
    return [np.asarray(picture.convert("L"), dtype=np.float32) / 255 for picture in pictures]


def patches(photos: list[np.ndarray], size: int, seed: int = 0) -> list[Tensor]:
    """Upright patches, then the same ones at each of ANGLES: (patches, size^2) each, the grand mean removed."""
    rng = np.random.default_rng(seed)
    margin = size // 2 + 3  # more than half the diagonal, and room for the filter
    outer = size + 2 * margin
    views: list[list[np.ndarray]] = [[] for _ in (0, *ANGLES)]
    for photo in photos:
        if min(photo.shape) < outer:
            continue
        for _ in range(PATCHES_PER_PHOTOGRAPH):
            row, column = (rng.integers(0, length - outer + 1) for length in photo.shape)
            crop = Image.fromarray(np.ascontiguousarray(photo[row : row + outer, column : column + outer]))
            for view, angle in zip(views, (0, *ANGLES), strict=True):
                turned = np.asarray(crop.rotate(angle, Image.Resampling.BICUBIC))
                view.append(turned[margin:-margin, margin:-margin].ravel())
    stacks = [torch.from_numpy(np.stack(view)).double() for view in views]
    return [stack - stacks[0].mean() for stack in stacks]


def resampled(size: int, degrees: float) -> Action:
    """The paper's: B rho = B wants left singular vectors of rho(angle) - I."""
    difference = pixels.bilinear_rotation(size, math.radians(degrees)) - torch.eye(size**2, dtype=torch.float64)
    left, sigma, _ = torch.linalg.svd(difference)
    return Action(left, sigma, lambda angle: pixels.bilinear_rotation(size, angle))


def generated(generator: Tensor) -> Action:
    """exp(angle A) for a skew A, levels |omega|."""
    sigma2, basis = torch.linalg.eigh(generator.T @ generator)
    return Action(basis, sigma2.clamp(min=0).sqrt(), lambda angle: torch.matrix_exp(angle * generator))


def rounded(harmonics: pixels.Harmonics) -> Action:
    """Integer levels, the leftover at 2."""
    basis = torch.cat([harmonics.zero, harmonics.cosine, harmonics.sine], dim=1)
    still = torch.zeros_like(harmonics.zero_parity)
    if harmonics.leftover is not None:
        still[harmonics.leftover] = 2
    half = (harmonics.sine * harmonics.frequency) @ harmonics.cosine.T
    levels = torch.cat([still, harmonics.frequency, harmonics.frequency])
    return Action(basis, levels, lambda angle: torch.matrix_exp(angle * (half - half.T)))


def rounded_generator(size: int, generator: Tensor) -> Action:
    """What ``exact`` would be with another generator underneath."""
    return rounded(pixels._rounded(size, lambda left, right: pixels._between(left, generator, right)))


def actions(size: int) -> dict[str, Action]:
    """Every action under comparison, the default last."""
    return {
        "bilinear difference, 20 deg (paper)": resampled(size, 20),
        "bilinear difference, 1 deg": resampled(size, 1),
        "central": generated(pixels.central_generator(size)),
        "central, rounded": rounded_generator(size, pixels.central_generator(size)),
        "su(2)": generated(pixels.su2_generator(size)),
        "su(2), rounded": rounded_generator(size, pixels.su2_generator(size)),
        "picture": generated(pixels.picture_generator(size)),
        "picture, rounded (exact)": rounded(pixels.harmonics(size)),
    }


def gains(levels: Tensor, rank: float) -> Tensor:
    """Level 0 whole, then level after level; the one on which the count falls is scaled by the fraction left."""
    _, cluster, counts = torch.unique((levels / 1e-5).round(), return_inverse=True, return_counts=True)
    before = counts.cumsum(0) - counts
    fraction: Tensor = ((rank * len(levels) - before) / counts.double()).clamp(0, 1)
    if levels.min() < 1e-5:
        fraction[0] = 1
    return fraction[cluster]


@dataclass(frozen=True)
class Dial:
    """What an action keeps and how far it moves when its rank is turned up."""

    levels: Tensor
    kept: Tensor
    moved: Tensor

    @classmethod
    def of(cls, action: Action, upright: Tensor, turned: Tensor) -> "Dial":
        before, after = upright @ action.basis, turned @ action.basis
        return cls(action.levels, before.square().sum(0) / upright.square().sum(), (after - before).square().sum(0))

    def energy(self, rank: float) -> float:
        """|B x|^2 / |x|^2 over all patches."""
        return float(gains(self.levels, rank).square() @ self.kept)

    def error(self, rank: float, total: float) -> float:
        """|B x_rot - B x| / |B x| over all patches."""
        weight = gains(self.levels, rank).square()
        return float((weight @ self.moved / (weight @ self.kept * total)).sqrt())

    def rank_for(self, energy: float) -> float:
        """The least rank that keeps this energy, by bisection; 0 where level 0 alone keeps more."""
        low, high = 0.0, 1.0
        if self.energy(low) > energy:
            return 0.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.energy(middle) >= energy else (middle, high)
        return high


def measure(size: int, photos: list[np.ndarray]) -> dict[str, dict[str, list[float | None]]]:
    """For every action: closeness to the true rotation, error and energy at RANKS, error at ENERGIES."""
    upright, *turned = patches(photos, size)
    total = float(upright.square().sum())
    results: dict[str, dict[str, list[float | None]]] = {}
    for name, action in actions(size).items():
        dial = Dial.of(action, upright, turned[-1])
        ranks = [dial.rank_for(energy) for energy in ENERGIES]
        results[name] = {
            "closeness": [
                float((upright @ action.rotation(math.radians(angle)).T - view).norm() / view.norm())
                for angle, view in zip(ANGLES, turned, strict=True)
            ],
            "error": [dial.error(rank, total) for rank in RANKS],
            "energy": [dial.energy(rank) for rank in RANKS],
            "error_at_energy": [dial.error(rank, total) if rank else None for rank in ranks],
        }
    return results


def table(size: int, results: dict[str, dict[str, list[float | None]]]) -> str:
    """One Markdown table for one size."""
    columns = [f"{angle} deg" for angle in ANGLES] + [f"rank {rank:.0%}" for rank in RANKS]
    columns += [f"energy {energy:.0%}" for energy in ENERGIES]
    lines = [f"| {size} x {size} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in results.items():
        cells = [f"{value:.3f}" for value in row["closeness"]]
        cells += [f"{error:.3f} ({energy:.2f})" for error, energy in zip(row["error"], row["energy"], strict=True)]
        cells += ["-" if value is None else f"{value:.3f}" for value in row["error_at_energy"]]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    path = parser.parse_args().json
    photos = photographs()
    results = {}
    for size in SIZES:
        results[size] = measure(size, photos)
        print(table(size, results[size]), end="\n\n", flush=True)
    if path is not None:
        path.write_text(json.dumps({"photographs": len(photos), "sizes": results}, indent=1))


if __name__ == "__main__":
    main()
