"""An upper confidence bound of a mean loss that assumes nothing of the losses' distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
STEPS = 2000  # between 0 and the cap: bounds are multiples of one


def upper_bound(losses: Sequence[float], cap: float, confidence: float = CONFIDENCE) -> float:
    """Returns a number that the mean of the losses' distribution exceeds with 5% probability.

    The betting bound of Waudby-Smith and Ramdas (arXiv 2010.09686, Theorem 3), one-sided. Against
    every possible mean m a gambler stakes on lower losses: his capital K_t(m) = prod over i of
    (1 - l_i (x_i - m)) grows beyond 1 / (1 - confidence) with probability 1 - confidence at most
    if the mean is m or more. The stakes l_i follow from the losses before x_i and are limited to
    1 / (cap - m), so that no loss ruins him; losses have no lower limit. The bound is the smallest
    m above which all are refuted.

    Args:
        losses: of independent draws from one distribution, in the order in which they were drawn.
        cap: a larger loss counts as this much, so the bound is one of the mean of capped losses.
        confidence: probability with which the bound holds.
    """
    if not losses:
        return cap
    x = np.minimum(np.asarray(losses, dtype=float), cap) / cap
    means = np.arange(1, STEPS) / STEPS
    stakes = np.minimum(_stakes(x, 1 - confidence)[:, None], 1 / (1 - means))
    with np.errstate(divide="ignore"):
        capital = np.cumsum(np.log(np.maximum(0, 1 - stakes * (x[:, None] - means))), axis=0)
    refuted = capital.max(axis=0) >= -math.log(1 - confidence)
    not_refuted = np.flatnonzero(~refuted)
    smallest = 0 if not len(not_refuted) else not_refuted[-1] + 1
    return float(cap * (smallest + 1) / STEPS)


def _stakes(x: np.ndarray, error: float) -> np.ndarray:
    """The stake on each loss, from the variance of those before it (the paper's equation 26)."""
    counts = np.arange(1, len(x) + 1)
    means = (0.5 + np.cumsum(x)) / (counts + 1)
    variances = (0.25 + np.cumsum((x - means) ** 2)) / (counts + 1)
    before = np.concatenate([[0.25], variances[:-1]])
    stakes: np.ndarray = np.sqrt(2 * math.log(1 / error) / (len(x) * before))
    return stakes
