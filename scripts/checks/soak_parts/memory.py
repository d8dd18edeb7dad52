"""Tells whether a server's memory grows: the slope of a line fitted to its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

WARM_UP = 1 / 3  # of a turn, in which caches fill and kernels are prepared
MIN_SAMPLES = 6  # samples behind that which say something
SURE = 3.0  # standard errors that a slope has to be above 0
MAX_GROWTH_BYTES = 2**20  # bytes for 1,000 requests; a lost page of each would be far more


def slope(samples: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """Bytes by which memory grows in 1,000 requests, and the standard error; least squares.

    Args:
        samples: requests so far, and bytes.

    Returns:
        None where there are too few samples.
    """
    warm = samples[math.ceil(len(samples) * WARM_UP) :]
    if len(warm) < MIN_SAMPLES:
        return None
    mean_x = sum(x for x, _ in warm) / len(warm)
    mean_y = sum(y for _, y in warm) / len(warm)
    spread = sum((x - mean_x) ** 2 for x, _ in warm)
    gradient = sum((x - mean_x) * (y - mean_y) for x, y in warm) / spread
    rest = sum((y - mean_y - gradient * (x - mean_x)) ** 2 for x, y in warm)
    error = math.sqrt(rest / (len(warm) - 2) / spread)
    return 1000 * gradient, 1000 * error


def mean_slope(slopes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the mean of several turns' slopes, and its standard error."""
    mean = sum(each for each, _ in slopes) / len(slopes)
    return mean, math.sqrt(sum(error**2 for _, error in slopes)) / len(slopes)


def grows(slope_and_error: tuple[float, float]) -> bool:
    """Returns whether a slope is larger than `MAX_GROWTH_BYTES` and significant."""
    mean, error = slope_and_error
    return mean > MAX_GROWTH_BYTES and mean > SURE * error
