"""How small a difference between two laws a chi-square test is certain enough to see."""

import math

from scipy import optimize, stats

POWER = 0.99


def detectable_tv(n: int, num_cells: int, false_alarm: float, power: float = POWER) -> float:
    """The least total variation that n samples in ``num_cells`` cells show with probability ``power``, whatever it is.

    A law that differs from p by TV has a non-centrality of n * sum((r - p)^2 / p), which by Cauchy and Schwarz is at
    least n * (2 TV)^2: so any law at that distance, among the cells, is at least as easy to see.
    """
    freedom = num_cells - 1
    limit = stats.chi2.isf(false_alarm, freedom)

    def missing(noncentrality: float) -> float:
        return float(stats.ncx2.sf(limit, freedom, noncentrality)) - power

    needed = optimize.brentq(missing, 1e-6, 10 * limit + 100)
    return math.sqrt(needed / n) / 2
