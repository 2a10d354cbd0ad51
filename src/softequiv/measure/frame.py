"""Which entries of an answer can be compared? Those that a move leaves inside the frame, and some must be left."""

from __future__ import annotations

import torch
from torch import Tensor

from softequiv.actions import Acts, Moves
from softequiv.errors import SoftEquivError
from softequiv.groups import Element


def inside(target: Acts, y: Tensor, *moves: Element) -> Tensor | None:
    """Which entries of y are valid under every one of the moves: bool, broadcastable to y; None where all are.

    >>> from softequiv import C
    >>> from softequiv.actions import Pictures
    >>> inside(Pictures(), torch.ones(4, 4), C(4).element(1)) is None
    True
    """
    found: Tensor | None = None
    for g in moves:
        valid = target.valid(y, g)
        found = valid if found is None else found if valid is None else found & valid
    if found is not None and not found.any():
        raise nothing_inside(y, moves[0])
    return found


def inside_each(moves: Moves, y: Tensor, chosen: Tensor) -> Tensor | None:
    """The same for samples y (N, ...) with a move each: which entries of y_i are valid under element chosen[i]."""
    found = moves.valid(y, chosen)
    if found is None:
        return None
    some = found.flatten(1).any(1)
    if not some.all():
        raise nothing_inside(y, moves.elements[int(chosen[int(some.int().argmin())])])
    return found.reshape(len(found), *[1] * (y.ndim - found.ndim), *found.shape[1:])


def nothing_inside(y: Tensor, g: Element) -> SoftEquivError:
    """What to say of an element that moves everything out of the frame."""
    return SoftEquivError(
        f"no entry of an answer of shape {tuple(y.shape)} stays inside the frame under {g}; use larger pictures, or a "
        "target with another interpolation"
    )


def norms(y: Tensor, inside: Tensor | None = None) -> Tensor:
    """The norm of every sample, over the entries inside: (N, ...) -> (N,), in at least float32."""
    kept = y if inside is None else y * inside
    return kept.reshape(len(y), -1).to(torch.promote_types(y.dtype, torch.float32)).norm(dim=1)
