"""Which examples teach, which choose the model, and which are few? Numbers drawn by seed, the same on every machine."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from softequiv.errors import SoftEquivError
from softequiv.tasks.base import Examples

LARGEST_SEED = 2**62  # as in a recipe of training


def held_out(
    count: int, fraction: float, seed: int = 0, remedy: str = "give more, or choose another fraction"
) -> tuple[Tensor, Tensor]:
    """Numbers 0..count-1 as (kept, held out), both ascending, round(fraction * count) of them held out; `remedy` is
    what to do where one of the two would be empty.

    >>> [len(part) for part in held_out(10, 0.2)]
    [8, 2]
    """
    apart = round(_fraction(fraction) * count)
    if not 0 < apart < count:
        raise SoftEquivError(
            f"holding out {fraction:g} of {count} examples leaves {count - apart} and {apart}, and neither may be "
            f"empty; {remedy}"
        )
    order = torch.randperm(count, generator=_seeded(seed))
    return order[apart:].sort().values, order[:apart].sort().values


def of_each_class(labels: Tensor, fraction: float, seed: int = 0) -> Tensor:
    """Numbers of ceil(fraction * count) examples of each class, drawn at random, ascending; labels (N,).

    >>> of_each_class(torch.tensor([0, 0, 0, 1, 1, 1]), 1 / 3).shape
    torch.Size([2])
    """
    _fraction(fraction)
    generator = _seeded(seed)
    chosen = []
    for label in labels.unique():
        numbers = (labels == label).nonzero()[:, 0]
        some = math.ceil(fraction * len(numbers) - 1e-9)  # 0.1 * 30 is 3, whatever rounding says
        chosen.append(numbers[torch.randperm(len(numbers), generator=generator)[:some]])
    return torch.cat(chosen).sort().values


def few(examples: Examples, fraction: float, seed: int = 0) -> Examples:
    """A fraction of the labels, alike in every class and at least one of each: few(train, 0.01)."""
    return examples.part(of_each_class(examples.labels(), fraction, seed))


def _fraction(value: float) -> float:
    if not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise SoftEquivError(f"a fraction of the examples lies in (0, 1]; got {value!r}")
    return value


def check_split_seed(seed: int) -> None:
    """Raise a sentence unless examples can be drawn from it.

    >>> check_split_seed(0)
    """
    if type(seed) is not int or not 0 <= seed < LARGEST_SEED:
        raise SoftEquivError(f"a seed is a whole number from 0, below 2^62; got {seed!r}")


def _seeded(seed: int) -> torch.Generator:
    check_split_seed(seed)
    return torch.Generator().manual_seed(seed)
