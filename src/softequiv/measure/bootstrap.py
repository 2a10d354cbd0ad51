"""How sure is a figure that was taken from samples? Exact intervals of rates, percentile bootstrap intervals of any
other function of column means.

Accuracy, KL and relative errors are means themselves; combined accuracy and mean IoU are functions of several means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softequiv.asking.proportion import proportion_upper

RESAMPLES = 1000  # the ends of a 95% interval are then off by about a tenth of its width
AT_ONCE = 2**22  # entries of the resampling counts that are held at a time
TRACE = 1e-9  # of the whole in every resample, so that a class which a resample misses counts as it does in the whole

Statistic = Callable[[Tensor], Tensor]


def mean(means: Tensor) -> Tensor:
    """The first column's mean: (..., d) -> (...)."""
    return means[..., 0]


def combined(means: Tensor) -> Tensor:
    """The geometric mean of two columns' means, sqrt(a b): (..., 2) -> (...)."""
    return means.prod(-1).sqrt()


RISING = (mean, combined)  # with every column's mean


def interval(
    table: Tensor, statistic: Statistic = mean, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(value, low, high) of statistic(mean over samples), and where that of all data lies with probability `level`.

    `table`: (n,) or (n, d), a row per sample; `statistic`: (..., d) -> (...). Of columns that count, 0 or 1, `mean` and
    `combined` have intervals that hold at least so often for every n: those of Clopper & Pearson, all d together
    (Bonferroni). Else samples are drawn anew with replacement `resamples` times, and low and high are the quantiles
    (1 -+ level) / 2 of the statistic over them, widened to the value where a skew statistic leaves it out. That is
    approximate: of 20 samples from an exponential law a 95% interval holds the mean in 89% of cases, of 200 in 95%.

    >>> value, low, high = interval(torch.arange(100.0))
    >>> value, low < value < high
    (49.5, True)
    >>> value, low, high = interval(torch.ones(100))
    >>> value, round(low, 3), high
    (1.0, 0.964, 1.0)
    """
    rows = table.reshape(len(table), -1).double().cpu()
    value = float(statistic(rows.mean(0)))
    if statistic in RISING and bool(((rows == 0) | (rows == 1)).all()):
        low, high = (float(statistic(ends)) for ends in exact_ends(rows, 1 - level))
    else:
        drawn = resampled(rows, statistic, resamples, seed)
        low, high = drawn.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return value, min(low, value), max(high, value)


def exact_ends(rows: Tensor, delta: float) -> Tensor:
    """The ends (2, d) of intervals of the rates of d columns of 0 and 1, which all hold with probability 1 - delta."""
    n, each = len(rows), delta / (2 * rows.shape[1])
    counts = [int(count) for count in rows.sum(0)]
    ends = [(1 - proportion_upper(n - count, n, each), proportion_upper(count, n, each)) for count in counts]
    return torch.tensor(ends, dtype=torch.float64).mT


def resampled(rows: Tensor, statistic: Statistic, resamples: int, seed: int) -> Tensor:
    """The statistic of so many draws of n samples out of n, (resamples,)."""
    n, generator = len(rows), torch.Generator().manual_seed(seed)
    drawn = []
    for some in torch.arange(resamples).split(max(1, AT_ONCE // n)):
        places = torch.randint(n, (len(some), n), generator=generator)
        counts = torch.zeros(len(some), n, dtype=torch.float64)
        counts.scatter_add_(1, places, torch.ones(places.shape, dtype=torch.float64))
        drawn.append(statistic(torch.lerp(counts @ rows / n, rows.mean(0), TRACE)))
    return torch.cat(drawn)
