"""Which network forecasts tracks? An autoregressive transformer, plain or with every linear map between typed features.

Giuliari, Hasan, Cristani and Galasso 2021, "Transformer Networks for Trajectory Forecasting": the paper's base model.
One class: a group and a gain turn the plain network into the soft one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from softequiv.baselines.autoregressive import Autoregressive
from softequiv.errors import RepresentationError, SoftEquivError
from softequiv.gains import Gain
from softequiv.groups import SO, Group
from softequiv.networks.transformer import Layer, norm, times
from softequiv.nn import SoftLinear
from softequiv.nn.layers import EXACT
from softequiv.reps import Rep, scalar, vector

CODES = 16  # numbers that tell a step's place in time
SLOWEST = 100.0  # the code's longest wave is 2 pi times so many steps, well beyond a track's length


class Forecaster(Autoregressive):
    """A causal transformer on displacements: tokens [d_t, code(t)], layers x + attention(norm x), x + mlp(norm x).

    Without a group it is the plain network: nn.Linear, LayerNorm, GELU. With a group and a gain every linear map
    (embedding, q, k, v, out, mlp, head) is a `SoftLinear` of that gain between scalars and vectors, half of the stream
    each, and what lies between commutes with the group: CopyNorm, Gated, lengths as extra scalars of the mlp. Then
    softness 0 is exactly equivariant, and softness 1 leaves the linear maps free.

    `typed=False` is what the paper's text asks for: its layers replace the fully connected ones of the plain network,
    whose LayerNorm and GELU stay. It does not say how features turn; here all of them are vectors. The point-wise
    functions mix a vector's coordinates, so that no gain makes this network equivariant.

    Args:
        width: numbers per step in the stream, shared out among the heads.
        group: SO(2), O(2), C(n), D(n) for tracks in the plane, SO(3), O(3) for tracks in space.
        gain: without it `softness(0)`.

    >>> from softequiv import softness
    >>> Forecaster(32, layers=1, group=SO(2), gain=softness(0.5)).forecast(torch.randn(5, 8, 2), 12).shape
    torch.Size([5, 12, 2])
    """

    def __init__(
        self,
        width: int = 64,
        layers: int = 4,
        heads: int = 4,
        group: Group | None = None,
        gain: Gain | None = None,
        *,
        typed: bool = True,
    ) -> None:
        super().__init__()
        if group is None and gain is not None:
            raise SoftEquivError(f"{gain} filters by a group, and none is given; name it, such as group=SO(2)")
        point = vector(group or SO(2))
        self.size = point.dim
        typed = typed and group is not None
        head = head_type(point, width, heads, typed)

        def maps(source: Rep, target: Rep) -> nn.Linear:
            if group is None:
                return nn.Linear(source.dim, target.dim)
            return SoftLinear(source, target, gain or EXACT)

        stream = times(heads, head)
        self.embed = maps(point + CODES * scalar(point.group), stream)
        self.layers = nn.ModuleList(Layer(head, heads, maps, typed, causal=True) for _ in range(layers))
        self.norm = norm(stream, typed)
        self.head = maps(stream, point)

    def change(self, displacements: Tensor) -> Tensor:
        samples, steps, size = displacements.shape
        if size != self.size:
            raise SoftEquivError(f"this network forecasts tracks of {self.size} coordinates; got tracks of {size}")
        code = time_code(steps, displacements).expand(samples, -1, -1)
        x = self.embed(torch.cat([displacements, code], -1))
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


def time_code(steps: int, like: Tensor) -> Tensor:
    """A vector of length 1 for each step: sin(t / w_i) and cos(t / w_i) with w_i from 1 to `SLOWEST` in equal ratios,
    divided by sqrt(CODES / 2), so that time does not drown what was walked: (steps, CODES), of the kind of `like`.

    >>> time_code(20, torch.zeros(1)).shape
    torch.Size([20, 16])
    """
    times = torch.arange(steps, device=like.device, dtype=torch.float32)
    waves = torch.logspace(0, math.log10(SLOWEST), CODES // 2, device=like.device)
    angles = times[:, None] / waves
    return (torch.cat([angles.sin(), angles.cos()], -1) / math.sqrt(CODES / 2)).to(like.dtype)


def head_type(point: Rep, width: int, heads: int, typed: bool) -> Rep:
    """The features of one head: half of the numbers scalars, half vectors; or vectors alone.

    >>> print(head_type(vector(SO(2)), 64, 4, typed=True))
    8[1]+4[V]
    """
    size = width // heads if heads > 0 and width % heads == 0 else 0
    unit = 2 * point.dim if typed else point.dim
    if size < unit or (size % unit and not typed):
        raise RepresentationError(
            f"a width of {width} does not give each of {heads} heads its own vectors of {point.dim} coordinates; "
            f"choose a multiple of {heads * unit}"
        )
    vectors = size // unit
    scalars = size - vectors * point.dim
    return scalars * scalar(point.group) + vectors * point if scalars else vectors * point
