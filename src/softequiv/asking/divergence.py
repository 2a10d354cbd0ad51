"""How far apart are two answers of class scores? By the divergences of their probabilities, sample by sample."""

from __future__ import annotations

import torch
from torch import Tensor

from softequiv.errors import SoftEquivError


def kl_divergence(logits: Tensor, other: Tensor, dim: int = -1) -> Tensor:
    """KL[p || q] = sum_k p_k (log p_k - log q_k) in nats, p = softmax(logits), q = softmax(other) along `dim`.

    Shapes: (..., K, ...) twice to (..., ...); computed in at least float32.

    >>> kl_divergence(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0])).item()
    0.0
    """
    check_same_shape(logits, other, "logits")
    log_p, log_q = (torch.log_softmax(wide(x), dim) for x in (logits, other))
    return (log_p.exp() * (log_p - log_q)).sum(dim)


def total_variation(logits: Tensor, other: Tensor, dim: int = 1) -> Tensor:
    """TV(p, q) = 1/2 sum_k |p_k - q_k|, p = softmax(logits), q = softmax(other) along `dim`, in at least float32.

    It is the largest difference that any event's probability can have.

    >>> total_variation(torch.tensor([[0.0, 0.0]]), torch.tensor([[100.0, 0.0]]))
    tensor([0.5000])
    """
    check_same_shape(logits, other, "logits")
    p, q = (torch.softmax(wide(x), dim) for x in (logits, other))
    return (p - q).abs().sum(dim) / 2


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def check_same_shape(a: Tensor, b: Tensor, what: str) -> None:
    """Raise a sentence where two tensors cannot be compared entry by entry."""
    if a.shape != b.shape:
        raise SoftEquivError(f"{what} must have one shape; got {tuple(a.shape)} and {tuple(b.shape)}")
