"""How are many weights filtered at once? Small ones that share a linear filter as one long tensor, and the equations of
all cones together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softequiv.gains import Cone
from softequiv.gains.cone import nearest
from softequiv.nn.soft import PLAIN, Soft, through, times_matrix
from softequiv.spectrum import Filter
from softequiv.spectrum.base import traced_or_transformed
from softequiv.spectrum.transforms import tf32_allowed

LARGE = 2**19  # entries: about here a GPU takes as long to copy a weight as to be sent one more product


@dataclass(frozen=True)
class Sharing:
    """One linear filter, and the numbers of the weights that share it: one, or all small ones with a plain layout."""

    apply: Filter
    soft: Soft
    members: list[int]
    matrix: Tensor | None  # the whole filter, where it is a single product


def sharing(filters: Iterable[tuple[Filter, Soft, int, torch.dtype, torch.device]]) -> list[Sharing]:
    """Which of some weights, of so many entries, have one filter, dtype and device in common."""
    found: dict[tuple[object, ...], Sharing] = {}
    for number, (apply, soft, entries, dtype, device) in enumerate(filters):
        plain = soft.layout == PLAIN
        key = (soft.rep, soft.gain, dtype, device) if plain and entries < LARGE else (number,)
        factor = apply.factor if plain and apply.gamma.dtype == dtype else None
        matrix = factor if factor is not None and factor.ndim == 2 else None
        found.setdefault(key, Sharing(apply, soft, [], matrix)).members.append(number)
    return list(found.values())


def through_linear(weights: Sequence[Tensor | None], filters: Iterable[Sharing]) -> list[Any]:
    """Each stored tensor that is not None through its filter; those that share one are joined into one long tensor."""
    done: list[Any] = [None] * len(weights)
    transformed = traced_or_transformed()
    for shared in filters:
        members = [number for number in shared.members if weights[number] is not None]
        own: list[Any] = [weights[number] for number in members]
        if not own:
            continue
        apart = transformed or torch._C._functorch.is_legacy_batchedtensor(own[0])  # torch cannot flatten these
        if apart or shared.soft.layout != PLAIN:
            for number, part in zip(members, own, strict=True):
                done[number] = through(shared.apply, shared.soft, part)
            continue
        flat: Tensor = torch._C._nn.flatten_dense_tensors(own)  # as DDP does: one call from Python for all of them
        if shared.matrix is None or tf32_allowed(flat):
            flat = through(shared.apply, shared.soft, flat.view(-1, *shared.soft.rep.shape))
        else:
            flat = times_matrix(flat, shared.matrix)
        for number, part in zip(members, torch._C._nn.unflatten_dense_tensors(flat.reshape(-1), own), strict=True):
            done[number] = part
    return done


def nearest_in_cones(members: Iterable[tuple[Cone, Tensor, Soft]]) -> list[Tensor]:
    """The nearest tensor to each that lies in its cone; all of them on one device."""
    members = list(members)
    with torch.autocast(members[0][1].device.type, enabled=False):
        found = nearest([(cone, soft.layout.read(tensor, soft.rep)) for cone, tensor, soft in members])
        return [
            soft.layout.write(tensor, view, soft.rep) for (_, tensor, soft), view in zip(members, found, strict=True)
        ]
