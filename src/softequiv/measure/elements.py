"""Which group elements is a model tried on? Those that the user gives, or some drawn from the range."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from softequiv.errors import GroupError
from softequiv.groups import Element, Group
from softequiv.groups.angles import range_of

Elements = int | Sequence[Element]


def as_range(group: Group, within: float | str | None) -> float | None:
    """A range of the group, also from its text, such as "30deg"; None is all of the group.

    >>> from softequiv import SO
    >>> as_range(SO(2), "30deg")
    30deg
    """
    reach = range_of(within)
    if reach is not None:
        group.reach(reach)
    return reach


def check_elements(group: Group, within: float | None, elements: Elements) -> None:
    """Raise a sentence unless elements are a positive number, or elements of the group in the range."""
    if isinstance(elements, int) and not isinstance(elements, bool):
        if elements < 1:
            raise GroupError(f"at least one element must be drawn; got elements={elements}")
        return
    if not isinstance(elements, Sequence) or not elements or not all(isinstance(g, Element) for g in elements):
        raise GroupError(f"elements must be a whole number, or a list of elements of {group}; got {elements!r}")
    for g in elements:
        if g.group != group:
            raise GroupError(f"elements must be a number, or elements of {group}; got {g} of {g.group}")
        if within is not None and not group.holds(g, within):
            raise GroupError(f"the element {g} lies outside the range {within!r}; widen the range or leave it out")


def drawn(group: Group, within: float | None, elements: Elements, generator: torch.Generator) -> list[Element]:
    """The elements as given, or so many drawn from the range, the identity among them.

    >>> from softequiv import C
    >>> len(drawn(C(4), None, 3, torch.Generator()))
    3
    """
    check_elements(group, within, elements)
    if not isinstance(elements, int):
        return list(elements)
    return [group.random(generator, within) for _ in range(elements)]


def drawn_moves(group: Group, within: float | None, elements: Elements, generator: torch.Generator) -> list[Element]:
    """The same without the identity, which moves nothing: drawn ones are drawn again, a given one is refused."""
    if group.order == 1:
        raise GroupError(f"{group} moves nothing: it has no element but the identity")
    found = drawn(group, within, elements, generator)
    if not isinstance(elements, int) and any(g.length == 0 for g in found):
        raise GroupError("the identity moves nothing, so no error comes of it; leave it out of elements=")
    return [g if g.length > 0 else drawn_moves(group, within, 1, generator)[0] for g in found]
