"""Which directions does a group move, and how fast? A spectrum is an orthogonal change of basis and a level for
every coordinate.

The levels sigma are the singular values of the stacked generators L_i W = W D_X - D_Y W; level 0 holds the weights that
the group does not move, that is, the exactly equivariant ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from softequiv._linalg import cluster, is_orthogonal, symmetric
from softequiv.errors import GroupError, WeightError
from softequiv.reps import Dual, Hom, Rep
from softequiv.spectrum.transforms import (
    BlockMatrices,
    Blocks,
    Butterfly,
    Core,
    Dense,
    Matrix,
    Paired,
    PairMatrices,
    Pairs,
    Scale,
    Transform,
    moved,
)

SMALL_OPERATOR = 64  # up to this size one (D, D) matrix is faster than two thin ones, and smaller than a kernel bank
NOTHING = nullcontext()


@dataclass(frozen=True)
class Spectrum:
    """The levels of a weight's representation and the basis that shows them.

    >>> import softequiv as se
    >>> s = se.spectrum(se.vector(se.SO(3)) >> se.vector(se.SO(3)))
    >>> [round(level, 6) for level in s.levels.tolist()], s.counts.tolist()
    ([0.0, 1.414214, 2.44949], [1, 3, 5])
    """

    rep: Rep
    transforms: tuple[Transform, ...]
    levels: Tensor
    level_of: Tensor

    @staticmethod
    def of(rep: Rep, transforms: tuple[Transform, ...], sigma: Tensor) -> Spectrum:
        """A spectrum from the singular value of each coordinate; equal ones are joined into levels."""
        levels, level_of = cluster(sigma)
        return Spectrum(rep, transforms, levels, level_of)

    @cached_property
    def counts(self) -> Tensor:
        """Number of directions at each level."""
        return torch.bincount(self.level_of, minlength=len(self.levels))

    @property
    def invariants(self) -> int:
        """Dimension of level 0: free parameters of the exactly equivariant layer."""
        return int(self.counts[0]) if len(self.levels) and self.levels[0] == 0 else 0

    def analyse(self, weight: Tensor) -> Tensor:
        """Coordinates of a weight (..., *rep.shape) in the spectral basis, (..., D), in float64 unless the weight is
        float32.
        """
        x = flattened(weight, self.rep)
        for transform in self.to(x.dtype, x.device).transforms:
            x = transform.forward(x)
        return x.view(*weight.shape[: weight.ndim - len(self.rep.shape)], -1)

    def basis(self) -> Tensor:
        """The change of basis as a matrix, (D, D): coordinates are weight @ basis."""
        return self.analyse(torch.eye(self.rep.dim, dtype=torch.float64).reshape(-1, *self.rep.shape))

    def synthesise(self, coordinates: Tensor, like: Tensor) -> Tensor:
        """The weight with these coordinates, in the shape and dtype of `like`."""
        for transform in reversed(self.to(coordinates.dtype, coordinates.device).transforms):
            coordinates = transform.inverse(coordinates)
        return coordinates.reshape(like.shape).to(like.dtype)

    def energies(self, weight: Tensor) -> Tensor:
        """||w_sigma||^2 at each level, summed over leading axes, (levels,) float64; differentiable."""
        return self.level_sums(self.analyse(weight).double().square())

    def level_sums(self, numbers: Tensor) -> Tensor:
        """The sum over each level and all copies of one number per coordinate, (..., D) to (levels,)."""
        own = numbers.reshape(-1, self.rep.dim).sum(0)
        return own.new_zeros(len(self.levels)).index_add(0, self.level_of.to(own.device), own)

    def scale(self, weight: Tensor, gamma: Tensor) -> Tensor:
        """sum_sigma gamma(sigma) w_sigma for a gain (levels,), differentiable in weight and gain."""
        y = self.analyse(weight)
        gains = gamma.to(y)[self.level_of.to(y.device)]
        return self.synthesise(y * gains, weight)

    def filter(self, gamma: Tensor) -> Filter:
        """The operator that multiplies each level by a fixed gain (levels,), held by what is cheapest."""
        gains = gamma.to(torch.float64)[self.level_of]
        last = self.transforms[-1] if self.transforms else None
        if bool((gamma == 1).all()):
            return Filter(self.rep, gamma, "identity", (), None)
        if isinstance(last, Dense) and len(self.transforms) == 1:
            kept, changed = gains != 0, gains != 1
            if self.rep.dim <= SMALL_OPERATOR:
                return Filter(self.rep, gamma, "operator", (), Matrix.of(last.basis, gains))
            if int(kept.sum()) <= int(changed.sum()):
                return Filter(self.rep, gamma, "kept", (Dense(last.basis[:, kept].clone()),), Scale(gains[kept]))
            return Filter(
                self.rep, gamma, "dropped", (Dense(last.basis[:, changed].clone()),), Scale(1 - gains[changed])
            )
        if isinstance(last, Pairs):
            core = PairMatrices.of(last, gains)
            if len(self.rep.shape) == 1 and not any(isinstance(of_row[0], Matrix) for of_row in core.maps):
                return Filter(self.rep, gamma, "operator", (), Scale(gains))
            return Filter(self.rep, gamma, "all", (), core)
        if isinstance(last, Blocks):
            return Filter(self.rep, gamma, "all", self.transforms[:-1], BlockMatrices.of(last, gains))
        if isinstance(last, Butterfly):
            return Filter(self.rep, gamma, "all", self.transforms[:-1], Paired.of(last, gains))
        return Filter(self.rep, gamma, "all", self.transforms, Scale(gains))

    def chord(self, within: float) -> Tensor:
        """c(sigma), (levels,): no element of path length up to `within` changes a unit weight of that level by more.

        One-parameter motion: 2 sin(min(sigma t, pi) / 2), attained while sigma t <= pi. One step s repeated n times:
        the same with the angle 2 asin(sigma / 2) of s. Otherwise sigma t, at most 2 where levels are invariant
        subspaces. For a representation that is not orthogonal, sigma t times `kappa`.
        """
        group, reach = self.rep.group, self.rep.group.reach(within)
        flows, steps = len(group.lie), len(group.steps)
        if self.rep.orthogonal and (flows, steps) == (0, 1):
            angle = 2 * torch.asin((self.levels / 2).clamp(max=1)) * math.floor(reach + 1e-9)
            return 2 * torch.sin(angle.clamp(max=math.pi) / 2)
        if self.rep.orthogonal and steps == 0 and (flows == 1 or (group.central and self.rep.exact)):
            return 2 * torch.sin((self.levels * reach).clamp(max=math.pi) / 2)
        if self.rep.orthogonal and group.central and self.rep.exact:
            return (self.levels * reach).clamp(max=2)
        return torch.where(self.levels > 0, self.kappa(reach) * self.levels * reach, 0.0)  # kappa may be infinite

    def kappa(self, reach: float) -> float:
        """Bound on ||rho_Y(h)|| ||rho_X(k)|| for h k along a path of that length; 1 where orthogonal.

        For maps between spaces with rates mu_i and nu_i (`rates`) it is exp(length (sum_i max(mu_i, nu_i)^2)^1/2).

        Infinite where a step cannot be undone, as a bilinear rotation of pixels: then nothing is promised.
        """
        if self.rep.orthogonal:
            return 1.0
        if (
            isinstance(self.rep, Hom)
            and is_orthogonal(self.rep.target.steps())
            and is_orthogonal(self.rep.source.steps())
        ):
            # one part of a flow on each side: of each generator, the faster side bounds both
            return grown(reach * float(torch.maximum(rates(self.rep.target), rates(self.rep.source)).norm()))
        return grown(reach * sum(growth(space) for space in self.rep.axes))

    def error(self, weight: Tensor, within: float) -> float:
        """Certified relative change: sup over path lengths up to `within` of ||W rho_X(g) - rho_Y(g) W||_F / ||W||_F
        is at most this.

            error^2 = sum_sigma ||w_sigma||^2 c(sigma)^2 / ||W||^2

        and never more than 2 ||W - P_0 W|| / ||W|| where the representation is orthogonal. Zero for a zero weight.
        """
        energies = self.energies(weight.detach())
        total = float(energies.sum())
        if total == 0:
            return 0.0
        change = math.sqrt(float((energies * self.chord(within) ** 2).sum()) / total)
        return min(change, self.largest_error(weight)) if self.rep.orthogonal else change

    def largest_error(self, weight: Tensor) -> float:
        """2 ||W - P_0 W|| / ||W||: bounds the change by any element of the group, for an orthogonal representation."""
        return 2 * self._moving_share(weight)

    def haar_error(self, weight: Tensor) -> float:
        """sqrt(2) ||W - P_0 W|| / ||W||: the root mean square change over a compact group, where `rep.exact`."""
        if not (self.rep.group.compact and self.rep.orthogonal):
            raise GroupError(
                f"{self.rep.group} has no Haar average on {self.rep}: it needs a compact group acting orthogonally"
            )
        return math.sqrt(2) * self._moving_share(weight)

    def _moving_share(self, weight: Tensor) -> float:
        energies = self.energies(weight.detach())
        total = float(energies.sum())
        return math.sqrt(float(energies[self.levels > 0].sum()) / total) if total else 0.0

    def to(self, dtype: torch.dtype, device: torch.device) -> Spectrum:
        """The same spectrum for weights of another dtype or device."""
        if self.levels.dtype == dtype and self.levels.device == device:
            return self
        return Spectrum(self.rep, *moved((self.transforms, self.levels, self.level_of), dtype, device))


def grown(exponent: float) -> float:
    """exp(x), infinite beyond the largest number."""
    return math.exp(exponent) if exponent < 709 else math.inf


def rates(rep: Rep) -> Tensor:
    """mu_i, (k,): log ||rho(exp(t A_i))|| <= mu_i |t|, the norm of the symmetric part of each Lie generator."""
    rep = rep.base if isinstance(rep, Dual) else rep
    return torch.linalg.eigvalsh(symmetric(rep.lie())).abs().amax(-1)


def growth(rep: Rep) -> float:
    """log ||rho(g)|| <= growth * length(g), as a path may take its generators one after another, t_i of each:
    sum_i mu_i t_i <= (sum_i mu_i^2)^1/2 length.
    """
    rep = rep.base if isinstance(rep, Dual) else rep
    rate = float(rates(rep).norm())
    for norms in torch.linalg.svdvals(rep.steps()):
        smallest = float(norms[-1])
        rate += math.log(max(float(norms[0]), 1 / smallest)) if smallest > 1e-12 * float(norms[0]) else math.inf
    return rate


def flattened(weight: Tensor, rep: Rep) -> Tensor:
    """A weight (..., *rep.shape) as (count, D) in float32 or float64, checked."""
    if weight.shape[max(0, weight.ndim - len(rep.shape)) :] != rep.shape:
        raise WeightError(f"a weight of {rep} has trailing axes {rep.shape}; got shape {tuple(weight.shape)}")
    if not weight.is_floating_point():
        raise WeightError(
            f"only floating-point weights can be filtered; got {weight.dtype}: dequantise or cast it first"
        )
    flat = weight.reshape(-1, rep.dim)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


@dataclass(frozen=True)
class Filter:
    """A fixed linear filter of weights, sum_sigma gamma(sigma) P_sigma, held by what is cheapest.

    `side` says what: the directions "kept" or "dropped", "all" of them, the whole "operator" where one product applies
    it, or nothing for the "identity". Called on a weight (..., *rep.shape), it returns one of the same shape and dtype.
    """

    rep: Rep
    gamma: Tensor
    side: str
    transforms: tuple[Transform, ...]
    core: Core | None

    def to(self, dtype: torch.dtype, device: torch.device) -> Filter:
        """The same filter for weights of another dtype or device."""
        if self.core is None or (self.gamma.dtype == dtype and self.gamma.device == device):
            return self
        transforms, core = moved((self.transforms, self.core), dtype, device)
        return Filter(self.rep, self.gamma.to(device, dtype), self.side, transforms, core)

    @property
    def factor(self) -> Tensor | None:
        """What a weight is multiplied by where that is all: (D,) each number, or (d, d) each d of them in a row."""
        core = self.core if not self.transforms else None
        if isinstance(core, PairMatrices) and len(core.pairs.rows) == 1 and core.pairs.columns == ((1, 1),):
            core = core.maps[0][0]
        if isinstance(core, Scale) and len(self.rep.shape) == 1:
            return core.gains
        return core.matrix if isinstance(core, Matrix) else None

    def __call__(self, weight: Tensor) -> Tensor:
        return in_one_step(weight, self.apply)

    def apply(self, weight: Tensor) -> Tensor:
        """The filter, step by step."""
        fits = weight.dtype == self.gamma.dtype and weight.device == self.gamma.device
        if isinstance(self.core, PairMatrices) and fits and weight.shape[-len(self.rep.shape) :] == self.rep.shape:
            return self.core(weight)  # as it is stored, by the shortest way
        x = flattened(weight, self.rep)
        own = self.to(x.dtype, x.device)
        if own.core is None:
            return weight
        y = x
        for transform in own.transforms:
            y = transform.forward(y)
        y = own.core(y)
        for transform in reversed(own.transforms):
            y = transform.inverse(y)
        return (x - y if self.side == "dropped" else y).reshape(weight.shape).to(weight.dtype)


def full_precision(weight: Tensor) -> AbstractContextManager[None]:
    """A context without autocast; torch's own takes longer than a small product, so it is entered only where needed."""
    kind = weight.device.type
    if weight.is_meta or not torch.is_autocast_enabled(kind):
        return NOTHING
    return torch.autocast(kind, enabled=False)


def is_eager(weight: Tensor) -> bool:
    """Whether each operation on a weight would be recorded one by one."""
    return weight.requires_grad and torch.is_grad_enabled() and not traced_or_transformed()


def traced_or_transformed() -> bool:
    """Whether operations are recorded to be run with other tensors, or carry tangents, which steps of our own lack."""
    tracing: bool = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return tracing or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def in_one_step(weight: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """A weight through a filter, recorded as one operation."""
    filtered: Tensor = SelfAdjoint.apply(weight, apply) if is_eager(weight) else apply(weight)  # type: ignore[no-untyped-call]
    return filtered


class SelfAdjoint(torch.autograd.Function):
    """A filter is its own transpose: a gradient takes the same steps, and none of them is recorded.

    Nothing is saved for it, so that activations which are computed again save as many tensors as the first time,
    whether their weights were filtered at their access or ahead of it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.filter = apply
        return apply(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with full_precision(gradient):  # as in the forward pass
            return in_one_step(gradient, ctx.filter), None
