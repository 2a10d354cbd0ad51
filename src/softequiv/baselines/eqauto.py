"""What does a forecaster look like that cannot tell directions apart? An autoregressive transformer of vector neurons.

It commutes exactly with the rotations, in free running too: forecasts of turned tracks are turned forecasts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from softequiv.baselines.autoregressive import Autoregressive
from softequiv.baselines.vector_neurons import VNAttention, VNLinear, VNNorm, VNReLU, vector_size
from softequiv.errors import SoftEquivError, check_count
from softequiv.groups import SO, Group

SPAN = 32  # steps back that attention tells apart; tracks in use are of 20
EXPANSION = 4  # hidden vectors per vector of the stream


class EqAuto(Autoregressive):
    """EqAuto of the paper: causal layers x + attention(norm x), x + mlp(norm x) on `width / d` vectors per step.

    `width` counts coordinates, so that networks of one width have streams of one size. Vectors have no place for a
    code of time; each head instead learns a number per step back, added to its logits. SO(2) has all linear maps that
    commute with rotations; O(2) has the real ones of Deng et al. 2021, which commute with reflections as well.

    >>> EqAuto(SO(3), width=24, layers=1).forecast(torch.randn(5, 8, 3), 12).shape
    torch.Size([5, 12, 3])
    """

    def __init__(self, group: Group | None = None, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.group = group or SO(2)
        check_count("layers", layers)
        check_count("heads", heads)
        size = vector_size(self.group)
        if width < 1 or width % (size * heads):
            raise SoftEquivError(
                f"a width of {width} does not hold the same number of vectors of {size} coordinates for each of "
                f"{heads} heads; choose a multiple of {size * heads}"
            )
        channels = width // size
        self.embed = VNLinear(1, channels, self.group)
        self.layers = nn.ModuleList(EqLayer(channels, heads, self.group) for _ in range(layers))
        self.head = VNLinear(channels, 1, self.group)

    def change(self, displacements: Tensor) -> Tensor:
        x = self.embed(displacements[:, :, None])  # (N, T, channels, d)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found[:, :, 0]


class EqLayer(nn.Module):
    """One causal transformer layer on vectors, (N, T, C, d) to the same."""

    def __init__(self, channels: int, heads: int, group: Group) -> None:
        super().__init__()
        self.before = VNNorm(channels)
        self.attention = VNAttention(channels, heads, group, causal=True)
        self.steps_back = nn.Parameter(torch.zeros(heads, SPAN))
        hidden = EXPANSION * channels
        self.mlp = nn.Sequential(
            VNNorm(channels),
            VNLinear(channels, hidden, group),
            VNReLU(hidden, group),
            VNLinear(hidden, channels, group),
        )

    def forward(self, x: Tensor) -> Tensor:
        times = torch.arange(x.shape[1], device=x.device)
        back = (times[:, None] - times).clamp(0, SPAN - 1)
        x = x + self.attention(self.before(x), self.steps_back[:, back])
        grown: Tensor = x + self.mlp(x)
        return grown
