"""What the property tests draw from: groups, representations, weights and gains, small enough for the dense oracle."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from hypothesis import strategies as st
from torch import nn

import softequiv as se
from softequiv.groups import Group
from softequiv.reps import Rep

Model = TypeVar("Model", bound=nn.Module)

FINITE = [
    *(se.C(n) for n in (1, 2, 3, 4, 8, 18)),
    *(se.D(n) for n in (1, 2, 3, 4, 6)),
    *(se.S(n) for n in (2, 3, 4)),
    se.Reflection(),
    se.Shifts(6),
    se.Shifts(4, 3),
    se.C(3) * se.Reflection(),
]
COMPACT = [
    se.SO(1),
    se.SO(2),
    se.SO(3),
    se.SO(4),
    se.SO(5),
    se.O(1),
    se.O(2),
    se.O(3),
    se.SU2(),
    se.SO(2) * se.SO(2),
    se.SO(3) * se.S(3),
]
OPEN = [
    se.Lorentz("SO+"),
    se.Lorentz("SO"),
    se.Lorentz("O"),
    se.Scaling(),
    se.SO(2) * se.Scaling(),
    se.Scaling() * se.C(3),
]
ALL_GROUPS = FINITE + COMPACT + OPEN

PLANE = (se.C, se.D)


def leaves(group: Group) -> list[Rep]:
    """Small representations that a group has."""
    out = [se.scalar(group), se.vector(group), se.vector(group).T]
    if group.lie.shape[-1] <= 4:
        out += [se.tensor(group, 2), se.vector(group) >> se.scalar(group)]
    if isinstance(group, PLANE) or group in (se.SO(2), se.O(2)):
        out += [se.frequency(group, m) for m in (2, 3)]
        out += [se.grid(group, n, n) for n in (1, 2, 3, 4)]
        out += [se.grid(group, 3, 3, action="su2"), se.grid(group, 4, 4, action="central")]
    if group in (se.SO(3), se.SU2()):
        out += [se.spin(group, 1), se.spin(group, 2)] + ([se.spin(group, 0.5)] if group == se.SU2() else [])
    if group.order <= 12:
        out.append(se.regular(group))
    if isinstance(group, se.Shifts):
        out.append(se.grid(group, *group.sizes))
    if isinstance(group, (se.Reflection, se.Scaling)):
        out += [se.grid(group, 4), se.grid(group, 2, 3)]
    if isinstance(group, se.groups.DirectProduct):
        out += [se.lift(se.vector(factor), group, i) for i, factor in enumerate(group.factors)]
    return out


@st.composite
def spaces(draw: st.DrawFn, group: Group, largest: int = 12) -> Rep:
    """A leaf, or a sum of leaves with multiplicities."""
    small = [rep for rep in leaves(group) if rep.dim <= largest]
    rep = draw(st.sampled_from(small))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(st.sampled_from(small)) * draw(st.integers(1, 3))
        if rep.dim + other.dim <= largest:
            rep = rep + other
    return rep


@st.composite
def weight_reps(draw: st.DrawFn, groups: list[Group] = ALL_GROUPS, largest: int = 150) -> Rep:
    """A representation in which a weight may live: a map between spaces, a vector, or a typed kernel."""
    group = draw(st.sampled_from(groups))
    source = draw(spaces(group))
    kind = draw(st.sampled_from(["map", "map", "vector", "kernel"]))
    if kind == "vector":
        return source
    target = draw(spaces(group))
    rep: Rep = source >> target
    if kind == "kernel" and (isinstance(group, PLANE) or group in (se.SO(2), se.O(2))):
        kernel = rep @ se.grid(group, 3, 3)
        return kernel if kernel.dim <= largest else rep
    return rep


def level_gains() -> st.SearchStrategy[se.gains.LevelGain]:
    """Gains that act on levels alone."""
    numbers = st.floats(0, 6)
    return st.one_of(
        st.builds(se.hard, numbers),
        st.builds(se.smooth, numbers, st.floats(0.3, 4)),
        st.builds(se.softness, st.floats(0, 1)),
    )


def weight(rep: Rep, seed: int, dtype: torch.dtype = torch.float64, lead: tuple[int, ...] = ()) -> torch.Tensor:
    """A standard normal weight of a representation."""
    return torch.randn(*lead, *rep.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference relative to the larger norm."""
    return float((a - b).norm() / max(float(a.norm()), float(b.norm()), math.ulp(1.0)))


def as_trained(model: Model) -> Model:
    """A model whose soft parameters have noise in every direction, as training leaves them: new layers have none that
    the group moves.
    """
    with torch.no_grad():
        for part in se.soft_weights(model):
            part.stored.add_(torch.randn_like(part.stored), alpha=float(part.stored.square().mean().sqrt()) or 1.0)
    se.project(model)
    return model
