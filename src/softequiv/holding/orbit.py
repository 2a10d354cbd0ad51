"""Which answer of any classifier does not change at all? The mean of its probabilities over an orbit."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from softequiv.actions import Acts, Moves
from softequiv.asking import tensor_of
from softequiv.asking.divergence import wide
from softequiv.errors import GroupError, SoftEquivError
from softequiv.groups import Group
from softequiv.groups.parse import as_group


class OrbitMean(nn.Module):
    """log of 1/|H| sum_{h in H} softmax(F(h x)), for a finite group H and any classifier F: invariant under H.

    Exactly so where every h permutes pixels, as quarter turns and flips do (`exact`). In training mode each sample is
    moved by one element of its own instead, one forward pass instead of |H|: the mean loss is then an upper bound of
    that of the mean answer, since -log is convex.

    As the strict part of a `Mixture` whose free part is F itself, it makes a dial of any trained model:

        p = (1 - eps) mean_h softmax(F(h x)) + eps softmax(F(x)),    TV(p(x), p(h x)) <= eps,

    from F at eps = 1 to invariant at eps = 0, whatever F has learnt; the error falls with eps and never rises.

    >>> from softequiv import C
    >>> from softequiv.actions import Pictures
    >>> mean = OrbitMean(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), C(4), Pictures()).eval()
    >>> x = torch.randn(2, 1, 4, 4)
    >>> torch.allclose(mean(x), mean(x.rot90(1, (-2, -1))), atol=1e-5)
    True
    """

    def __init__(self, model: nn.Module, group: Group | str, acts: Acts) -> None:
        super().__init__()
        group = as_group(group)
        if not math.isfinite(group.order):
            raise GroupError(
                f"a mean over an orbit needs a finite group; {group} is not: take C(4), or D(4) with flips"
            )
        self.model, self.moves = model, Moves(acts, group, elements=tuple(group.elements()))
        self.maps = [acts.by(h) for h in self.moves.elements]  # the identity comes first

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.scores(self.moves(x, self.moves.draw(len(x))))
        return self.mean_and_own(x)[0]

    def mean_and_own(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean as in eval mode, and F(x), which is one of those that it is made of: |H| forward passes for both."""
        if not torch.compiler.is_compiling():
            self.moves.acts.check(self.moves.group, x)
        own, *moved = (self.scores(moved(x)) for moved in self.maps)
        each = torch.stack([torch.log_softmax(wide(scores), 1) for scores in (own, *moved)])
        return torch.logsumexp(each, 0) - math.log(len(each)), own

    @property
    def exact(self) -> bool:
        """Whether the mean is invariant to rounding: no element resamples, so that they take an orbit to itself."""
        return self.moves.acts.exact(self.moves.group)

    def scores(self, x: Tensor) -> Tensor:
        """F(x), (N, K)."""
        found = tensor_of(self.model(x))
        if found.ndim != 2:
            raise SoftEquivError(
                f"a mean over an orbit is of class scores (N, K), which stand still; this model answers with "
                f"{tuple(found.shape)}, and what has places moves with the input"
            )
        return found

    def extra_repr(self) -> str:
        return f"group={self.moves.group}"
