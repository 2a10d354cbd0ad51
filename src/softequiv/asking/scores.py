"""Which answers are class scores, of which alone a KL can be taken?"""

from __future__ import annotations

from torch import Tensor

from softequiv.actions import Acts, Pictures, Still, Tokens
from softequiv.errors import SoftEquivError


def check_class_scores(y: Tensor, acts: Acts) -> None:
    """Raise a sentence unless answers that move so are scores of at least 2 classes: (N, K) that stand still, scores of
    tokens (N, T, K), or maps (N, K, H, W).

    >>> import torch
    >>> check_class_scores(torch.zeros(5, 10), Still())
    """
    axes = next((axes for kind, axes in ((Still, 2), (Tokens, 3), (Pictures, 4)) if isinstance(acts, kind)), None)
    if y.ndim != axes or y.shape[1 if isinstance(acts, Pictures) else -1] < 2:
        raise SoftEquivError(
            f"a KL is taken of class scores, (N, K) of at least 2 classes, which stand still, or (N, K, H, W), which "
            f"move as pictures; answers of {tuple(y.shape)} that move as {acts} are none: give divergence='squared'"
        )
