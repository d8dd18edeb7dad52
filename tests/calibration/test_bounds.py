"""The upper bound of a mean loss holds as often as it says, whatever the losses look like."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import fmean

import pytest

from vllm_kvcompress.tools.calibration.bounds import STEPS, upper_bound
from vllm_kvcompress.tools.calibration.record import smallest_budget

Draw = Callable[[random.Random], float]
TRIALS, NUM_TEXTS = 300, 60


def lognormal(mean: float, spread: float) -> Draw:
    return lambda rng: min(1.0, mean * rng.lognormvariate(-spread * spread / 2, spread))


def rare(share: float, loss: float, mostly: float) -> Draw:
    """Most texts lose next to nothing, a few very much."""
    return lambda rng: loss if rng.random() < share else mostly * rng.random()


def noisy(rng: random.Random) -> float:
    """Texts that gain as often as they lose."""
    return rng.gauss(0.02, 0.05)


CASES = {
    "narrow": lognormal(0.05, 0.5),
    "heavy tail": lognormal(0.05, 1.5),
    "rare": rare(0.03, 1.0, 0.02),
    "half and half": rare(0.5, 1.0, 0.0),
    "noisy": noisy,
}


@pytest.mark.parametrize("name", CASES)
def test_the_mean_is_above_the_bound_at_most_one_time_in_twenty(name: str) -> None:
    rng = random.Random(3)
    mean = fmean(CASES[name](rng) for _ in range(200_000))
    missed = sum(
        upper_bound([CASES[name](rng) for _ in range(NUM_TEXTS)], 1.0) < mean - 0.001
        for _ in range(TRIALS)
    )
    # Of 300 trials that miss with 5% probability each, more than 25 miss with less than 1%.
    assert missed <= 25


def test_student_s_t_would_not_do() -> None:
    """The premise of the bound: where few texts lose much, a t interval is wrong far too often."""
    rng, draw = random.Random(3), CASES["rare"]
    mean, missed = 0.03 + 0.97 * 0.01, 0
    for _ in range(TRIALS):
        losses = [draw(rng) for _ in range(NUM_TEXTS)]
        own = fmean(losses)
        variance = sum((loss - own) ** 2 for loss in losses) / (NUM_TEXTS - 1)
        missed += own + 1.671 * math.sqrt(variance / NUM_TEXTS) < mean
    assert missed > 0.08 * TRIALS


def slow_bound(losses: list[float], cap: float, confidence: float) -> float:
    """The same bound, one number at a time, from the paper's definitions."""
    error, bound = 1 - confidence, cap
    for step in range(STEPS - 1, 0, -1):
        mean, capital, highest = step / STEPS, 1.0, 1.0
        seen: list[float] = []
        deviations = 0.25
        for loss in losses:
            variance = deviations / (len(seen) + 1)
            stake = math.sqrt(2 * math.log(1 / error) / (len(losses) * variance))
            capped = min(loss, cap) / cap
            capital *= 1 - min(stake, 1 / (1 - mean)) * (capped - mean)
            highest = max(highest, capital)
            seen.append(capped)
            deviations += (capped - (0.5 + sum(seen)) / (len(seen) + 1)) ** 2
        if highest < 1 / error:
            break
        bound = cap * step / STEPS
    return bound


@pytest.mark.parametrize("cap", [0.5, 1.0])
@pytest.mark.parametrize("name", ["heavy tail", "noisy"])
def test_the_bound_is_the_paper_s(name: str, cap: float) -> None:
    rng = random.Random(5)
    losses = [CASES[name](rng) for _ in range(25)]
    expected = slow_bound(losses, cap, 0.95)
    assert upper_bound(losses, cap) == pytest.approx(expected, abs=1.01 * cap / STEPS)


def test_texts_without_any_loss_bound_it_by_their_number() -> None:
    """No bound that assumes nothing can do with fewer than 299, 149 or 59 texts."""
    for limit, fewest in ((0.01, 299), (0.02, 149), (0.05, 59)):
        assert limit <= upper_bound([0.0] * fewest, 1.0) <= limit + 0.001
    assert upper_bound([0.0] * 74, 0.5) == pytest.approx(0.02, abs=0.001)


def test_what_says_nothing_bounds_nothing() -> None:
    assert upper_bound([], 1.0) == 1.0
    assert upper_bound([1.0] * 50, 1.0) == 1.0
    assert upper_bound([7.0] * 50, 0.5) == 0.5


def test_the_ladder_is_tested_from_above_up_to_the_first_failure() -> None:
    """A smaller budget that happens to pass below one that fails is not chosen."""
    bounds = [(0.1, 0.02), (0.25, 0.03), (0.5, 0.01), (0.7, 0.0)]
    assert smallest_budget(bounds, 0.02) == 0.5
    assert smallest_budget(bounds, 0.03) == 0.1
    assert smallest_budget(bounds, 0.005) == 0.7
    assert smallest_budget([(0.7, 0.3)], 0.02) == 1.0
    assert smallest_budget([], 0.02) == 1.0
