"""How do a transformer's tokens move? As the picture of patches that they were cut from; extra tokens stand still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from softequiv.actions.base import Acts, moving_group
from softequiv.actions.pictures import Interpolation, Padding, Pictures
from softequiv.errors import RepresentationError, SoftEquivError
from softequiv.groups import Element, Group


@dataclass(frozen=True)
class Tokens(Acts):
    """Tokens (..., extra + height * width, D), row by row behind `extra` ones (class, registers) that stand still.

    >>> from softequiv import C
    >>> tokens = torch.arange(5.0).reshape(1, 5, 1)
    >>> Tokens(2, 2, extra=1)(tokens, C(4).element(1)).flatten()
    tensor([0., 2., 4., 1., 3.])
    """

    height: int
    width: int
    extra: int = 0
    interpolation: Interpolation = "bicubic"
    padding: Padding = "zeros"

    def __post_init__(self) -> None:
        counts = (self.height, self.width, self.extra)
        if not all(isinstance(count, int) for count in counts) or min(counts[:2]) < 2 or self.extra < 0:
            raise SoftEquivError(
                f"tokens are a grid of at least 2 x 2 patches behind 0 or more extra ones, in whole numbers; got "
                f"{self.height!r} x {self.width!r} behind {self.extra!r}"
            )

    @property
    def _pictures(self) -> Pictures:
        return Pictures(self.interpolation, self.padding)

    def _picture(self, x: Tensor) -> Tensor:
        """The patch tokens as pictures, (..., D, height, width)."""
        return x[..., self.extra :, :].mT.unflatten(-1, (self.height, self.width))

    def check(self, group: Group, x: Tensor) -> None:
        count = self.extra + self.height * self.width
        if x.ndim < 2 or x.shape[-2] != count:
            raise RepresentationError(
                f"{self.extra} extra tokens and {self.height} x {self.width} patches are (..., {count}, D); "
                f"got a tensor of {tuple(x.shape)}"
            )
        self._pictures.check(group, self._picture(x))

    def exact(self, group: Group) -> bool:
        return self._pictures.exact(group)

    def __call__(self, x: Tensor, g: Element) -> Tensor:
        self.check(moving_group(g), x)
        return self._behind_extra(x, self._pictures(self._picture(x), g))

    def valid(self, x: Tensor, g: Element) -> Tensor | None:
        """(extra + height * width, 1) bool, as for the picture; extra tokens are valid."""
        self.check(moving_group(g), x)
        return self._as_tokens(self._pictures.valid(self._picture(x), g))

    def stacked(self, elements: Sequence[Element]) -> Tensor:
        return self._pictures.stacked(elements)

    def each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor:
        self.check(group, x[0])
        return self._behind_extra(x, self._pictures.each(self._picture(x), group, stack))

    def valid_each(self, x: Tensor, group: Group, stack: Tensor) -> Tensor | None:
        """(N, extra + height * width, 1) bool."""
        self.check(group, x[0])
        return self._as_tokens(self._pictures.valid_each(self._picture(x), group, stack))

    def _behind_extra(self, x: Tensor, picture: Tensor) -> Tensor:
        return torch.cat([x[..., : self.extra, :], picture.flatten(-2).mT], -2)

    def _as_tokens(self, inside: Tensor | None) -> Tensor | None:
        """A mask of pictures (..., height, width) as one of tokens, (..., extra + height * width, 1)."""
        if inside is None:
            return None
        extra = inside.new_ones(*inside.shape[:-2], self.extra)
        return torch.cat([extra, inside.flatten(-2)], -1)[..., None]
