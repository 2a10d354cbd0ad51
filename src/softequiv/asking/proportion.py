"""How sure is a rate that was counted? Exact bounds for every number of trials (Clopper & Pearson, 1934)."""

from __future__ import annotations

import math

import torch

from softequiv.errors import SoftEquivError

HALVINGS = 60  # of [0, 1]: what is left is finer than float64


def proportion_upper(successes: int, trials: int, delta: float) -> float:
    """The p with P[Bin(trials, p) <= successes] = delta: with confidence 1 - delta the true rate is not larger.

    Clopper & Pearson (1934), one-sided; exact for every number of trials, and rounded up. A lower bound is
    1 - proportion_upper(trials - successes, trials, delta).

    >>> round(proportion_upper(0, 100, 0.01), 6) == round(1 - 0.01 ** (1 / 100), 6)
    True
    """
    if not 0 <= successes <= trials or trials < 1:
        raise SoftEquivError(f"successes are some of at least one trial; got {successes} of {trials}")
    if not 0 < delta < 1:
        raise SoftEquivError(f"a bound fails with a probability between 0 and 1, such as 0.01; got {delta!r}")
    if successes == trials:
        return 1.0
    counts = torch.arange(successes + 1, dtype=torch.float64)
    ways = math.lgamma(trials + 1) - torch.lgamma(counts + 1) - torch.lgamma(trials - counts + 1)
    low, high = successes / trials, 1.0
    for _ in range(HALVINGS):
        p = (low + high) / 2
        if p in (low, high):
            break
        tail = float(torch.logsumexp(ways + counts * math.log(p) + (trials - counts) * math.log1p(-p), 0))
        low, high = (p, high) if tail > math.log(delta) else (low, p)
    return high
