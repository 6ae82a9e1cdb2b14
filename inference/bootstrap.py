"""Intervals of ratios by resampling whole requests.

Rounds of one text are alike, so an interval over rounds would be too narrow. Here requests are
drawn with replacement (a cluster bootstrap), each with all its rounds, and the interval is what the
middle 95 % of the resampled figures span. With a handful of requests it is still too narrow: fewer
than about twenty cannot show how much requests differ.

Pure: torch and the standard library.

Letters: n clusters (requests), R resamples, k columns of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RESAMPLES = 2000
LEVEL = 0.95


class Bootstrap:
    """Resamples of n clusters, the same for every figure that is asked for.

    Args:
        clusters: n.
        seed: of the resampling.
        resamples: R.
    """

    def __init__(self, clusters: int, seed: int = 0, resamples: int = RESAMPLES) -> None:
        self.clusters = clusters
        generator = torch.Generator().manual_seed(seed)
        self._times = torch.zeros(resamples, clusters, dtype=torch.float64)  # drawn how often
        if clusters:
            drawn = torch.randint(clusters, (resamples, clusters), generator=generator)
            self._times.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))

    def ratio(
        self, numerators: Sequence[float], denominators: Sequence[float]
    ) -> list[float] | None:
        """Interval of sum(numerators) / sum(denominators).

        Args:
            numerators, denominators: n sums, one per cluster.

        Returns:
            Lower and upper end; None with fewer than two clusters, or nothing to divide by.
        """
        return self.interval([numerators, denominators], lambda sums: sums[:, 0] / sums[:, 1])

    def interval(
        self, columns: Sequence[Sequence[float]], statistic: Callable[[Tensor], Tensor]
    ) -> list[float] | None:
        """Interval of any function of sums.

        Args:
            columns: k lists of n numbers, one per cluster.
            statistic: (R, k) sums -> (R,) figures; resamples without one (not finite) are left out.
        """
        if self.clusters < 2:
            return None
        table = torch.tensor(columns, dtype=torch.float64).T  # (n, k)
        figures = statistic(self._times @ table)
        figures = figures[figures.isfinite()]
        if not len(figures):
            return None
        ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
        return [float(end) for end in figures.quantile(ends)]
