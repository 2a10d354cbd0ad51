"""How is each sample of a batch moved by its own group element? By elements drawn once and called by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from softequiv.actions.base import Acts
from softequiv.errors import GroupError, SoftEquivError, check_seed
from softequiv.groups import Element, Group
from softequiv.groups.angles import range_of
from softequiv.groups.base import elements_within
from softequiv.groups.parse import as_group


class Moves:
    """A pool of group elements, by which the samples of a batch are moved, each by its own, in one call.

    A finite group with at most `count` elements in range is listed whole, the identity first. Elsewhere `count`
    elements are drawn by `Group.random` from the seed and stand for the range: over all of SO(2), 4096 of them lie
    360 / 4096 = 0.09 degrees apart on average and nowhere 1 degree; in SO(3), the nearest is some 9 degrees away.

    Args:
        acts: how an element moves one sample, such as `Pictures()`.
        within: elements of at most this path length or angle, such as `degrees(30)` or "30deg"; without it of any.
        elements: the pool itself, instead of a drawn one.

    >>> from softequiv import C
    >>> from softequiv.actions import Pictures
    >>> moves, x = Moves(Pictures(), C(4)), torch.arange(8.0).reshape(2, 2, 2)
    >>> moves(x, torch.tensor([0, 1])).tolist()
    [[[0.0, 1.0], [2.0, 3.0]], [[5.0, 7.0], [4.0, 6.0]]]
    """

    def __init__(
        self,
        acts: Acts,
        group: Group | str,
        within: float | str | None = None,
        *,
        count: int = 4096,
        seed: int = 0,
        elements: Sequence[Element] | None = None,
    ) -> None:
        group = as_group(group)
        self.acts, self.group = acts, group
        self.elements = _pool(group, range_of(within), count, seed) if elements is None else tuple(elements)
        if not self.elements:
            raise SoftEquivError("there is no element to move by; give at least one, such as group.identity")
        strangers = {str(g.group) for g in self.elements if g.group != group}
        if strangers:
            raise GroupError(f"elements of {', '.join(sorted(strangers))} do not belong to {group}; take them from it")

    def __len__(self) -> int:
        return len(self.elements)

    def __repr__(self) -> str:
        return f"Moves({self.acts}, {self.group}, {len(self)} elements)"

    @cached_property
    def _stack(self) -> Tensor | None:
        return self.acts.stacked(self.elements)

    def draw(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Numbers of elements drawn uniformly from the pool where the generator is, (samples,) int64 on the CPU."""
        device = "cpu" if generator is None else generator.device
        return torch.randint(len(self), (samples,), generator=generator, device=device).cpu()

    def cycle(self, start: int, samples: int) -> Tensor:
        """start, start + 1, ... modulo the size of the pool, (samples,): the same for every model evaluated."""
        return torch.arange(start, start + samples) % len(self)

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Sample i becomes g_{chosen[i]} x_i: x is (N, ...), `chosen` (N,) whole numbers, best on the CPU."""
        numbers = self._numbers(x, chosen)
        if not len(x):
            return x
        if self._stack is not None:
            return self.acts.each(x, self.group, self._stack[numbers])
        return torch.stack([self.acts(sample, self.elements[i]) for sample, i in zip(x, numbers.tolist(), strict=True)])

    def inverse(self) -> Moves:
        """The same numbers with the inverse elements: `moves.inverse()(moves(x, chosen), chosen)` is x again."""
        return Moves(self.acts, self.group, elements=[g.inverse for g in self.elements])

    def on(self, acts: Acts) -> Moves:
        """The same elements acting otherwise, as on labels or forecasts."""
        return Moves(acts, self.group, elements=self.elements)

    def valid(self, x: Tensor, chosen: Tensor) -> Tensor | None:
        """Which entries of the moved samples are real, (N, H, W) bool for pictures; None where all are."""
        numbers = self._numbers(x, chosen)
        if not len(x):
            return None
        if self._stack is not None:
            return self.acts.valid_each(x, self.group, self._stack[numbers])
        masks = [self.acts.valid(sample, self.elements[i]) for sample, i in zip(x, numbers.tolist(), strict=True)]
        real = next((mask for mask in masks if mask is not None), None)
        if real is None:
            return None
        return torch.stack([torch.ones_like(real) if mask is None else mask for mask in masks])

    def _numbers(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The numbers on the CPU, where it is decided how each sample moves."""
        if chosen.shape != x.shape[:1] or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise SoftEquivError(
                f"each of {len(x)} samples needs the number of its element, ({len(x)},) whole numbers; got "
                f"{tuple(chosen.shape)} of {chosen.dtype}: use draw({len(x)}) or cycle(0, {len(x)})"
            )
        numbers = chosen.cpu()
        if len(x) and not (int(numbers.min()) >= 0 and int(numbers.max()) < len(self)):
            raise SoftEquivError(
                f"elements are numbered 0 to {len(self) - 1}; got {int(numbers.min())} to {int(numbers.max())}"
            )
        return numbers


def _pool(group: Group, within: float | None, count: int, seed: int) -> tuple[Element, ...]:
    """All elements in range of a small finite group, else `count` drawn ones."""
    if not isinstance(count, int) or count < 1:
        raise SoftEquivError(f"a pool needs at least one element; got count={count}")
    check_seed(seed)
    if group.order <= count:
        return elements_within(group, math.inf if within is None else within)
    generator = torch.Generator().manual_seed(seed)
    return tuple(group.random(generator, within) for _ in range(count))
