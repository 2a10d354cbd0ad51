"""What every action on data answers: where it takes x, which entries are real, and on what it is defined.

The precision in which actions compute is decided here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from softequiv.errors import SoftEquivError
from softequiv.groups import Element, Group


class Acts(ABC):
    """An action of group elements on tensors: (g h) x = g (h x). Subclasses are frozen dataclasses.

    Actions that resample, such as a picture turned by 30 degrees, satisfy this up to interpolation only, and say so in
    `exact`.
    """

    @abstractmethod
    def check(self, group: Group, x: Tensor) -> None:
        """Raise a sentence where the group does not act on such data; its elements are checked too as they act."""

    @abstractmethod
    def __call__(self, x: Tensor, g: Element) -> Tensor:
        """The moved data g x, of the shape, dtype and device of x."""

    def by(self, g: Element) -> Callable[[Tensor], Tensor]:
        """x -> g x with g read ahead, for compilers and exporters, which cannot follow an element."""
        return partial(self, g=g)

    def exact(self, group: Group) -> bool:
        """Whether (g h) x = g (h x) to rounding for all elements of a group, as where nothing is resampled."""
        return True

    def valid(self, x: Tensor, g: Element) -> Tensor | None:
        """Which entries of g x were made from entries of x alone: bool, broadcastable to x; None where all were."""
        self.check(moving_group(g), x)
        return None

    def stacked(self, elements: Sequence[Element]) -> Tensor | None:
        """What `each` needs to know of elements, (len(elements), ...) on the CPU; None where it knows no such form."""
        return None

    def each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor:
        """Sample i moved by element i, all in one call: x is (N, ...), `stack` the N elements as `stacked` has them."""
        raise SoftEquivError(f"{type(self).__name__} defines stacked without each; define both, or neither")

    def valid_each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor | None:
        """`valid` sample by sample: bool, (N, ...) and broadcastable to x; None where all entries are real."""
        self.check(group, x)
        return None


def moving_group(g: Element) -> Group:
    """The group of what moves data, or a sentence."""
    if not isinstance(g, Element):
        raise SoftEquivError(f"data are moved by an element of a group, such as SO(2).element(0.5); got {g!r}")
    return g.group


@dataclass(frozen=True)
class Still(Acts):
    """What the group leaves alone, such as class scores: g x = x.

    >>> from softequiv import SO
    >>> Still()(torch.ones(2), SO(2).element(1.0))
    tensor([1., 1.])
    """

    def check(self, group: Group, x: Tensor) -> None:
        """Everything can be left alone."""

    def __call__(self, x: Tensor, g: Element) -> Tensor:
        return x

    def stacked(self, elements: Sequence[Element]) -> Tensor:
        return torch.zeros(len(elements), 0)

    def each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor:
        return x


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 for itself and for whole numbers, which it holds exactly; else float32."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else torch.float64
