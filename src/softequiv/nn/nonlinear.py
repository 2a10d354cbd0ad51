"""Nonlinearities and normalisation that commute with the group, for features whose channels carry representations.

Features have their channels at `dim` (1 for pictures, -1 for vectors), laid out as the type says: term by term, copy
by copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from softequiv.errors import RepresentationError, WeightError
from softequiv.nn.layers import is_scalar
from softequiv.reps import Rep, Trivial, terms_of

SHORTEST = 1e-6  # a copy shorter than this counts as this long where lengths divide, so that gradients stay bounded


def gated(rep: Rep) -> Rep:
    """The type that `Gated(rep)` expects: one more scalar for every copy of a space that is not scalar.

    >>> import softequiv as se
    >>> gated(2 * se.vector(se.SO(3)) + se.scalar(se.SO(3))).dim
    9
    """
    gates = sum(copies for term, copies in terms_of(rep) if not isinstance(term, Trivial))
    return rep + gates * Trivial(rep.group) if gates else rep


def channels_last(x: Tensor, dim: int, channels: int, what: str) -> Tensor:
    """Features with their channels, as many as `what` takes, moved from `dim` to the end."""
    if x.shape[dim] != channels:
        raise WeightError(f"{what} takes {channels} channels at axis {dim}; got {x.shape[dim]} of {tuple(x.shape)}")
    return x.movedim(dim, -1)


class Gated(nn.Module):
    """Scalars go through an activation; every other copy is multiplied by the sigmoid of its own extra scalar.

    Equivariant for any group, orthogonal or not. A gate of 0 halves its copy, and a random one does so on average: put
    CopyNorm between the layers of a deep network, or vectors die out.

    >>> import softequiv as se
    >>> fields = 2 * se.vector(se.SO(3)) + se.scalar(se.SO(3))
    >>> Gated(fields)(torch.randn(4, 9)).shape
    torch.Size([4, 7])
    """

    def __init__(self, rep: Rep, activation: nn.Module | None = None, dim: int = -1) -> None:
        super().__init__()
        self.rep, self.dim, self.channels = rep, dim, gated(rep).dim
        self.activation = activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x, self.dim, self.channels, f"Gated({self.rep})")
        features, gates = x[..., : self.rep.dim], x[..., self.rep.dim :].sigmoid()
        out, place, gate = [], 0, 0
        for term, copies in terms_of(self.rep):
            part = features[..., place : place + term.dim * copies]
            if isinstance(term, Trivial):
                out.append(self.activation(part))
            else:
                split = part.unflatten(-1, (copies, term.dim)) * gates[..., gate : gate + copies, None]
                out.append(split.flatten(-2))
                gate += copies
            place += term.dim * copies
        return torch.cat(out, -1).movedim(-1, self.dim)


def copy_index(rep: Rep) -> Tensor:
    """For every coordinate of a type, the number of the copy that it belongs to: (dim,)."""
    sizes = torch.tensor([term.dim for term, copies in terms_of(rep) for _ in range(copies)])
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)


def copy_norms(x: Tensor, rep: Rep) -> Tensor:
    """|x| of every copy, repeated over its coordinates: (..., dim) to (..., dim)."""
    parts, place = [], 0
    for term, copies in terms_of(rep):
        part = x[..., place : place + term.dim * copies].unflatten(-1, (copies, term.dim))
        parts.append(part.norm(dim=-1, keepdim=True).expand_as(part).flatten(-2))
        place += term.dim * copies
    return torch.cat(parts, -1)


def at_least_float32(x: Tensor) -> Tensor:
    """Squares of half-precision numbers leave their range: 256^2 is infinite, and 0.0001^2 is zero."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _needs_orthogonal(rep: Rep, what: str) -> None:
    if not rep.orthogonal:
        raise RepresentationError(f"{what} uses lengths, which {rep} under {rep.group} does not keep; use Gated")


class NormReLU(nn.Module):
    """x -> x relu(|x| + b) / |x| per copy, with a learned b per copy; a scalar's length is its magnitude."""

    def __init__(self, rep: Rep, dim: int = -1) -> None:
        super().__init__()
        _needs_orthogonal(rep, "NormReLU")
        self.rep, self.dim = rep, dim
        copy_of = copy_index(rep)
        self.bias = nn.Parameter(torch.zeros(int(copy_of[-1]) + 1))
        self.register_buffer("copy_of", copy_of, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x, self.dim, self.rep.dim, f"NormReLU({self.rep})")
        norms = copy_norms(at_least_float32(x), self.rep)
        shortest = max(SHORTEST, torch.finfo(x.dtype).tiny ** 0.5)  # half precision bounds gradients sooner
        scale = torch.relu(norms + self.bias[self.copy_of]) / norms.clamp(min=shortest)  # type: ignore[index]
        return (x * scale).to(x.dtype).movedim(-1, self.dim)


class CopyNorm(nn.Module):
    """Divide by the root mean square of the copies' lengths, then scale each copy by a learned factor."""

    def __init__(self, rep: Rep, dim: int = -1, eps: float = 1e-6) -> None:
        super().__init__()
        _needs_orthogonal(rep, "CopyNorm")
        self.rep, self.dim, self.eps = rep, dim, eps
        copy_of = copy_index(rep)
        self.scale = nn.Parameter(torch.ones(int(copy_of[-1]) + 1))
        self.register_buffer("copy_of", copy_of, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x, self.dim, self.rep.dim, f"CopyNorm({self.rep})")
        wide = at_least_float32(x)
        mean_square = wide.square().sum(-1, keepdim=True) / len(self.scale)
        scaled = wide * torch.rsqrt(mean_square + self.eps) * self.scale[self.copy_of]  # type: ignore[index]
        return scaled.to(x.dtype).movedim(-1, self.dim)


class VectorReLU(nn.Module):
    """Vector neurons: cut off what points against a learned direction, x - min(0, <x, k>) k / |k|^2 with k = U x
    over the copies.

    >>> import softequiv as se
    >>> VectorReLU(8 * se.vector(se.SO(3)))(torch.randn(4, 24)).shape
    torch.Size([4, 24])
    """

    def __init__(self, rep: Rep, dim: int = -1) -> None:
        super().__init__()
        _needs_orthogonal(rep, "VectorReLU")
        if len(terms_of(rep)) != 1 or is_scalar(rep):
            raise RepresentationError(f"VectorReLU takes copies of one space, such as 8 * vector(group); got {rep}")
        self.dim = dim
        (self.space, self.copies) = terms_of(rep)[0]
        self.directions = nn.Linear(self.copies, self.copies, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        whole = channels_last(x, self.dim, self.copies * self.space.dim, f"VectorReLU({self.copies} {self.space})")
        split = whole.unflatten(-1, (self.copies, self.space.dim))
        k = at_least_float32(self.directions(split.mT).mT)
        along = (split * k).sum(-1, keepdim=True).clamp(max=0) / k.square().sum(-1, keepdim=True).clamp(min=SHORTEST**2)
        return (split - along * k).to(x.dtype).flatten(-2).movedim(-1, self.dim)
