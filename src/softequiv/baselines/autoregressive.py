"""How does a network that knows the next step forecast many? By being asked again with its own answers appended.

Networks of this kind read displacements p_{t+1} - p_t, so that where a track lies does not matter, and answer at each
of them with how the one that follows will differ: an answer of 0 says that people walk on as they did, which is hard
to beat. Training shows them true tracks, all steps at once; forecasts run freely.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from softequiv.errors import SoftEquivError

STRIDE = 0.4  # metres that people walk from one step to the next, 0.4 s later: networks learn best from numbers near 1


class Autoregressive(nn.Module, ABC):
    """A model of tracks, (N, T, d) positions in metres: subclasses say how the next displacement differs from the last.

    Displacements, unlike positions relative to the last observed one, tell nothing of what is still to come, so that
    every step of a track may be learnt from.
    """

    @abstractmethod
    def change(self, displacements: Tensor) -> Tensor:
        """By how much the displacement after each of the given ones differs from it, from those up to it alone:
        (N, T, d) strides to the same."""

    def following(self, displacements: Tensor) -> Tensor:
        """The displacement after each of the given ones, d_t + change(d_1, ..., d_t): (N, T, d) strides to the same."""
        return displacements + self.change(displacements)

    def forward(self, positions: Tensor) -> Tensor:
        """The position after p_2, ..., p_T, each from the true positions up to it: (N, T, d) to (N, T - 1, d)."""
        _check_track(positions)
        return positions[:, 1:] + STRIDE * self.following(positions.diff(dim=1) / STRIDE)

    def forecast(self, past: Tensor, steps: int) -> Tensor:
        """Positions p_{T+1}, ..., p_{T+steps}, each from the past and the forecasts before it: (N, steps, d)."""
        _check_track(past)
        if not isinstance(steps, int) or steps < 1:
            raise SoftEquivError(f"a forecast has at least one step; got steps={steps!r}")
        walked = past.diff(dim=1) / STRIDE
        with parametrize.cached():  # a soft weight is filtered once, not once a step
            for _ in range(steps):
                walked = torch.cat([walked, self.following(walked)[:, -1:]], 1)
        return past[:, -1:] + STRIDE * walked[:, -steps:].cumsum(1)


class ConstantVelocity(Autoregressive):
    """The next step is as the last: p_{T+k} = p_T + k (p_T - p_{T-1}). What any forecaster should beat.

    >>> ConstantVelocity().forecast(torch.tensor([[[0.0, 0.0], [1.0, 2.0]]]), 2)
    tensor([[[2., 4.], [3., 6.]]])
    """

    def change(self, displacements: Tensor) -> Tensor:
        return torch.zeros_like(displacements)


def _check_track(positions: Tensor) -> None:
    if positions.ndim != 3 or positions.shape[1] < 2:
        raise SoftEquivError(
            f"tracks are (N, T, d) positions at two steps or more, as displacements are read; got a tensor of "
            f"{tuple(positions.shape)}"
        )
    if not positions.is_floating_point():
        raise SoftEquivError(f"positions are floating-point numbers of metres; got {positions.dtype}: convert them")
