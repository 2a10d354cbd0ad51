"""What is guaranteed of one weight? Its certified change over a range, in two norms, over the whole group, and beside
the paper's bound.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softequiv.certify.located import Located
from softequiv.certify.operator import LinearMap, as_hom, linear_map, operator_change, spectral_norm
from softequiv.nn.layers import is_scalar
from softequiv.nn.weight import whole
from softequiv.reps import Rep
from softequiv.spectrum import Spectrum, spectrum

FILTER_ROUNDINGS = 32  # a filter's own float32 or float64 arithmetic leaves at most so many units of it behind


@dataclass(frozen=True)
class WeightCertificate:
    """What holds for one weight W, for every element g of the certified range.

    `error`: ||W rho_X(g) - rho_Y(g) W||_F <= error ||W||_F. `operator`: the same in operator norm, None for a table or
    a bias. `haar`: root mean square of the change over the whole group; `supremum`: its bound; None where the group is
    not compact or does not act orthogonally, and no `haar` where the space only comes close to the action. `paper`:
    b sqrt(n_G) r (times sqrt(d') for d' outputs that turn), without its unknown residual, for the same range;
    `paper_whole` for the whole group. `kappa`: growth of representations that are not orthogonal, contained in `error`
    and `operator`. `rounding`: what computing in the weight's dtype adds, but for a bias, see `rounding_of`. `levels`
    and `directions` are those on which the weight has energy beyond rounding.
    """

    name: str
    representation: str
    shape: tuple[int, ...]
    dtype: str
    levels: int
    levels_total: int
    directions: int
    directions_total: int
    error: float
    operator: float | None
    haar: float | None
    supremum: float | None
    paper: float
    paper_whole: float | None
    kappa: float
    rounding: float | None
    asked: float | None
    sha256: str

    @property
    def met(self) -> bool:
        """Whether the error target holds, up to the rounding of stored weights; true where none was set."""
        return self.asked is None or self.error <= self.asked + 3 * stored_rounding(getattr(torch, self.dtype))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps) / 2


def stored_rounding(dtype: torch.dtype) -> float:
    """How far, relative to its norm, a filtered weight lies from what exact arithmetic would have stored."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return unit_roundoff(dtype) + FILTER_ROUNDINGS * unit_roundoff(wide)


def sum_rounding(dtype: torch.dtype, terms: int) -> float:
    """gamma_n (1 + u) + u: how far a computed sum of n products lies from the exact one, relative to |W| |x|.

    Accumulated in precision v it errs by at most gamma_n |W| |x| entry by entry, in any order, with
    gamma_n = n v / (1 - n v); it is then rounded to the layer's precision u.
    """
    u = unit_roundoff(dtype)
    v = unit_roundoff(torch.float64 if dtype == torch.float64 else torch.float32)
    if terms * v >= 1:
        return math.inf
    return terms * v / (1 - terms * v) * (1 + u) + u


def rounding_of(dtype: torch.dtype, fan_in: int, kappa: float = 1.0) -> float:
    """What floating point adds to the certified change, relative to ||W||_F ||x||.

    A layer computes its n products twice, with errors of s = `sum_rounding`, and g x is rounded before it enters:

        || fl(W fl(g x)) - g fl(W x) || <= (2 s (1 + u) + u) kappa ||W||_F ||x||.

    It assumes rounding to nearest, accumulation in float32 or better (not TF32), no overflow or underflow. A bias b is
    left out, as it goes with no ||x||: it is one more of the n, and adds 2 s ||b|| at each place of the output.

    >>> rounding_of(torch.float32, 9) < 2e-6 < rounding_of(torch.bfloat16, 9)
    True
    """
    u = unit_roundoff(dtype)
    return kappa * (2 * sum_rounding(dtype, fan_in) * (1 + u) + u)


def bytes_of(value: Tensor) -> bytes:
    """The entries of a tensor as they are stored, wherever they lie."""
    return whole(value.detach()).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def digest(value: Tensor) -> str:
    """sha256 of a tensor's dtype, shape and bytes."""
    head = f"{value.dtype} {tuple(value.shape)} ".encode()
    return hashlib.sha256(head + bytes_of(value)).hexdigest()


def turning_outputs(rep: Rep) -> int:
    """d', the outputs of an equivariant layer that turn with the input; 1 for an invariant one."""
    maps = as_hom(rep)
    return 1 if maps is None or is_scalar(maps.target) else maps.target.dim


def fan_in(module: nn.Module, linear: LinearMap) -> int:
    """How many products one output of a layer is the sum of."""
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return module.in_channels // module.groups * math.prod(module.kernel_size)
    return linear.matrix.shape[-1]


def paper_bound(of: Spectrum, b: float, radius: float) -> float:
    """b sqrt(n_G d') r: Claims 1 and 2 of the paper without their residual."""
    generators = len(of.rep.group.lie) + len(of.rep.group.steps)
    return b * math.sqrt(generators * turning_outputs(of.rep)) * radius


def certified(weight: Located, within: float) -> WeightCertificate:
    """The certificate of one weight for elements of path length up to `within`."""
    value, rep, of = weight.value, weight.rep, spectrum(weight.rep)
    group, reach = rep.group, rep.group.reach(within)
    view = weight.layout.read(value, rep).to(torch.float64)
    size = float(view.abs().max()) if view.numel() else 0.0
    view = view / size if size else view  # every figure is relative: squares neither overflow nor vanish
    energies = of.energies(view)
    present = energies > stored_rounding(value.dtype) ** 2 * float(energies.sum())
    b = float(of.levels[present].max()) if bool(present.any()) else 0.0
    blocks = int(getattr(weight.module, "groups", 1)) if weight.layout.groups == 1 else 1
    linear = linear_map(view, of, blocks) if weight.is_map else None
    kappa, error = of.kappa(reach), of.error(view, within)
    supremum = of.largest_error(view) if group.compact and rep.orthogonal else None
    operator = None
    if linear is not None:
        change = operator_change(of, linear, within, error * float(view.norm()))
        operator = change / spectral_norm(linear.matrix) if size else 0.0
    return WeightCertificate(
        name=weight.name,
        representation=str(rep),
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        levels=int(present.sum()),
        levels_total=len(of.levels),
        directions=int(of.counts[present].sum()),
        directions_total=rep.dim,
        error=error,
        operator=operator,
        haar=supremum / math.sqrt(2) if supremum is not None and rep.exact and rep.settled else None,
        supremum=supremum,
        paper=paper_bound(of, b, reach),
        paper_whole=paper_bound(of, b, group.covering_radius) if group.compact else None,
        kappa=kappa,
        rounding=None if linear is None else rounding_of(value.dtype, fan_in(weight.module, linear) + 1, kappa),
        asked=weight.asked(reach),
        sha256=digest(value),
    )
