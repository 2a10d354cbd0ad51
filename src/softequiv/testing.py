"""Is this function equivariant? A measured worst case, and an assertion for your tests with a tolerance by dtype.

Group elements act in float64 whatever the function computes in, so that what is measured is the function's own error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from softequiv.actions import Acts, Vectors
from softequiv.asking import check_finite, evaluating
from softequiv.errors import SoftEquivError, check_count
from softequiv.groups import Element, Group
from softequiv.groups.parse import as_group
from softequiv.measure.elements import as_range, drawn_moves
from softequiv.measure.frame import inside, norms
from softequiv.reps import Rep

# Relative errors that rounding alone may cause in a network of usual depth, and that a broken symmetry exceeds by far.
TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-9,  # sums keep 13 digits or more; bases of spectra are known to about 1e-12
    torch.float32: 1e-4,  # 1000 units of rounding: sums over thousands of terms, a few layers deep
    torch.float16: 1e-2,  # 10 units of rounding: half-precision layers sum in float32, and round once each
    torch.bfloat16: 8e-2,  # the same 10 units
}


def equivariance_error(
    fn: Callable[[Tensor], Tensor],
    group: Group | str,
    rep_in: Rep | Acts,
    rep_out: Rep | Acts,
    *,
    inputs: Tensor | None = None,
    samples: int = 8,
    elements: int = 16,
    within: float | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """The largest ||f(g x) - g f(x)|| / ||f(x)|| over drawn samples x and group elements g.

    A representation acts by rho(g) on the trailing axes (N, ..., *rep.shape) of what `fn` takes and gives; any action
    on data, such as `Pictures()`, does as well; where entries leave its frame, both norms are over the valid ones.

    Args:
        inputs: the samples themselves, (N, ...); without them they are `samples` standard normal vectors of `rep_in`.
        elements: how many group elements other than the identity are drawn; a finite group with no more than that is
            tried whole.
        within: draw elements of at most this path length or angle, such as `degrees(30)`.
        dtype: what `fn` computes in; without it that of a module's first parameter, of the inputs, or float64.
        generator: source of samples and elements; without it the same ones are drawn at every call.

    A module runs in eval mode without gradients, on its own device, and gets its mode back.

    >>> from softequiv import SO, scalar, vector
    >>> equivariance_error(lambda x: x.norm(dim=-1, keepdim=True), SO(3), vector(SO(3)), scalar(SO(3))) < 1e-12
    True
    """
    return _worst(fn, group, rep_in, rep_out, inputs, samples, elements, within, dtype, generator)[0]


def assert_equivariant(
    fn: Callable[[Tensor], Tensor],
    group: Group | str,
    rep_in: Rep | Acts,
    rep_out: Rep | Acts,
    *,
    tolerance: float | None = None,
    inputs: Tensor | None = None,
    samples: int = 8,
    elements: int = 16,
    within: float | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Raise AssertionError where `equivariance_error` exceeds the tolerance, by default that of `TOLERANCE`.

    >>> from softequiv import SO, vector
    >>> assert_equivariant(torch.nn.Identity(), SO(2), vector(SO(2)), vector(SO(2)))
    """
    error, worst, used = _worst(fn, group, rep_in, rep_out, inputs, samples, elements, within, dtype, generator)
    allowed = TOLERANCE[used] if tolerance is None else tolerance
    if not error <= allowed:
        name = type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__name__", repr(fn))
        raise AssertionError(
            f"{name} is not equivariant under {group}: at the element {worst}, ||f(g x) - g f(x)|| / ||f(x)|| is "
            f"{error:.3g}, above the tolerance {allowed:.3g} in {str(used).removeprefix('torch.')}"
        )


def _worst(
    fn: Callable[[Tensor], Tensor],
    group: Group | str,
    rep_in: Rep | Acts,
    rep_out: Rep | Acts,
    inputs: Tensor | None,
    samples: int,
    elements: int,
    within: float | str | None,
    dtype: torch.dtype | None,
    generator: torch.Generator | None,
) -> tuple[float, Element, torch.dtype]:
    """The largest error, the element at which it occurs, and the dtype it was measured in."""
    check_count("samples", samples)
    check_count("elements", elements)
    generator = generator or torch.Generator().manual_seed(0)
    group = as_group(group)
    before, after = (_as_action(space) for space in (rep_in, rep_out))
    device, own = _home(fn)
    if inputs is None:
        if not isinstance(rep_in, Rep):
            raise SoftEquivError(f"{rep_in} does not say how large its data are; give samples as inputs=")
        inputs = torch.randn(samples, *rep_in.shape, dtype=torch.float64, generator=generator)
        dtype = dtype or own or torch.float64
    elif not isinstance(inputs, Tensor) or inputs.is_complex():
        raise SoftEquivError(f"inputs must be a real tensor (N, ...); got {getattr(inputs, 'dtype', type(inputs))}")
    elif inputs.numel() == 0:
        raise SoftEquivError(f"there is nothing to test on: inputs are of shape {tuple(inputs.shape)}")
    else:
        dtype = dtype or own or (inputs.dtype if inputs.is_floating_point() else torch.float64)
    if dtype not in TOLERANCE:
        raise SoftEquivError(f"equivariance is tested in {', '.join(map(str, TOLERANCE))}; got {dtype}")
    # x is rounded first, so that both f(x) and f(g x) start from one x
    device = device or inputs.device
    x = inputs.detach().cpu().to(dtype).double() if inputs.is_floating_point() else inputs.detach().cpu()
    check_finite(x, "inputs", "look for broken samples")
    moves = _moves(group, elements, as_range(group, within), generator)

    def answer(data: Tensor) -> Tensor:
        found = fn(data.to(device, dtype if data.is_floating_point() else data.dtype, copy=True))
        if not isinstance(found, Tensor):
            raise SoftEquivError(
                f"the function must give a tensor; got {type(found).__name__}: wrap it, for "
                "instance as lambda x: model(x).logits"
            )
        if found.is_complex():
            raise SoftEquivError(f"the function must give real numbers; got {found.dtype}: view them as real first")
        if found.shape[:1] != data.shape[:1]:
            raise SoftEquivError(
                f"{len(data)} samples gave an answer of shape {tuple(found.shape)}; the first axis must be the samples'"
            )
        check_finite(found, "the function's answers", "look for overflow")
        return found.to("cpu", torch.float64, copy=True)

    with evaluating(fn) if isinstance(fn, nn.Module) else torch.no_grad():
        before.check(group, x[0])
        y = answer(x)
        after.check(group, y[0])
        errors = [(_relative(answer(before(x, g)), after(y, g), y, inside(after, y, g)), g) for g in moves]
    error, worst = max(errors, key=lambda pair: pair[0])
    return error, worst, dtype


def _relative(found: Tensor, expected: Tensor, y: Tensor, valid: Tensor | None) -> float:
    """max over samples of ||found - expected|| / ||y||; / ||expected|| with both over the valid entries; 0 / 0 = 0."""
    if found.shape != expected.shape:
        raise SoftEquivError(f"f(x) is of shape {tuple(expected.shape)}, f(g x) of {tuple(found.shape)}")
    moved, size = norms(found - expected, valid), norms(y if valid is None else expected, valid)
    return float(torch.where(moved > 0, moved / size, 0.0).max())


def _moves(group: Group, count: int, within: float | None, generator: torch.Generator) -> list[Element]:
    if 1 < group.order <= count:
        reach = group.covering_radius if within is None else group.reach(within)
        return [g for g in group.elements() if 0 < g.length <= reach + 1e-9]
    return drawn_moves(group, within, count, generator)


def _as_action(space: Rep | Acts) -> Acts:
    if not isinstance(space, (Rep, Acts)):
        raise SoftEquivError(f"data move by a representation, or by an action such as Pictures(); got {space!r}")
    return Vectors(space) if isinstance(space, Rep) else space


def _home(fn: object) -> tuple[torch.device | None, torch.dtype | None]:
    """Where a module lives, and the dtype of its first floating-point parameter."""
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    floating = [parameter for parameter in parameters if parameter.is_floating_point()]
    return (floating[0].device, floating[0].dtype) if floating else (None, None)
