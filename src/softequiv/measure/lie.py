"""How fast does a model leave equivariance at the identity? Its Lie derivative, for groups with Lie generators.

L_i F(x) = d/dt [g_t^-1 F(g_t x)] at t = 0, with g_t = exp(t A_i); zero for all x where F is equivariant under the
connected group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from softequiv.actions import Acts
from softequiv.errors import SoftEquivError
from softequiv.groups import Element, Group
from softequiv.measure.frame import inside, norms

STEP = 1e-5  # of the central difference, in float64: an interpolated picture has a kink in its second derivative


def flows(group: Group) -> list[Element]:
    """exp(STEP A_i) for every Lie generator."""
    k, m = len(group.lie), len(group.steps)
    return [group.element(*(STEP * (j == i) for j in range(k + m))) for i in range(k)]


def velocity(acts: Acts, x: Tensor, g: Element) -> Tensor:
    """d/dt (g_t x) at 0 by a central difference of the action in float64, g = g_STEP: the shape and dtype of x."""
    if getattr(acts, "interpolation", "") == "nearest":
        raise SoftEquivError("nearest interpolation moves pixels by jumps and has no derivative")
    wide = x.double()
    return ((acts(wide, g) - acts(wide, g.inverse)) / (2 * STEP)).to(x.dtype)


def lie_derivative(fn: Callable[[Tensor], Tensor], x: Tensor, group: Group, acts: Acts, target: Acts) -> Tensor:
    """sqrt(sum_i ||L_i F(x_n)||^2) for every sample: x (N, ...) -> (N,).

    L_i F(x) = J_F(x) (A_i x) - A_i F(x): the model by a forward derivative (jvp), the two actions by central
    differences. Places of the answer that leave the frame are left out (`staying`).

    >>> from softequiv import SO
    >>> from softequiv.actions import Points, Still
    >>> speed = lie_derivative(lambda x: x[:, 0], torch.tensor([[[3.0, 4.0]]]), SO(2), Points(), Still())
    >>> round(float(speed), 3)  # the point moves at its distance from the centre
    5.0
    """
    squares = torch.zeros(len(x), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for g in flows(group):
        speed = velocity(acts, x, g)
        try:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no forward derivative
                y, pushed = torch.func.jvp(fn, (x,), (speed,), strict=True)[:2]
        except (RuntimeError, SoftEquivError) as problem:
            reason = str(problem.__cause__ or problem).splitlines()[0]
            raise SoftEquivError(f"the model has no forward derivative ({reason})") from problem
        squares += norms(pushed - velocity(target, y, g), staying(y, group, target)).square()
    return squares.sqrt()


def staying(y: Tensor, group: Group, target: Acts) -> Tensor | None:
    """Which entries of an answer no generator moves out of the frame; None where all stay."""
    return inside(target, y, *(move for g in flows(group) for move in (g, g.inverse)))
