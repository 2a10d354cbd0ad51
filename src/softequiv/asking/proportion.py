"""How sure is a rate that was counted, or a mean of values in [0, 1]? Bounds that hold for every number of samples: of
rates by Clopper & Pearson (1934), of means by betting (Waudby-Smith & Ramdas, 2024).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from softequiv.errors import SoftEquivError

LARGEST_BET = 0.9  # a bet of 1 is ruined by one sample at the far end of its range
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
    check_delta(delta)
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


def mean_upper(values: Tensor, delta: float) -> float:
    """With confidence 1 - delta the expectation of independent `values` (n,) in [0, 1] is not larger.

    Their order must say nothing of their sizes: shuffle samples that were sorted, for instance by class.

    A gambler who bets lambda_i on values below m owns K_t(m) = prod_{i <= t} (1 + lambda_i (m - x_i)). If the
    expectation were m or more, K would not grow on average, and would ever reach 1 / delta with probability delta at
    most (Ville): the bound is the smallest m at which it does. lambda_i = min(0.9, sqrt(2 log(1/delta) / (n s^2))) with
    s^2 the variance of the values before, so that the bound adapts to it as empirical Bernstein bounds do (Maurer &
    Pontil, 2009), and is tighter. After Waudby-Smith & Ramdas (2024), Estimating means of bounded random variables by
    betting; one-sided here, with bets that do not depend on m: K then grows with m, and bisection finds it.

    >>> mean_upper(torch.full((1000,), 0.25), 0.01) < 0.29
    True
    """
    check_delta(delta)
    x = values.detach().double().cpu()
    if x.ndim != 1 or not len(x) or not bool(((x >= 0) & (x <= 1)).all()):
        raise SoftEquivError(
            f"values are (n,) numbers in [0, 1], at least one; got shape {tuple(x.shape)}: divide them by their range"
        )
    n, wanted = len(x), math.log(1 / delta)
    steps = torch.arange(1, n + 1, dtype=torch.float64)
    means = (0.5 + x.cumsum(0)) / (steps + 1)
    spread = (0.25 + (x - means).square().cumsum(0)) / (steps + 1)
    before = torch.cat([spread.new_tensor([0.25]), spread[:-1]])  # a bet knows earlier values only
    bets = (2 * wanted / (n * before)).sqrt().clamp(max=LARGEST_BET)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        m = (low + high) / 2
        rich = float(torch.log1p(bets * (m - x)).cumsum(0).max()) >= wanted
        low, high = (low, m) if rich else (m, high)
    return high


def check_delta(delta: float) -> None:
    """Raise a sentence unless a bound may fail with this probability."""
    if not 0 < delta < 1:
        raise SoftEquivError(f"a bound fails with a probability between 0 and 1, such as 0.01; got {delta!r}")
