"""How much may a group convolution depart from its group? Relaxed lifting and group convolutions (Wang, Walters and
Yu 2022, "Approximately Equivariant Networks for Imperfectly Symmetric Dynamics").

L filters take the place of one, mixed by coefficients that depend on the element g whose answer is computed:

    K(g, h) = sum_l w_l(g) rho(g) psi_l(g^-1 h)        lifting: K(g) = sum_l w_l(g) rho(g) psi_l.

Equal coefficients for all g give the strict layer, and training starts there; L = |G| filters reach every kernel. For
shifts g is a place, and the strict layer an ordinary convolution.
What we changed: filters turn by the library's rotation of pixels, the groups include D(n), coefficients start at
L^(-1/2), which keeps the scale of one filter, and with L = 1 the coefficient is held, so that one bank is the strict
network. The paper prints w_l(h), of the element read from; lifting reads from none, and the layers that its authors
released later (Wang et al. 2024, "Discovering Symmetry Breaking in Physical Systems with Relaxed Group Convolution")
have w_l(g), of the one written to, as here. With |G| filters both reach every kernel; with fewer, not the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from softequiv.baselines.group_cnn import GroupCNN, GroupConv2d, LiftingConv2d, numbered
from softequiv.errors import SoftEquivError, check_count
from softequiv.groups import Group, matrix_key
from softequiv.reps import Action


def checked_banks(banks: int) -> int:
    """A number of filter banks."""
    if not isinstance(banks, int) or banks < 1:
        raise SoftEquivError(f"a relaxed convolution mixes at least one bank of filters; got banks={banks!r}")
    return banks


def equal_coefficients(banks: int, places: int) -> nn.Parameter:
    """w_l(g) = L^(-1/2) for all, (L, places); held where there is one bank."""
    return nn.Parameter(torch.full((banks, places), banks**-0.5), requires_grad=banks > 1)


class _RelaxedConv2d(nn.Module):
    """A strict layer of L times as many outputs, whose expanded kernels are mixed before they are applied."""

    strict: ClassVar[type[LiftingConv2d | GroupConv2d]]
    neighbours: Tensor

    def __init__(
        self,
        group: Group,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        banks: int,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.banks = checked_banks(banks)
        self.filters = self.strict(group, in_channels, banks * out_channels, kernel_size, bias=False, **options)
        self.coefficients = equal_coefficients(banks, self.filters.order)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.register_buffer("neighbours", neighbours(group), persistent=False)

    def differences(self) -> Tensor:
        """w_l(g) - w_l(g s) for all elements g and steps s, all in a row."""
        return (self.coefficients[:, None] - self.coefficients[:, self.neighbours]).flatten()

    def expanded(self) -> Tensor:
        """The kernel of the ordinary convolution, (out |G|, in sources, k, k)."""
        kernels = self.filters.expanded()
        each = kernels.reshape(self.banks, -1, self.filters.order, *kernels.shape[1:])
        return torch.einsum("lg,logixy->ogixy", self.coefficients, each).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.filters.convolve(x, self.expanded(), self.bias)


class RelaxedLiftingConv2d(_RelaxedConv2d):
    """From plain pictures to feature maps on the group, (N, in, H, W) to (N, out, |G|, H', W').

    >>> from softequiv import C
    >>> RelaxedLiftingConv2d(C(4), 3, 8, 5, banks=2, padding=2)(torch.randn(2, 3, 9, 9)).shape
    torch.Size([2, 8, 4, 9, 9])
    """

    strict = LiftingConv2d


class RelaxedGroupConv2d(_RelaxedConv2d):
    """From feature maps to feature maps on the group, (N, in, |G|, H, W) to (N, out, |G|, H', W').

    It stores L in out |G| k^2 + L |G| numbers, L times those of `GroupConv2d`; inference costs the same.

    >>> from softequiv import C
    >>> RelaxedGroupConv2d(C(4), 3, 8, 5, banks=2, padding=2)(torch.randn(2, 3, 4, 9, 9)).shape
    torch.Size([2, 8, 4, 9, 9])
    """

    strict = GroupConv2d


class RelaxedConv2d(nn.Module):
    """An ordinary convolution relaxed over places: out(x) = sum_l w_l(x) sum_z psi_l(z) f(x + z).

    (N, in, H, W) to (N, out, *sizes), with the answer's `sizes` (H', W') given beforehand, as each place has its own
    coefficients, which all channels share; `options` are those of `nn.Conv2d`. L = H' W' filters reach every locally
    connected layer.

    >>> RelaxedConv2d(3, 8, 5, (9, 9), banks=2, padding=2)(torch.randn(2, 3, 9, 9)).shape
    torch.Size([2, 8, 9, 9])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        sizes: tuple[int, int],
        *,
        banks: int,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        for size in sizes:
            check_count("a size of the answer", size)
        self.banks, self.sizes = checked_banks(banks), sizes
        self.filters = nn.Conv2d(in_channels, banks * out_channels, kernel_size, bias=False, **options)
        self.coefficients = equal_coefficients(banks, math.prod(sizes))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    def differences(self) -> Tensor:
        """w_l(x) - w_l(x'), x' the next place on the right or below inside the frame, all in a row."""
        grid = self.coefficients.unflatten(1, self.sizes)
        return torch.cat([grid.diff(dim=1).flatten(), grid.diff(dim=2).flatten()])

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.filters.in_channels:
            raise SoftEquivError(f"pictures are (N, {self.filters.in_channels}, H, W); got {tuple(x.shape)}")
        each = self.filters(x)
        if tuple(each.shape[-2:]) != tuple(self.sizes):
            raise SoftEquivError(
                f"the coefficients are for answers of {self.sizes[0]} x {self.sizes[1]} pixels; got "
                f"{each.shape[-2]} x {each.shape[-1]}: build the layer with sizes={tuple(each.shape[-2:])}"
            )
        coefficients = self.coefficients.unflatten(1, self.sizes)
        banks = each.unflatten(1, (self.filters.groups, self.banks, -1))  # torch's groups own consecutive channels
        mixed = torch.einsum("lhw,nglohw->ngohw", coefficients, banks).flatten(1, 2)
        return mixed if self.bias is None else mixed + self.bias[:, None, None]


class RelaxedGroupCNN(GroupCNN):
    """`GroupCNN` with relaxed convolutions, strict at the start and, with one bank, for good.

    >>> from softequiv import C
    >>> RelaxedGroupCNN(C(4), 1, 10, banks=3, widths=(4, 8))(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        group: Group,
        in_channels: int,
        classes: int,
        banks: int,
        widths: Sequence[int] = (16, 32, 64),
        kernel_size: int = 5,
        *,
        action: Action = "exact",
    ) -> None:
        super().__init__(
            group,
            in_channels,
            classes,
            widths,
            kernel_size,
            lifting=partial(RelaxedLiftingConv2d, banks=banks),
            convolution=partial(RelaxedGroupConv2d, banks=banks),
            action=action,
        )


def neighbours(group: Group) -> Tensor:
    """The number of g s for every element g and step s, (steps, |G|) int64.

    >>> from softequiv import C
    >>> neighbours(C(3))
    tensor([[1, 2, 0]])
    """
    matrices, number = numbered(group)
    return torch.tensor([[number[matrix_key(g @ step)] for g in matrices] for step in group.steps])


def weight_sharing_penalty(model: nn.Module) -> Tensor:
    """The sum over relaxed layers of mean |w_l(g) - w_l(g s)| over banks l, elements g and steps s of the group; for
    shifts g is a place, and g s the next one on the right or below, inside the frame.

    The paper's regulariser, the mean step between neighbouring weights, on these coefficients: added to the loss with a
    factor, it pulls them together; zero where the model is strict.

    >>> from softequiv import C
    >>> weight_sharing_penalty(RelaxedLiftingConv2d(C(4), 1, 2, 3, banks=2)).item()
    0.0
    """
    layers = [layer for layer in model.modules() if isinstance(layer, (_RelaxedConv2d, RelaxedConv2d))]
    if not layers:
        raise SoftEquivError(f"{type(model).__name__} has no relaxed convolution, so no coefficients to pull together")
    differences = [layer.differences().abs() for layer in layers]
    return torch.stack([each.sum() / max(1, each.numel()) for each in differences]).sum()  # one place has no neighbour
