"""Soft layers to build with: linear maps, convolutions of typed fields, tables; each is the torch layer with
filtered weights.

A feature's type is a representation of its channels: `16 * scalar(g)` for plain channels, `8 * frequency(g, 1)` for
vector fields. Gain softness(0) makes a layer exactly equivariant. Every other one starts so as well: the gain says how
far training may go from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from softequiv.errors import RepresentationError
from softequiv.gains import Gain, LevelGain, softness
from softequiv.nn.soft import Layout, Soft, through
from softequiv.nn.weight import Mode, soft_weights, soften_new
from softequiv.reps import Action, Rep, Trivial, direct_sum, terms_of
from softequiv.reps.grids import kernels
from softequiv.spectrum import spectrum

EXACT: Gain = softness(0)
NOTHING = 1e-6  # of a weight's length is rounding in float32


def _soften(layer: nn.Module, weight: Soft, target: Rep, mode: Mode) -> None:
    """Filter weight and bias of a new layer, and let it start exactly equivariant."""
    drawn: Tensor = layer.weight.detach().clone()  # type: ignore[operator]
    soften_new(layer, "weight", weight, mode)
    if getattr(layer, "bias", None) is not None:
        layout = Layout() if len(target.shape) == 1 else Layout(axis=0)  # only a space of several axes is stored flat
        soften_new(layer, "bias", Soft(target, weight.gain, layout), mode)
    if not drawn.is_meta:  # else it starts when its parameters are reset
        _start_equivariant(layer, drawn, terms_of(target))


class _Starts:
    """What the layers here share that torch's layer draws for: where they start, also when they start anew."""

    target: Rep

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw as torch's layer does, and start exactly equivariant as a new layer does."""
        layer: Any = self
        parts = list(soft_weights(layer))
        if not parts:  # torch's own constructor draws
            super().reset_parameters()  # type: ignore[misc]
            return
        stored = {"weight": layer.weight, "bias": layer.bias} | {part.attribute: part.stored for part in parts}
        super().reset_parameters.__func__(SimpleNamespace(**stored))  # type: ignore[misc]
        _start_anew(layer, terms_of(self.target))


@torch.no_grad()
def _start_anew(layer: nn.Module, terms: Sequence[tuple[Rep, int]] = ()) -> None:
    """Start from what was just drawn into the stored parameters."""
    parts = {part.attribute: part for part in soft_weights(layer)}
    drawn = parts["weight"].stored.clone()
    if drawn.is_meta:
        return
    for part in parts.values():
        if part.filtered.mode == "project":  # as for a new layer, whose draw is filtered first
            part.stored.copy_(part.filtered(part.stored))
    _start_equivariant(layer, drawn, terms)


@torch.no_grad()
def _start_equivariant(layer: nn.Module, drawn: Tensor, terms: Sequence[tuple[Rep, int]] = ()) -> None:
    """Theta = P_0 Theta for the random parameters of a new layer, its weight as `drawn` and scaled up by what that
    takes away; by a factor for each type among the `terms` of its target, as one for all would let those die out over
    a few layers which read little of what comes in.

    What is random at the start and not equivariant is noise, which training would first have to undo. A weight that
    the group leaves no invariant direction would start at zero, and starts as its own gain leaves it instead.
    """
    for part in soft_weights(layer):
        stored, soft = part.stored, part.soft
        if part.attribute == "weight" and not spectrum(soft.rep).invariants:
            stored.mul_(restored_scale(soft, stored))
            continue
        strict = EXACT.on(soft.rep).to(*part.filtered.fitted)
        if part.attribute != "weight":
            stored.copy_(through(strict, soft, stored))
            continue
        start = through(strict, soft, drawn)
        if len(terms) > 1:
            _restore_rows(start, drawn, terms, axis=1 if soft.layout.swap else 0)
        else:
            start = start * restored_scale(Soft(soft.rep, EXACT, soft.layout), drawn)
        stored.copy_(start)


def _restore_rows(filtered: Tensor, weight: Tensor, terms: Sequence[tuple[Rep, int]], axis: int) -> None:
    """Make the rows of each type as long as they were, in place; those that nothing is left of stay."""
    place = 0
    for term, copies in terms:
        size = min(term.dim * copies, weight.shape[axis] - place)  # transposed groups share the rows of one
        rows, before = (tensor.narrow(axis, place, size) for tensor in (filtered, weight))
        if rows.norm() > NOTHING * before.norm():
            rows.mul_(before.norm() / rows.norm())
        place += size


def restored_scale(soft: Soft, weight: Tensor) -> float:
    """What a random weight is multiplied by to keep its variance when it is filtered: sqrt(N / sum gamma^2) for gains
    of levels, ||Theta|| / ||W|| of this weight where the gain depends on it.
    """
    if isinstance(soft.gain, LevelGain):
        levels = spectrum(soft.rep)
        whole, kept = float(soft.rep.dim), float((soft.gain.gamma(levels) ** 2 * levels.counts).sum())
    else:
        view = soft.layout.read(weight.detach(), soft.rep)
        whole, kept = float(view.norm()) ** 2, float(soft.gain(view, soft.rep).norm()) ** 2
    return math.sqrt(whole / kept) if kept else 1.0


def checked_types(*types: Rep) -> None:
    """What a layer maps between are representations."""
    for rep in types:
        if not isinstance(rep, Rep):
            raise RepresentationError(
                f"a soft layer maps between representations, such as 3 * vector(SO(3)); got {rep!r}; plain channels "
                "are 3 * scalar(group)"
            )


class SoftLinear(_Starts, nn.Linear):
    """A linear map from one representation to another; the bias lives in the target.

    >>> import softequiv as se
    >>> X, Y = 4 * se.vector(se.SO(3)), 2 * se.vector(se.SO(3)) + 3 * se.scalar(se.SO(3))
    >>> SoftLinear(X, Y)(torch.randn(5, 12)).shape
    torch.Size([5, 9])
    """

    def __init__(
        self,
        source: Rep,
        target: Rep,
        gain: Gain = EXACT,
        *,
        bias: bool = True,
        mode: Mode = "parametrize",
        **kwargs: Any,
    ) -> None:
        checked_types(source, target)
        super().__init__(source.dim, target.dim, bias=bias, **kwargs)
        self.source, self.target = source, target
        _soften(self, Soft(source >> target, gain), target, mode)


def is_scalar(rep: Rep) -> bool:
    """Whether nothing in a space moves."""
    return all(isinstance(term, Trivial) for term, _ in terms_of(rep))


def per_group(rep: Rep, groups: int) -> Rep:
    """The part of a type that one group of a grouped convolution sees."""
    copies = [term for term, count in terms_of(rep) for _ in range(count)]
    part = copies[: len(copies) // groups]
    if part * groups == copies:
        return direct_sum([(term, 1) for term in part])
    raise RepresentationError(f"{rep} cannot be cut into {groups} equal groups of channels; use {groups} * (one type)")


def kernel_soft(
    source: Rep, target: Rep, sizes: tuple[int, ...], gain: Gain, groups: int, transposed: bool, action: Action
) -> Soft:
    """Representation and layout of a convolution kernel: grid* (x) Y (x) X*, or grid* alone for plain channels."""
    space = kernels(source.group, *sizes, action=action)
    if is_scalar(source) and is_scalar(target):
        return Soft(space, gain)
    maps = per_group(source, groups) >> per_group(target, groups)
    return Soft(maps @ space, gain, Layout(groups=groups, swap=transposed))


class _SoftConv(_Starts):
    """What the six convolutions share: types instead of channel counts."""

    def __init__(
        self,
        source: Rep,
        target: Rep,
        kernel_size: int,
        gain: Gain = EXACT,
        *,
        mode: Mode = "parametrize",
        action: Action = "exact",
        **kwargs: Any,
    ) -> None:
        checked_types(source, target)
        super().__init__(source.dim, target.dim, kernel_size, **kwargs)  # type: ignore[call-arg]
        self.source, self.target = source, target
        conv: Any = self
        soft = kernel_soft(source, target, conv.kernel_size, gain, conv.groups, conv.transposed, action)
        _soften(conv, soft, target, mode)


class SoftConv1d(_SoftConv, nn.Conv1d):
    """Convolution of signals: Shifts, Reflection, Scaling."""


class SoftConv2d(_SoftConv, nn.Conv2d):
    """Convolution of pictures whose channels carry representations.

    >>> import softequiv as se
    >>> fields = 4 * se.frequency(se.C(4), 1) + 8 * se.scalar(se.C(4))
    >>> SoftConv2d(3 * se.scalar(se.C(4)), fields, 5, padding=2)(torch.randn(2, 3, 9, 9)).shape
    torch.Size([2, 16, 9, 9])
    """


class SoftConv3d(_SoftConv, nn.Conv3d):
    """Convolution of volumes."""


class SoftConvTranspose1d(_SoftConv, nn.ConvTranspose1d):
    """Transposed convolution of signals."""


class SoftConvTranspose2d(_SoftConv, nn.ConvTranspose2d):
    """Transposed convolution of pictures."""


class SoftConvTranspose3d(_SoftConv, nn.ConvTranspose3d):
    """Transposed convolution of volumes."""


class SoftTable(nn.Module):
    """A learned table on a grid, (channels, *sizes): positions, or relative-position biases.

    >>> import softequiv as se
    >>> SoftTable(se.grid(se.SO(2), 7, 7), 16, se.softness(0.5))().shape
    torch.Size([16, 7, 7])
    """

    def __init__(
        self, space: Rep, channels: int, gain: Gain = EXACT, *, std: float = 0.02, mode: Mode = "parametrize"
    ) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.zeros(channels, *space.shape))
        soften_new(self, "weight", Soft(space, gain), mode)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw anew, and start exactly equivariant."""
        (part,) = soft_weights(self)
        part.stored.copy_(self.std * torch.randn_like(part.stored))
        _start_anew(self)

    def forward(self) -> Tensor:
        table: Tensor = self.weight
        return table
