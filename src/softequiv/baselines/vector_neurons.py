"""What is a network whose neurons are vectors? Layers on features (N, ..., C, d), C vectors of R^d that turn together.

Deng, Litany, Duan, Poulenard, Tagliasacchi and Guibas 2021, "Vector Neurons: A General Framework for SO(3)-Equivariant
Networks". Every layer commutes exactly with SO(n) or O(n), which act on the last axis. What is changed here: the
linear maps of SO(2) also turn by a right angle, and normalisation and attention are those that a transformer needs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from softequiv.errors import RepresentationError, SoftEquivError, check_count, checked_number
from softequiv.groups import SO, Group, O
from softequiv.nn.nonlinear import SHORTEST, at_least_float32


def vector_size(group: Group) -> int:
    """d, the coordinates of a vector that the group turns.

    >>> vector_size(SO(3))
    3
    """
    if not isinstance(group, (SO, O)):
        raise RepresentationError(f"vector neurons turn by SO(n) or O(n); got {group}: use SoftLinear for other groups")
    return group.n


def quarter_turn(x: Tensor) -> Tensor:
    """J x = (-x_2, x_1): (..., 2) to (..., 2), which commutes with the rotations of the plane but not its reflections.

    >>> quarter_turn(torch.tensor([1.0, 2.0]))
    tensor([-2.,  1.])
    """
    return torch.stack([-x[..., 1], x[..., 0]], -1)


class VNLinear(nn.Module):
    """Every linear map that commutes with the group: y_i = sum_j W_ij x_j, and for SO(2) also + V_ij J x_j.

    (N, ..., in, d) to (N, ..., out, d), no bias. By Schur's lemma the maps from vector to vector that commute with
    O(n), or SO(n) for n > 2, are the multiples of the identity; those of SO(2) are the complex numbers W + iV. The
    layers of the paper, multiples of the identity in the plane too, are those of O(2): they cannot tell left from
    right.

    >>> VNLinear(4, 8, SO(3))(torch.randn(5, 4, 3)).shape
    torch.Size([5, 8, 3])
    """

    def __init__(self, in_channels: int, out_channels: int, group: Group) -> None:
        super().__init__()
        if min(in_channels, out_channels) < 1:
            raise SoftEquivError(f"a layer needs at least one vector in and out; got {in_channels} and {out_channels}")
        self.in_channels, self.size, self.turns = in_channels, vector_size(group), group == SO(2)
        self.mix = nn.Linear(in_channels * (2 if self.turns else 1), out_channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.in_channels, self.size):
            raise SoftEquivError(
                f"this layer takes {self.in_channels} vectors of {self.size} coordinates, (N, ..., {self.in_channels}, "
                f"{self.size}); got a tensor of {tuple(x.shape)}"
            )
        parts = torch.cat([x, quarter_turn(x)], -2) if self.turns else x
        mixed: Tensor = self.mix(parts.mT)
        return mixed.mT


class VNReLU(nn.Module):
    """Cut off what points against a learned direction: a x + (1 - a) (x - min(0, <x, k>) k / |k|^2), k = U x.

    (N, ..., C, d) to the same; a = `slope`, 0.2 as in the paper's leaky form, 0 for its ReLU.

    >>> VNReLU(4, SO(3))(torch.randn(5, 4, 3)).shape
    torch.Size([5, 4, 3])
    """

    def __init__(self, channels: int, group: Group, slope: float = 0.2) -> None:
        super().__init__()
        slope = checked_number(slope, "the slope of a leaky cut", SoftEquivError)
        if not 0 <= slope <= 1:
            raise SoftEquivError(f"the slope of a leaky cut lies in 0 (cut all) to 1 (cut nothing); got {slope!r}")
        self.slope = slope
        self.directions = VNLinear(channels, channels, group)

    def forward(self, x: Tensor) -> Tensor:
        k = at_least_float32(self.directions(x))
        along = (x * k).sum(-1, keepdim=True).clamp(max=0) / k.square().sum(-1, keepdim=True).clamp(min=SHORTEST**2)
        return (x - (1 - self.slope) * along * k).to(x.dtype)


class VNNorm(nn.Module):
    """Bring the lengths of the C vectors of a token to one scale: x_i -> s_i x_i / sqrt(mean_j |x_j|^2 + f^2).

    (N, ..., C, d) to the same, with a learned factor s_i per vector and a learned floor f. The paper normalises over
    the batch, a transformer over the token; without the floor, which starts at 1, that would make a slow and a fast
    walker the same, as there are no constants among the vectors that a length could be compared with.

    >>> VNNorm(4)(torch.randn(5, 4, 3)).shape
    torch.Size([5, 4, 3])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        check_count("channels", channels)
        self.scale = nn.Parameter(torch.ones(channels, 1))
        self.floor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[-2] != len(self.scale) or not x.is_floating_point():
            raise SoftEquivError(
                f"this layer takes {len(self.scale)} floating-point vectors, (N, ..., {len(self.scale)}, d); got a "
                f"tensor of {tuple(x.shape)}, {x.dtype}"
            )
        wide = at_least_float32(x)
        mean_square = wide.square().sum(-1, keepdim=True).mean(-2, keepdim=True)
        return (wide * self.scale * torch.rsqrt(mean_square + self.floor**2 + SHORTEST**2)).to(x.dtype)


class VNInvariant(nn.Module):
    """Numbers that do not turn: all inner products <x_i, t_j> with a frame t = T x of `frame` learned vectors.

    (N, ..., C, d) to (N, ..., C frame); as many as coordinates by default, as in the paper.

    >>> VNInvariant(4, SO(3))(torch.randn(5, 4, 3)).shape
    torch.Size([5, 12])
    """

    def __init__(self, channels: int, group: Group, frame: int | None = None) -> None:
        super().__init__()
        frame = vector_size(group) if frame is None else frame
        self.frame = nn.Sequential(
            VNLinear(channels, channels, group), VNReLU(channels, group), VNLinear(channels, frame, group)
        )

    def forward(self, x: Tensor) -> Tensor:
        products: Tensor = x @ self.frame(x).mT
        return products.flatten(-2)


class VNAttention(nn.Module):
    """Multi-head attention between tokens of vectors: softmax_s(<q_t, k_s> / sqrt(C d / heads) + bias_ts) v_s.

    (N, T, C, d) to the same. <q, k> = sum_i q_i . k_i is Frobenius' inner product over the vectors of a head, which
    no rotation changes. `bias`, (heads, T, T), is added to the logits; with `causal` a token sees none after it.

    >>> VNAttention(8, 2, SO(3), causal=True)(torch.randn(5, 6, 8, 3)).shape
    torch.Size([5, 6, 8, 3])
    """

    def __init__(self, channels: int, heads: int, group: Group, *, causal: bool = False) -> None:
        super().__init__()
        if heads < 1 or channels % heads:
            raise SoftEquivError(f"{channels} vectors cannot be shared out among {heads} heads; choose a multiple")
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (VNLinear(channels, channels, group) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.ndim != 4:
            raise SoftEquivError(f"tokens of vectors are (N, T, C, d); got a tensor of {tuple(x.shape)}")
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        if bias is not None and self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            bias = bias.masked_fill(later, -math.inf)
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if bias is None else bias.to(query.dtype),
            is_causal=self.causal and bias is None,
        )
        joined: Tensor = self.out(mixed.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2).flatten(2, 3))
        return joined

    def _split(self, x: Tensor) -> Tensor:
        """(N, T, C, d) to (N, heads, T, C d / heads)."""
        split: Tensor = x.unflatten(2, (self.heads, -1))
        return split.transpose(1, 2).flatten(3)
