"""How are training pictures varied? Batch by batch on their device, by numbers drawn from the loop's generator.

Each transform is a value: `transform(x, y, generator)` gives the new inputs (N, C, H, W) and targets. Two runs whose
generators are in one state see the same pictures, on any device but for the noise of `Erased`. Moving by elements of a
group is one of them, `baselines.Augmented`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

from softequiv.errors import SoftEquivError, imported
from softequiv.measure.functional import IGNORE_INDEX
from softequiv.tasks.files import Normalised

STRENGTHS = 30  # the largest that RandAugment knows

Transform = Callable[[Tensor, Tensor, Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Chain:
    """One transform after the other."""

    transforms: tuple[Transform, ...]

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        for transform in self.transforms:
            x, y = transform(x, y, generator)
        return x, y


@dataclass(frozen=True)
class Either:
    """For each batch one of two transforms, the first with the given chance, as timm takes mixup or cutmix."""

    first: Transform
    second: Transform
    chance: float = 0.5

    def __post_init__(self) -> None:
        check_chance(self.chance)

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        chosen = self.first if uniform(1, generator).item() < self.chance else self.second
        return chosen(x, y, generator)


@dataclass(frozen=True)
class Flip:
    """Pictures and masks mirrored left to right, each with the given chance."""

    chance: float = 0.5

    def __post_init__(self) -> None:
        check_chance(self.chance)

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        flipped = uniform(len(x), generator).to(x.device) < self.chance

        def mirrored(part: Tensor) -> Tensor:
            return torch.where(flipped.reshape(-1, *[1] * (part.ndim - 1)), part.flip(-1), part)

        return mirrored(x), mirrored(y) if y.ndim == 3 else y


@dataclass(frozen=True)
class Shifted:
    """Random crops of a padded picture: each moves by up to `pad` pixels along both axes, and zeros come in."""

    pad: int = 4

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        (n, _, height, width), choices = x.shape, 2 * self.pad + 1
        places = torch.randint(choices, (2, n, 1), generator=generator, device=generator.device).to(x.device)
        rows = places[0] + torch.arange(height, device=x.device)  # (N, H) of the padded picture
        columns = places[1] + torch.arange(width, device=x.device)
        padded = functional.pad(x, (self.pad,) * 4)
        samples = torch.arange(n, device=x.device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2), y


@dataclass(frozen=True)
class Resized:
    """Random resized crops: a rectangle of `area` of the picture, log(width / height) uniform in `ratio`, read at
    size x size places between pixels.

    Szegedy et al. 2015, "Going deeper with convolutions". A rectangle too wide for the picture is clipped to it.
    """

    size: int
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        height, width = x.shape[-2:]
        chance = uniform((4, len(x)), generator)
        area = width * height * between(*self.area, chance[0])
        shape = between(math.log(self.ratio[0]), math.log(self.ratio[1]), chance[1]).exp()
        extent = torch.stack([(area * shape).sqrt() / width, (area / shape).sqrt() / height]).clamp(max=1)  # (2, N)
        middle = (1 - extent) * (2 * chance[2:] - 1)  # from -1 to 1 across the picture, as grid_sample has it
        return windows(x, middle, extent, self.size, padding="border"), y


@dataclass(frozen=True)
class Scaled:
    """Scale, crop and flip for segmentation: picture and mask are magnified by a factor of `scales`, a window of
    size x size pixels is cut out anywhere, and half of them are mirrored. What lies outside belongs to no class.
    """

    size: int
    scales: tuple[float, float] = (0.5, 2.0)

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        if y.shape != (len(x), *x.shape[-2:]):
            raise SoftEquivError(
                f"pictures {tuple(x.shape)} need masks of their size, (N, H, W); got {tuple(y.shape)}: for labels use "
                "Resized"
            )
        height, width = x.shape[-2:]
        chance = uniform((3, len(x)), generator)
        scale = between(*self.scales, chance[0])
        extent = torch.stack([self.size / (scale * width), self.size / (scale * height)])  # (2, N)
        middle = (1 - extent) * (2 * chance[1:] - 1)
        labels = windows(y[:, None].float() - IGNORE_INDEX, middle, extent, self.size, mode="nearest")  # 0 outside
        picture = windows(x, middle, extent, self.size)
        return Flip()(picture, (labels[:, 0] + IGNORE_INDEX).to(y.dtype), generator)


@dataclass(frozen=True)
class Mixup:
    """x = l x_i + (1 - l) x_j and likewise the targets, l from Beta(alpha, alpha) for the batch, j a permutation.

    Zhang et al. 2018, "mixup: Beyond empirical risk minimization". Targets become probabilities (N, classes).
    """

    classes: int
    alpha: float = 0.8

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        kept, other = beta(self.alpha, generator), permutation(len(x), generator).to(x.device)
        soft = probabilities(y, self.classes)
        return kept * x + (1 - kept) * x[other], kept * soft + (1 - kept) * soft[other]


@dataclass(frozen=True)
class CutMix:
    """A rectangle of a share 1 - l of the pixels comes from another picture, and targets are mixed by the share that
    it really covers; l from Beta(alpha, alpha) for the batch.

    Yun et al. 2019, "CutMix: Regularization strategy to train strong classifiers with localizable features".
    """

    classes: int
    alpha: float = 1.0

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        height, width = x.shape[-2:]
        share, other = beta(self.alpha, generator), permutation(len(x), generator).to(x.device)
        row, column = (uniform(2, generator) * torch.tensor([height, width])).long().tolist()
        half = math.sqrt(1 - share) / 2
        top, bottom = (min(max(row + round(end * half * height), 0), height) for end in (-1, 1))
        left, right = (min(max(column + round(end * half * width), 0), width) for end in (-1, 1))
        mixed = x.clone()
        mixed[..., top:bottom, left:right] = x[other][..., top:bottom, left:right]
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        soft = probabilities(y, self.classes)
        return mixed, kept * soft + (1 - kept) * soft[other]


@dataclass(frozen=True)
class Erased:
    """A rectangle of each picture, with the given chance, is replaced by normal noise for every pixel.

    Zhong et al. 2020, "Random erasing data augmentation". A rectangle too long for the picture is clipped to it.
    """

    chance: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)

    def __post_init__(self) -> None:
        check_chance(self.chance)

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        height, width = x.shape[-2:]
        drawn = uniform((5, len(x)), generator)
        area = height * width * between(*self.area, drawn[0])
        shape = between(math.log(self.ratio[0]), math.log(self.ratio[1]), drawn[1]).exp()
        rows, columns = (area * shape).sqrt().round().clamp(max=height), (area / shape).sqrt().round().clamp(max=width)
        top = (drawn[2] * (height - rows + 1)).floor()
        left = (drawn[3] * (width - columns + 1)).floor()
        bounds = torch.stack([top, top + rows, left, left + columns]).to(x.device)[..., None, None]  # (4, N, 1, 1)
        row = torch.arange(height, device=x.device)[:, None]
        column = torch.arange(width, device=x.device)
        inside = (row >= bounds[0]) & (row < bounds[1]) & (column >= bounds[2]) & (column < bounds[3])
        hit = (drawn[4] < self.chance).to(x.device)[:, None, None]
        seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
        # as many numbers as pixels are drawn where the pictures are
        noise = torch.randn(x.shape, generator=Generator(x.device).manual_seed(seed), dtype=x.dtype, device=x.device)
        return torch.where((inside & hit)[:, None], noise, x), y


@dataclass(frozen=True)
class RandAugment:
    """torchvision's RandAugment, drawn for each picture: `strength` of 30, normally spread, and two operations.

    Cubuk et al. 2020, "RandAugment: Practical automated data augmentation"; the defaults are timm's
    rand-m9-mstd0.5-inc1, up to the set of operations, which is torchvision's. It knows bytes alone, so that pictures
    are taken back to them and `normalised` again.
    """

    normalised: Normalised
    strength: float = 9.0
    spread: float = 0.5
    operations: int = 2

    def __call__(self, x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        transforms = torchvision_transforms()
        seeds = torch.randint(2**31, (len(x),), generator=generator, device=generator.device).tolist()
        spread = self.spread * torch.randn(len(x), generator=generator, device=generator.device).cpu()
        strengths = (self.strength + spread).round().clamp(0, STRENGTHS).int().tolist()
        pictures = []
        for picture, seed, strength in zip(self.normalised.bytes(x), seeds, strengths, strict=True):
            with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
                torch.manual_seed(seed)
                pictures.append(transforms.RandAugment(self.operations, strength)(picture))
        return replace(self.normalised, pad=0)(torch.stack(pictures)), y


def torchvision_transforms() -> Any:
    """torchvision's transforms, or a sentence where it is absent."""
    return imported("torchvision.transforms.v2", "RandAugment needs torchvision", "vision")


def uniform(shape: int | tuple[int, ...], generator: Generator) -> Tensor:
    """Numbers of [0, 1) on the CPU, drawn where the generator is."""
    return torch.rand(shape, generator=generator, device=generator.device).cpu()


def between(low: float, high: float, chance: Tensor) -> Tensor:
    """Numbers of [0, 1) stretched to [low, high)."""
    return low + (high - low) * chance


def permutation(count: int, generator: Generator) -> Tensor:
    """0..count-1 in random order, on the CPU."""
    return torch.randperm(count, generator=generator, device=generator.device).cpu()


def beta(alpha: float, generator: Generator) -> float:
    """A number from Beta(alpha, alpha), whose density goes as (l (1 - l))^(alpha - 1).

    >>> 0 < beta(0.8, torch.Generator().manual_seed(0)) < 1
    True
    """
    if not alpha > 0:
        raise SoftEquivError(f"Beta(alpha, alpha) needs alpha > 0; got {alpha}: leave the transform out instead")
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    return Random(seed).betavariate(alpha, alpha)


def probabilities(y: Tensor, classes: int) -> Tensor:
    """Labels (N,) as one-hot rows (N, classes); probabilities as they are."""
    return y if y.ndim == 2 else functional.one_hot(y, classes).float()


def windows(
    x: Tensor, middle: Tensor, extent: Tensor, size: int, mode: str = "bilinear", padding: str = "zeros"
) -> Tensor:
    """Windows of x (N, C, H, W) read at size x size places; middle and extent are (2, N), right and down, in halves of
    the picture."""
    steps = (2 * torch.arange(size) + 1) / size - 1  # places of the pixels from -1 to 1
    right, down = (m[:, None] + e[:, None] * steps for m, e in zip(middle, extent, strict=True))  # (N, size) each
    places = torch.stack([right[:, None].expand(-1, size, -1), down[:, :, None].expand(-1, -1, size)], -1)
    return functional.grid_sample(x, places.to(x.device, x.dtype), mode=mode, padding_mode=padding, align_corners=False)


def check_chance(chance: float) -> None:
    """Raise a sentence unless it is a probability."""
    if not 0 <= chance <= 1:
        raise SoftEquivError(f"a chance lies in [0, 1]; got {chance!r}")
