"""Draft pace: against a loop that knows what every cycle takes and how many drafts are accepted."""

from __future__ import annotations

import random

import pytest

from vllm_kvcompress.scheduling.draft_pace import CHOICES, DraftPace

NAMES = ["a", "b"]


def tokens_per_second(number: int, rate: float, draft: float, verify: float) -> float:
    """Returns what a cycle yields in the long run; a plain step takes 1 second."""
    tokens, chance = 1.0, 1.0
    for _ in range(number):
        chance *= rate
        tokens += chance
    return tokens / (number * draft + (1.0 + verify * number))


def serve(pace: DraftPace, cycles: int, rate: float, draft: float, verify: float) -> list[int]:
    """Returns the numbers of drafts that a pace chooses; each draft is accepted at a rate."""
    draw, chosen = random.Random(1), []
    for _ in range(cycles):
        number = pace.choose(NAMES, 5000)
        chosen.append(number)
        for name in NAMES:
            accepted = 0
            while accepted < number and draw.random() < rate:
                accepted += 1
            if number:
                pace.note_verified(name, number, accepted)
        pace.note_cycle(len(NAMES), 5000, number, number * draft + 1.0 + verify * number)
    return chosen


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("draft", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("verify", [0.0, 0.1])
def test_the_number_comes_near_the_best_one(rate: float, draft: float, verify: float) -> None:
    """Within a tenth, since what is accepted is known from some cycles alone."""
    chosen = serve(DraftPace(), 600, rate, draft, verify)[100:]
    rates = {number: tokens_per_second(number, rate, draft, verify) for number in CHOICES}
    mean = sum(rates[number] for number in chosen) / len(chosen)
    assert mean > 0.9 * max(rates.values())


def test_nothing_more_is_tried_where_full_acceptance_would_not_pay() -> None:
    """Draft steps as long as plain ones: one draft is tried, more never are."""
    chosen = serve(DraftPace(), 300, 1.0, draft=1.1, verify=0.0)
    assert set(chosen) == {0, 1}
    assert chosen.count(1) < 8


def test_a_slow_moment_of_the_machine_is_forgotten() -> None:
    """Times of the first cycles that say the contrary, either way."""
    for slow in (0, 1):
        pace = DraftPace()
        for number in (0, 1, 3):
            for _ in range(2):
                draft = 10.0 if number == slow else 0.1
                pace.note_cycle(2, 5000, number, 1.0 + number * draft + 20.0 * (number == slow))
        chosen = serve(pace, 1200, 0.9, draft=0.1 if slow else 1.5, verify=0.0)[-200:]
        assert (sum(chosen) / len(chosen) > 2) == bool(slow)


def test_batches_of_other_sizes_are_timed_anew() -> None:
    """What a request alone takes says nothing of 32, or of longer ones."""
    pace = DraftPace()
    serve(pace, 100, 0.95, draft=0.1, verify=0.0)
    assert pace.choose(NAMES, 5000) > 0
    assert pace.choose([f"r{i}" for i in range(32)], 5000) == 0  # the first choice that is timed
    assert pace.choose(NAMES, 50000) == 0


def test_what_is_accepted_is_each_requests_own() -> None:
    pace = DraftPace()
    for _ in range(50):
        pace.note_verified("a", 7, 7)
        pace.note_verified("b", 7, 0)
    assert pace.expected(["a"], 7) > 7 > 2 > pace.expected(["b"], 7) >= 1
    pace.forget("a")
    assert pace.expected(["a"], 7) == pytest.approx(sum(0.8**n for n in range(8)))
    pace.forget("unknown")
