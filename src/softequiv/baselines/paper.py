"""What does the paper do, to the letter? Its own construction as a named configuration of this library, so that it and
ours can be compared in one run.

"Tunable Soft Equivariance with Guarantees" (2026). A picture turns by bilinear resampling, zeros outside; a weight w of
an invariant map x -> <w, x> becomes B_inv w, and one of an equivariant map B_eq W, with

    [rho(s_1) - I | rho(s_2) - I | ...] = U Sigma V^T,     B_inv = sum_i gamma_i u_i u_i^T   (left singular vectors),
    [L_1; L_2; ...] = U Sigma V^T,                         B_eq  = sum_i gamma_i v_i v_i^T   (right singular vectors),
    L_i = rho_X(s_i)^T (x) I - I (x) rho_Y(s_i),   gamma_i = 1 if sigma_i < b, else 0 (hard) or exp(-sigma_i^2 / s^2).

No inverse of rho(s) enters, which small bilinear rotations do not have. `softness` is the fraction of all basis vectors
that b lets through. Since sigma_i < b is strict, a level that the count would cut falls out whole; singular vectors
inside a level are arbitrary, so that any part of it would be as well. The paper leaves four things open, which are
settled here: the count is rounded down; the lowest level always stays, so that softness 0 is no zero weight (on even
sides no picture rests under bilinear turns); tables of positions, which are added and not multiplied by, are filtered
by B_eq as maps from a number, that is by right singular vectors; the decay s is 1 unless given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from softequiv._linalg import LEVEL_TOLERANCE
from softequiv.adapt import plan
from softequiv.errors import GainError, checked_number
from softequiv.gains import Gain, hard, schur, smooth
from softequiv.gains.schur import single_generator
from softequiv.groups import C, Group
from softequiv.nn import Layout, Mode, Soft, soften_weight, softenable
from softequiv.nn.layers import restored_scale
from softequiv.reps import Rep
from softequiv.spectrum import spectrum

Cutoff = Literal["hard", "smooth"]
Rule = Literal["svd", "schur"]
Model = TypeVar("Model", bound=nn.Module)


def paper_soften(
    model: Model,
    group: Group | str = C(18),  # noqa: B008  (frozen)
    *,
    softness: float = 0.9,
    cutoff: Cutoff = "hard",
    decay: float = 1.0,
    mode: Mode = "parametrize",
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    grids: Mapping[str, tuple[int, ...]] | None = None,
) -> Model:
    """`soften` as the paper does it: kernels, patch embeddings, flattened grids and tables of positions, in place.

    `decay` is the s of the smooth cut-off; `mode`, `only`, `skip` and `grids` are those of `soften`.

    >>> net = paper_soften(nn.Conv2d(3, 8, 5), softness=0.5)
    >>> net.weight.flatten(-2).reshape(-1, 25).svd().S.gt(1e-5).sum()
    tensor(11)
    """
    todo = plan(model, group, softness=1.0, only=only, skip=skip, grids=grids, action="bilinear").weights
    softs = [
        Soft(weight.soft.rep, paper_gain(weight.soft.rep, softness, cutoff, decay=decay), weight.soft.layout)
        for weight in todo
    ]
    for weight in todo:  # all are checked before the first is touched
        softenable(model.get_submodule(weight.found.module), weight.found.attribute, mode, weight.found.name)
    for weight, soft in zip(todo, softs, strict=True):
        soften_weight(model.get_submodule(weight.found.module), weight.found.attribute, soft, mode)
    return model


def paper_linear(
    source: Rep,
    target: Rep,
    *,
    softness: float = 0.9,
    cutoff: Cutoff = "hard",
    decay: float = 1.0,
    rule: Rule = "svd",
    bias: bool = True,
) -> nn.Linear:
    """The paper's soft equivariant linear layer, vec(W) = B_eq theta, the bias treated as a map from a number.

    `rule` "schur" is its cheaper projection for one generator that is a normal matrix: blocks of the Schur form with
    lambda_S + lambda_T <= b stay whole, of the others Sym(Theta) stays and the rest is dropped, or scaled by
    exp(-(lambda_S + lambda_T) / s^2). The initial weight is scaled up by what the projection takes away.

    >>> from softequiv import SO, scalar, vector
    >>> space = 2 * vector(SO(2)) + scalar(SO(2))
    >>> paper_linear(space, space, softness=0.5)(torch.zeros(3, 5)).shape
    torch.Size([3, 5])
    """
    layer = nn.Linear(source.dim, target.dim, bias=bias)
    soft = Soft(source >> target, paper_gain(source >> target, softness, cutoff, decay=decay, rule=rule))
    with torch.no_grad():
        layer.weight.mul_(restored_scale(soft, layer.weight))
    soften_weight(layer, "weight", soft)
    if bias:
        shift = paper_gain(target, softness, cutoff, decay=decay, rule=rule)
        soften_weight(layer, "bias", Soft(target, shift, Layout(axis=0)))
    return layer


def paper_gain(rep: Rep, softness: float, cutoff: Cutoff = "hard", *, decay: float = 1.0, rule: Rule = "svd") -> Gain:
    """The paper's softness on one space: the cut-off b that lets this fraction of the basis vectors through, as a gain.

    >>> from softequiv.reps.grids import kernels
    >>> paper_gain(kernels(C(4), 3, 3), 0.5)
    Hard(b=1.41421...)
    """
    softness = checked_number(softness, "softness", GainError)
    if not 0 <= softness <= 1:
        raise GainError(f"softness runs from 0 (equivariant) to 1 (unconstrained); got {softness!r}")
    for value, choices in ((cutoff, get_args(Cutoff)), (rule, get_args(Rule))):
        if value not in choices:
            raise GainError(f"the paper has no {value!r}; choose one of {', '.join(choices)}")
    if rule == "schur":
        return schur(_schur_cutoff(rep, softness), decay if cutoff == "smooth" else None)
    b = _cutoff(rep, softness)
    return hard(b) if cutoff == "hard" else smooth(b, decay)


def _count(rep: Rep, softness: float) -> int:
    """How many of the basis vectors may stay."""
    return math.floor(softness * rep.dim + 1e-9)


def _cutoff(rep: Rep, softness: float) -> float:
    """The first level that falls out: b with #{sigma_i < b} <= softness N, as large as it can be."""
    levels = spectrum(rep)
    whole = int((levels.counts.cumsum(0) <= _count(rep, softness)).sum())
    out = max(whole, 1)
    return float(levels.levels[out]) if out < len(levels.levels) else math.inf


def _schur_cutoff(rep: Rep, softness: float) -> float:
    """The largest sum of rates that stays whole: #{lambda_S + lambda_T <= b, or commuting} <= softness N."""
    generators = len(rep.group.lie) + len(rep.group.steps)
    if generators != 1 or not rep.normal:
        raise GainError(
            f"the Schur rule with a count needs one generator that is a normal matrix; {rep} under {rep.group} has "
            f"{generators}: use rule='svd'"
        )
    levels, rates = single_generator(rep, 0)
    commuting = levels.levels[levels.level_of] == 0
    tolerance = LEVEL_TOLERANCE * max(1.0, float(rates.max()))
    fits = [
        b for b in rates.unique().tolist() if int(((rates <= b + tolerance) | commuting).sum()) <= _count(rep, softness)
    ]
    return max(fits, default=0.0)
