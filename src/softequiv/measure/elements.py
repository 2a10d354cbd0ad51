"""Which group elements is a model tried on? Those that the user gives, or some drawn from the range."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from softequiv.errors import GroupError
from softequiv.groups import Element, Group

Elements = int | Sequence[Element]


def drawn(group: Group, within: float | None, elements: Elements, generator: torch.Generator) -> list[Element]:
    """The elements for one batch: as given, or so many drawn from the range, the identity among them.

    >>> from softequiv import C
    >>> len(drawn(C(4), None, 3, torch.Generator()))
    3
    """
    if isinstance(elements, int):
        if elements < 1:
            raise GroupError(f"at least one element must be drawn for every batch; got elements={elements}")
        return [group.random(generator, within) for _ in range(elements)]
    if not elements or any(g.group != group for g in elements):
        raise GroupError(f"elements must be a number, or elements of {group}; got {[str(g) for g in elements]}")
    return list(elements)


def drawn_moves(group: Group, within: float | None, elements: Elements, generator: torch.Generator) -> list[Element]:
    """The same without the identity, which moves nothing and is drawn again."""
    if group.order == 1:
        raise GroupError(f"{group} moves nothing: it has no element but the identity")
    found = drawn(group, within, elements, generator)
    return [g if g.length > 0 else drawn_moves(group, within, 1, generator)[0] for g in found]
