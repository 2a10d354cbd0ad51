"""How sure is a figure that was taken from samples? Intervals that hold for every number of samples where entries lie
in [0, 1], percentile bootstrap intervals, which are approximate, of any other function of column means.

Accuracy, KL and relative errors are means themselves; combined accuracy and mean IoU are functions of several means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from softequiv.asking.proportion import mean_upper, proportion_upper
from softequiv.errors import SoftEquivError

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


def interval(
    table: Tensor, statistic: Statistic = mean, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(value, low, high) of statistic(mean over samples), and about where that of all data lies with probability
    `level`.

    `table`: (n,) or (n, d), a row per sample; `statistic`: (..., d) -> (...). Samples are drawn anew with replacement
    `resamples` times, and low and high are the quantiles (1 -+ level) / 2 of the statistic over them, widened to the
    value where a skew statistic leaves it out. That is approximate: of 20 samples from an exponential law a 95%
    interval holds the mean in 89% of cases, of 200 in 95%, and from laws with longer tails in fewer.

    >>> value, low, high = interval(torch.arange(100.0))
    >>> value, low < value < high
    (49.5, True)
    """
    rows = as_rows(table)
    value = float(statistic(rows.mean(0)))
    drawn = resampled(rows, statistic, resamples, seed)
    low, high = drawn.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return value, min(low, value), max(high, value)


def exact_interval(
    table: Tensor, statistic: Statistic = mean, *, level: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """The same where all entries lie in [0, 1] and the statistic rises with the mean of every column, as `mean` and
    `combined` do: this one holds with probability `level` at least, for every n.

    Columns of 0 and 1 have the interval of Clopper & Pearson, others that of `mean_upper` for them and for what they
    lack to 1, in an order drawn from the seed; all d columns together (Bonferroni).

    >>> value, low, high = exact_interval(torch.ones(100))
    >>> value, round(low, 3), high
    (1.0, 0.964, 1.0)
    """
    rows = as_rows(table)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    each = (1 - level) / (2 * rows.shape[1])
    ends = [(1 - upper(1 - column, each), upper(column, each)) for column in rows[order].mT]
    low, high = (float(statistic(torch.tensor(end, dtype=torch.float64))) for end in zip(*ends, strict=True))
    value = float(statistic(rows.mean(0)))
    return value, min(low, value), max(high, value)


def as_rows(table: Tensor) -> Tensor:
    """A row per sample, (n, d) float64."""
    if not len(table):
        raise SoftEquivError("no samples have no interval; give a row for each sample, and at least one")
    return table.reshape(len(table), -1).double().cpu()


def upper(values: Tensor, delta: float) -> float:
    """With confidence 1 - delta the expectation of values (n,) in [0, 1] is not larger."""
    if bool(((values == 0) | (values == 1)).all()):
        return proportion_upper(int(values.sum()), len(values), delta)
    return mean_upper(values, delta)


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
