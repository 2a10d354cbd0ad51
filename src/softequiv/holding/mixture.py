"""What bounds the change of an answer, whatever the network does inside? Mixing probabilities: a free part that holds a
share eps of them can move no more than that share.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from softequiv.actions import Acts, Pictures
from softequiv.asking.answers import tensor_of
from softequiv.asking.divergence import wide
from softequiv.errors import SoftEquivError, checked_number
from softequiv.groups import Group
from softequiv.holding.orbit import OrbitMean
from softequiv.nn.module import check_module


class Mixture(nn.Module):
    """Class probabilities (1 - eps) softmax(strict(h)) + eps softmax(free(h)), h = trunk(x), as logarithms.

    Logits are (N, K, ...), and log-probabilities, in float32 at least, are logits of themselves, so every loss and
    metric takes them. For a group that moves inputs and leaves classes alone,

        TV(p(x), p(g x)) <= (1 - eps) tv_strict + eps tv_free <= eps + (1 - eps) tv_strict,

    whatever the free part is, and a free part that changes its mind altogether attains it: see `bound`. A class leads
    at g x as at x where its probability at x leads by more than twice the bound.

    It costs the forward passes of both parts. With a `trunk` that both share it costs the trunk and two heads: where
    the trunk is equivariant, its pooled features are invariant and make the strict head (pool, then linear), and its
    features as they are the free one (flatten, then linear). What is exact is strict(trunk(.)) as a whole: that is what
    tv_strict must be known of.

    >>> from softequiv.holding import total_variation
    >>> pooled, whole = nn.Linear(4, 3), nn.Linear(4 * 9, 3)
    >>> strict = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), pooled)
    >>> mixture = Mixture(strict, nn.Sequential(nn.Flatten(), whole), eps=0.1, trunk=nn.Conv2d(1, 4, 1))
    >>> x = torch.randn(5, 1, 3, 3)
    >>> bool((total_variation(mixture(x), mixture(x.rot90(1, (-2, -1)))) <= mixture.bound() + 1e-6).all())
    True
    """

    def __init__(self, strict: nn.Module, free: nn.Module, eps: float, trunk: nn.Module | None = None) -> None:
        super().__init__()
        trunk = nn.Identity() if trunk is None else trunk
        for part in (strict, free, trunk):
            check_module(part, "parts must be torch modules")
        self.strict, self.free, self.eps = strict, free, float(checked_number(eps, "eps", SoftEquivError))
        if not 0 <= self.eps <= 1:
            raise SoftEquivError(f"eps is the share of the free part, from 0 to 1; got {eps!r}")
        self.trunk = trunk

    @classmethod
    def over_orbit(cls, model: nn.Module, group: Group | str, eps: float, acts: Acts | None = None) -> Mixture:
        """A dial of any classifier: eps of its answer, the rest averaged over a finite group, `OrbitMean`.

        Under quarter turns of pictures (`group` "C4", how `acts` moves them unless you say otherwise) the answer then
        changes by exactly eps of what the model's does. It costs as many forward passes as the group has elements, as
        the model's own answer is one of those averaged, and two in training mode.

        >>> dial = Mixture.over_orbit(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "C4", eps=0.1).eval()
        >>> dial.bound()
        0.1
        """
        return cls(OrbitMean(model, group, Pictures() if acts is None else acts), model, eps)

    def forward(self, x: Tensor) -> Tensor:
        strict, free = map(wide, self._answers(self.trunk(x)))  # in half precision the mixture rounds beyond its bound
        if strict.shape != free.shape:
            raise SoftEquivError(
                f"both parts must answer alike; the strict one gave {tuple(strict.shape)} and the free one "
                f"{tuple(free.shape)}"
            )
        if self.eps in (0.0, 1.0):  # log 0 has no gradient
            return torch.log_softmax(free if self.eps else strict, 1)
        kept, let = (torch.log_softmax(part, 1) for part in (strict, free))
        return torch.logaddexp(math.log1p(-self.eps) + kept, math.log(self.eps) + let)

    def _answers(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the strict part and of the free one."""
        strict = self.strict
        if isinstance(strict, OrbitMean) and strict.model is self.free and not strict.training:
            return strict.mean_and_own(features)
        return tensor_of(strict(features)), tensor_of(self.free(features))

    def bound(self, tv_strict: float | None = None) -> float:
        """eps + (1 - eps) tv_strict: the most that an answer in eval mode can change, in total variation.

        `tv_strict` bounds that of the strict part. Without it the strict part is taken to be exactly invariant, which
        is refused for an `OrbitMean` over turns that resample: their orbits are not closed.
        """
        if tv_strict is None and isinstance(self.strict, OrbitMean) and not self.strict.exact:
            raise SoftEquivError(
                f"pictures turned by {self.strict.moves.group} are read between pixels, so that the mean over an orbit "
                "is only nearly invariant and eps bounds nothing; take C4 or D4, or say with bound(tv_strict) by how "
                "much the mean can change"
            )
        tv = 0.0 if tv_strict is None else float(checked_number(tv_strict, "a total variation", SoftEquivError))
        if not 0 <= tv <= 1:
            raise SoftEquivError(f"a total variation lies between 0 and 1; got {tv_strict!r}")
        return self.eps + (1 - self.eps) * tv

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}"
