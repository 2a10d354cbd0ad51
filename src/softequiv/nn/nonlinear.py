"""Nonlinearities and normalisation that commute with the group, for features whose channels carry representations.

Features have their channels at `dim` (1 for pictures, -1 for vectors), laid out as the type says: term by term, copy
by copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def check_channels(x: Tensor, dim: int, channels: int, what: str) -> None:
    """Features have as many channels at `dim` as `what` takes."""
    if x.shape[dim] != channels:
        raise WeightError(f"{what} takes {channels} channels at axis {dim}; got {x.shape[dim]} of {tuple(x.shape)}")


def channels_last(x: Tensor, dim: int, channels: int, what: str) -> Tensor:
    """Features with their channels, as many as `what` takes, moved from `dim` to the end."""
    check_channels(x, dim, channels, what)
    return x.movedim(dim, -1)


@dataclass(frozen=True)
class Copies:
    """A type in plain numbers, which compilers follow where they cannot follow a representation: for each term how many
    copies it has, and of which size.
    """

    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(rep: Rep) -> Copies:
        """The copies of a type."""
        terms = terms_of(rep)
        return Copies(tuple(copies for _, copies in terms), tuple(term.dim for term, _ in terms))

    def split(self, x: Tensor) -> list[Tensor]:
        """Features (..., dim) term by term, each (..., copies, size)."""
        whole = [count * size for count, size in zip(self.counts, self.sizes, strict=True)]
        return [
            part.unflatten(-1, (count, size))
            for part, count, size in zip(x.split(whole, -1), self.counts, self.sizes, strict=True)
        ]

    def norms(self, x: Tensor) -> Tensor:
        """The length of every copy: (..., dim) to (..., copies)."""
        return torch.cat([part.norm(dim=-1) for part in self.split(x)], -1)

    def spread(self, factors: Tensor) -> Tensor:
        """One factor for every copy, (..., copies), as one for each of its coordinates, (..., dim)."""
        own = zip(factors.split(self.counts, -1), self.sizes, strict=True)
        return joined([part[..., None].expand(*part.shape, size) for part, size in own])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Terms (..., copies, size) one after another, (..., dim)."""
    return torch.cat([part.flatten(-2) for part in parts], -1)


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
        self.what, self.copies, self.features = f"Gated({rep})", Copies.of(rep), rep.dim
        self.gates = tuple(0 if isinstance(term, Trivial) else copies for term, copies in terms_of(rep))

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x, self.dim, self.channels, self.what)
        gates = x[..., self.features :].sigmoid().split(self.gates, -1)
        out = [
            part * gate[..., None] if gate.shape[-1] else self.activation(part)
            for part, gate in zip(self.copies.split(x[..., : self.features]), gates, strict=True)
        ]
        return joined(out).movedim(-1, self.dim)


def at_least_float32(x: Tensor) -> Tensor:
    """Squares of half-precision numbers leave their range: 256^2 is infinite, and 0.0001^2 is zero."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _needs_orthogonal(rep: Rep, what: str, remedy: str = "use Gated") -> None:
    if not rep.orthogonal:
        raise RepresentationError(f"{what} uses lengths, which {rep} under {rep.group} does not keep; {remedy}")


class Lengths(nn.Module):
    """x and the length of every copy that is not scalar, as further scalars.

    Linear maps from vectors to scalars are 0, so that scalars and gates of a network which reads vectors alone have
    nothing else to depend on. `target` is the type of what comes out.

    >>> import softequiv as se
    >>> lengths = Lengths(2 * se.scalar(se.SO(3)) + 4 * se.vector(se.SO(3)))
    >>> print(lengths.target, lengths(torch.randn(5, 14)).shape)
    2[1]+4[V]+4[1] torch.Size([5, 18])
    """

    def __init__(self, rep: Rep, dim: int = -1) -> None:
        super().__init__()
        _needs_orthogonal(rep, "Lengths", "use Bilinear")
        self.rep, self.dim, self.channels = rep, dim, rep.dim
        self.what, self.copies = f"Lengths({rep})", Copies.of(rep)
        self.moving = tuple(not isinstance(term, Trivial) for term, _ in terms_of(rep))
        self.target = gated(rep)  # one more scalar for every copy that is not scalar

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x, self.dim, self.channels, self.what)
        parts = zip(self.copies.split(x), self.moving, strict=True)
        lengths = [torch.linalg.vector_norm(at_least_float32(part), dim=-1) for part, moving in parts if moving]
        return torch.cat([x, *(length.to(x.dtype) for length in lengths)], -1).movedim(-1, self.dim)


class NormReLU(nn.Module):
    """x -> x relu(|x| + min(b, 0)) / |x| per copy, with a learned b per copy; a scalar's length is its magnitude.

    A positive b would make a jump at 0, and where features are rounding, as on blank areas, rounding as large as b.

    >>> import softequiv as se
    >>> NormReLU(8 * se.vector(se.SO(3)))(torch.randn(4, 24)).shape
    torch.Size([4, 24])
    """

    def __init__(self, rep: Rep, dim: int = -1) -> None:
        super().__init__()
        _needs_orthogonal(rep, "NormReLU")
        self.rep, self.dim, self.channels = rep, dim, rep.dim
        self.what, self.copies = f"NormReLU({rep})", Copies.of(rep)
        self.bias = nn.Parameter(torch.zeros(sum(self.copies.counts)))

    def reset_parameters(self) -> None:
        """Start anew."""
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x, self.dim, self.channels, self.what)
        norms = self.copies.norms(at_least_float32(x))
        shortest = max(SHORTEST, torch.finfo(x.dtype).tiny ** 0.5)  # half precision bounds gradients sooner
        scale = torch.relu(norms + self.bias.clamp(max=0)) / norms.clamp(min=shortest)
        return (x * self.copies.spread(scale)).to(x.dtype).movedim(-1, self.dim)


class CopyNorm(nn.Module):
    """Divide by the root mean square of the copies' lengths, then scale each copy by a learned factor.

    >>> import softequiv as se
    >>> y = CopyNorm(8 * se.vector(se.SO(3)))(torch.randn(4, 24))
    >>> torch.allclose(y.square().sum(-1) / 8, torch.ones(4), atol=1e-3)
    True
    """

    def __init__(self, rep: Rep, dim: int = -1, eps: float = 1e-6) -> None:
        super().__init__()
        _needs_orthogonal(rep, "CopyNorm")
        self.rep, self.dim, self.channels, self.eps = rep, dim, rep.dim, eps
        self.what, self.copies = f"CopyNorm({rep})", Copies.of(rep)
        self.scale = nn.Parameter(torch.ones(sum(self.copies.counts)))

    def reset_parameters(self) -> None:
        """Start anew."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x, self.dim, self.channels, self.what)
        wide = at_least_float32(x)
        mean_square = wide.square().sum(-1, keepdim=True) / len(self.scale)
        scaled = wide * torch.rsqrt(mean_square + self.eps) * self.copies.spread(self.scale)
        return scaled.to(x.dtype).movedim(-1, self.dim)


class CopyBatchNorm(nn.Module):
    """Divide every copy by the root mean square of its entries over all samples and places, then scale it by a learned
    factor; a scalar first loses its mean, and has a learned shift after.

    CopyNorm makes all places alike; here they stay as strong or as weak as they are beside each other, so that blank
    areas stay blank. Evaluation uses running means, as torch's batch norm does.

    >>> import softequiv as se
    >>> CopyBatchNorm(4 * se.scalar(se.SO(2)) + 2 * se.vector(se.SO(2)), dim=1)(torch.randn(2, 8, 9, 9)).shape
    torch.Size([2, 8, 9, 9])
    """

    running_mean: Tensor
    running_square: Tensor

    def __init__(self, rep: Rep, dim: int = -1, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        _needs_orthogonal(rep, "CopyBatchNorm")
        self.rep, self.dim, self.channels, self.eps, self.momentum = rep, dim, rep.dim, eps, momentum
        self.what, self.copies = f"CopyBatchNorm({rep})", Copies.of(rep)
        self.scalars = tuple(copies if isinstance(term, Trivial) else 0 for term, copies in terms_of(rep))
        self.scale = nn.Parameter(torch.ones(sum(self.copies.counts)))
        self.shift = nn.Parameter(torch.zeros(sum(self.scalars))) if any(self.scalars) else None
        self.register_buffer("running_mean", torch.zeros(sum(self.scalars)))
        self.register_buffer("running_square", torch.ones(sum(self.copies.counts)))

    def reset_parameters(self) -> None:
        """Start anew."""
        for ones in (self.scale, self.running_square):
            nn.init.ones_(ones)
        nn.init.zeros_(self.running_mean)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        check_channels(x, self.dim, self.channels, self.what)
        wide = at_least_float32(x)
        mean, square = self.moments(wide) if self.training else (self.running_mean, self.running_square)
        factor = torch.rsqrt(square + self.eps) * self.scale
        y = wide * self.along(x, self.copies.spread(factor))
        if self.shift is not None:
            y = y + self.along(x, self.copies.spread(self.for_scalars(factor, self.shift, mean)))
        return y.to(x.dtype)

    def along(self, x: Tensor, channels: Tensor) -> Tensor:
        """One number for every channel of x, in a shape that goes with it."""
        return channels.view([self.channels if axis == self.dim % x.ndim else 1 for axis in range(x.ndim)])

    def for_scalars(self, factor: Tensor, shift: Tensor, mean: Tensor) -> Tensor:
        """What every copy has added after its factor: shift - factor * mean of the scalars, and 0 of the others."""
        terms = zip(factor.split(self.copies.counts), shift.split(self.scalars), mean.split(self.scalars), strict=True)
        return torch.cat([s - f * m if len(s) else torch.zeros_like(f) for f, s, m in terms])

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of every scalar, and the mean square of every copy about it, which the running ones follow."""
        if x.numel() == self.channels:
            raise WeightError(
                f"{self.what} learns from means over samples and places, and got one of each; give it more, or eval()"
            )
        variance, mean = torch.var_mean(x, [axis for axis in range(x.ndim) if axis != self.dim % x.ndim], correction=0)
        terms = list(zip(self.copies.split(variance), self.copies.split(mean), self.scalars, strict=True))
        means = torch.cat([mean.new_zeros(0), *(m[:, 0] for _, m, scalars in terms if scalars)])
        squares = torch.cat([v[:, 0] if scalars else (v + m.square()).mean(-1) for v, m, scalars in terms])
        with torch.no_grad():
            for running, now in ((self.running_mean, means), (self.running_square, squares)):
                running.lerp_(now.to(running), self.momentum)
        return means, squares


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
        self.rep, self.dim, self.channels = rep, dim, rep.dim
        self.what, self.copies = f"VectorReLU({rep})", Copies.of(rep)
        (count,) = self.copies.counts
        self.directions = nn.Linear(count, count, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (split,) = self.copies.split(channels_last(x, self.dim, self.channels, self.what))
        k = at_least_float32(self.directions(split.mT).mT)
        along = (split * k).sum(-1, keepdim=True).clamp(max=0) / k.square().sum(-1, keepdim=True).clamp(min=SHORTEST**2)
        return joined([split - along * k]).to(x.dtype).movedim(-1, self.dim)
