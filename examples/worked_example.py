"""What does the dial do to a weight? The paper's 3 x 3 example, then a bank of 7 x 7 kernels from free to equivariant.

    python examples/worked_example.py [--out demo-output]

prints the walk-through and writes dial.png. Everything is random with a fixed seed; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import softequiv as se

SOFTNESS = (0.0, 0.25, 0.5, 0.75, 1.0)
WITHIN = se.degrees(30)
TARGET = 0.1
BLUR = 1.3  # pixels
KERNELS = se.grid(se.SO(2), 7, 7)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A walk-through of softequiv, on the terminal and as a picture.")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder of the picture")
    folder: Path = parser.parse_args(arguments).out
    kernels = smooth_kernels(64, 7)
    three_by_three()
    dial(kernels)
    guarantee_first(kernels)
    folder.mkdir(parents=True, exist_ok=True)
    draw(kernels, folder / "dial.png")
    print(f"\nThe dial as a picture: {folder / 'dial.png'}")


def three_by_three() -> None:
    heading("1. One matrix: rotations about the z axis (the paper's worked example)")
    X = se.vector(se.SO(2)) + se.scalar(se.SO(2))
    rep = X >> X
    levels = se.spectrum(rep)
    theta = torch.tensor([[2.0, 3, 1], [-1, 4, 2], [3, -1, 5]])
    print("A weight W maps (x, y, z) to (x, y, z). Rotation moves its nine directions at these rates:")
    for level, count in zip(levels.levels.tolist(), levels.counts.tolist(), strict=True):
        print(f"    level {level:g}: {count} directions" + ("  (exactly equivariant)" if level == 0 else ""))
    W = se.hard(1.5)(theta, rep)
    print("Keep what is below b = 1.5:\n")
    for before, after in zip(theta.tolist(), W.tolist(), strict=True):
        print("    " + row(before) + "   ->   " + row(after))


def row(entries: list[float]) -> str:
    return " ".join(f"{round(entry, 6):3g}" for entry in entries)


def dial(kernels: Tensor) -> None:
    heading("2. The dial: 64 kernels of 7 x 7, softness from 0 (equivariant) to 1 (free)")
    levels = se.spectrum(KERNELS)
    print("Relative change of the kernels under rotations of up to 30 degrees:\n")
    print("    softness   directions   certified   measured   distortion")
    for s in SOFTNESS:
        gain = se.softness(s)
        W = gain(kernels, KERNELS)
        kept = gain.kept(levels)
        print(
            f"    {s:8.2f}   {kept.directions:4.1f} of {kept.total}   {certified(W):9.3f}"
            f"   {measured(W):8.3f}   {distortion(W, kernels):10.3f}"
        )
    print("\nThe certificate is computed from the weight alone; the measurement turns the kernels to 61 angles.")


def guarantee_first(kernels: Tensor) -> None:
    heading(f"3. Guarantee first: at most {TARGET:.0%} change within 30 degrees, else as little distortion as possible")
    compare_gains(kernels, TARGET)
    print("\nHard can only drop whole levels. At the certificate that hard reaches with levels 0 and 1:\n")
    compare_gains(kernels, certified(se.hard(1.5)(kernels, KERNELS)))


def compare_gains(kernels: Tensor, target: float) -> None:
    cutoffs = (se.spectrum(KERNELS).levels + 0.5).tolist()
    hard = [se.hard(b)(kernels, KERNELS) for b in cutoffs]
    contestants = {
        "least distortion": se.least_distortion(target, WITHIN)(kernels, KERNELS),
        "smooth": tuned(lambda s: se.smooth(0.5, s)(kernels, KERNELS), target, 0.01, 20.0),
        "softness": tuned(lambda s: se.softness(s)(kernels, KERNELS), target, 0.0, 1.0),
        "hard": [W for W in hard if certified(W) <= target][-1],
    }
    print("    gain               certified   measured   distortion")
    for name, W in contestants.items():
        print(f"    {name:16s}   {certified(W):9.3f}   {measured(W):8.3f}   {distortion(W, kernels):10.3f}")


def tuned(filtered: Callable[[float], Tensor], target: float, low: float, high: float) -> Tensor:
    """The weight whose certificate meets the target, by bisection on a dial that loosens from low to high."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if certified(filtered(middle)) <= target else (low, middle)
    return filtered(low)


def certified(W: Tensor) -> float:
    return se.spectrum(KERNELS).error(W, WITHIN)


def measured(W: Tensor) -> float:
    """The worst relative change over a sweep of angles within the range."""
    flat = W.flatten(1)
    return max(float((flat @ turn.T - flat).norm() / flat.norm()) for turn in turns())


@cache
def turns() -> list[Tensor]:
    angles = torch.linspace(-float(WITHIN), float(WITHIN), 61, dtype=torch.float64).tolist()
    return [KERNELS.rho(se.SO(2).element(angle)) for angle in angles]


def distortion(W: Tensor, theta: Tensor) -> float:
    return float((W - theta).norm() / theta.norm())


def smooth_kernels(count: int, size: int) -> Tensor:
    """Blurred noise, the middle cut out, unit norm each."""
    noise = torch.randn(count, 1, 3 * size, 3 * size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bell = torch.exp(-(torch.arange(-size, size + 1, dtype=torch.float64) ** 2) / (2 * BLUR**2))
    kernels = torch.conv2d(noise, torch.outer(bell, bell)[None, None])[:, 0, :size, :size]
    return kernels / kernels.flatten(1).norm(dim=1)[:, None, None]


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def draw(kernels: Tensor, path: Path) -> None:
    """Three kernels at each softness, and below them the energy of the whole bank at each level."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    levels = se.spectrum(KERNELS)
    free = levels.energies(kernels)
    chosen = kernels[[0, 5, 12]]
    figure, axes = plt.subplots(
        len(chosen) + 1, len(SOFTNESS), figsize=(11, 8.6), constrained_layout=True, height_ratios=[1, 1, 1, 0.9]
    )
    for column, s in enumerate(SOFTNESS):
        bank = se.softness(s)(kernels, KERNELS)
        for axis, kernel, original in zip(axes[:-1, column], se.softness(s)(chosen, KERNELS), chosen, strict=True):
            limit = float(original.abs().max())
            axis.imshow(kernel.numpy(), cmap="PuOr", vmin=-limit, vmax=limit)
            axis.set(xticks=[], yticks=[])
        ends = {0.0: "\nexactly equivariant", 1.0: "\nas drawn"}
        axes[0, column].set_title(f"softness {s:g}{ends.get(s, chr(10))}", fontsize=11)
        bars = axes[-1, column]
        bars.bar(levels.levels.tolist(), (free / free.sum()).tolist(), color="#dddddd")
        bars.bar(levels.levels.tolist(), (levels.energies(bank) / free.sum()).tolist(), color="#0072B2")
        bars.set_title(f"certified change {certified(bank):.2f}", fontsize=10)
        bars.set(xlabel="level (cycles per turn)", ylim=(0, float((free / free.sum()).max()) * 1.1))
        bars.set_xticks(levels.levels.tolist())
        bars.spines[["top", "right"]].set_visible(False)
        if column:
            bars.set_yticklabels([])
    axes[-1, 0].set_ylabel("share of energy\n(grey: dropped)")
    figure.suptitle("Three of 64 random kernels under rotation; certified within 30 degrees", fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
