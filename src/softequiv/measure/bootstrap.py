"""How sure is a figure that was taken from samples? Percentile bootstrap intervals of any function of column means.

Accuracy, KL and relative errors are means themselves; combined accuracy and mean IoU are functions of several means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RESAMPLES = 1000  # the ends of a 95% interval are then off by about a tenth of its width
AT_ONCE = 2**22  # entries of the resampling counts that are held at a time
TRACE = 1e-9  # of the whole in every resample, so that a class which a resample misses counts as it does in the whole

Statistic = Callable[[Tensor], Tensor]


def mean(means: Tensor) -> Tensor:
    """The first column's mean: (..., d) -> (...)."""
    return means[..., 0]


def interval(
    table: Tensor, statistic: Statistic = mean, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(value, low, high) of statistic(mean over samples), samples drawn anew with replacement `resamples` times.

    `table`: (n,) or (n, d), a row per sample; `statistic`: (..., d) -> (...). low and high are the quantiles
    (1 -+ level) / 2 of the statistic over the resamples, widened to the value where a skew statistic leaves it out.

    >>> value, low, high = interval(torch.arange(100.0))
    >>> value, low < value < high
    (49.5, True)
    """
    rows = table.reshape(len(table), -1).double().cpu()
    n, generator = len(rows), torch.Generator().manual_seed(seed)
    drawn = []
    for some in torch.arange(resamples).split(max(1, AT_ONCE // n)):
        places = torch.randint(n, (len(some), n), generator=generator)
        counts = torch.zeros(len(some), n, dtype=torch.float64)
        counts.scatter_add_(1, places, torch.ones(places.shape, dtype=torch.float64))
        drawn.append(statistic(torch.lerp(counts @ rows / n, rows.mean(0), TRACE)))
    edges = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.cat(drawn).quantile(edges).tolist()
    value = float(statistic(rows.mean(0)))
    return value, min(low, value), max(high, value)
