"""Sums of received attention continue from event to event."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

BLOCK, HEADS, LAYERS, WINDOW, STRIDE = 32, 2, 3, 64, 4
PROMPT, EVERY, NUM_EVENTS = 640, 64, 3


def events_by_hand(budgets: list[int]) -> list[dict[int, float]]:
    """Returns what a head keeps with h2o under uniform attention, and the sums.

    By event, down to so many entries: the kept positions and what each has received. A query that
    sees m entries gives each of them 1 / m, and stands for STRIDE. Positions fit blocks, so there
    are no partial ones.
    """
    resident: dict[int, float] = {position: 0.0 for position in range(PROMPT)}
    seen_before, events = PROMPT, []
    for number, budget in enumerate(budgets):
        if number:
            seen_before = len(resident)
            start = PROMPT + (number - 1) * EVERY
            resident |= {position: 0.0 for position in range(start, start + EVERY)}
        everything = sorted(resident)
        num_new = len(everything) - seen_before if number else PROMPT
        last = len(everything) - 1
        for query in range(last, last - min(WINDOW, num_new), -STRIDE):
            for position in everything[: query + 1]:
                resident[position] += STRIDE / (query + 1)
        recent = everything[-(budget // 2) :]
        others = [position for position in everything if position not in recent]
        # Of equals the later ones; sums of the same terms in another order are equal here.
        others.sort(key=lambda position: (round(resident[position], 5), position))
        kept = sorted(others[len(others) - (budget - len(recent)) :] + recent)
        resident = {position: resident[position] for position in kept}
        events.append(dict(resident))
    return events


@pytest.mark.parametrize("policy", ["h2o", "h2o+cam"])
def test_attention_sums_continue_from_the_previous_event(
    equal_keys: str, run_engine: Run, policy: str
) -> None:
    cam = {"merge_window": WINDOW} if "cam" in policy else {}
    report = run_engine(
        equal_keys,
        [[request("a", prompt(PROMPT, seed=1), (NUM_EVENTS - 1) * EVERY + 2)]],
        settings={
            "policy": policy,
            "budget": 0.5,
            "trigger": f"prompt,decode:{EVERY}",
            "params": {"window_size": WINDOW, "stride": STRIDE, **cam},
        },
        record_kept=True,
    )
    assert len(report["kept"]) == NUM_EVENTS * LAYERS
    records = [report["kept"][number * LAYERS + 1] for number in range(NUM_EVENTS)]
    # The numbers themselves take a page of each layer's 20.
    assert sum(records[0]["counts"]) == PROMPT // BLOCK - 1
    for head in range(HEADS):
        budgets = [record["counts"][head] * BLOCK for record in records]
        positions = list(range(PROMPT))
        for number, event in enumerate(events_by_hand(budgets)):
            record = records[number]
            first = sum(record["counts"][:head]) * BLOCK
            places = record["kept"][first : first + budgets[number]]
            kept = [positions[place] for place in places]
            assert kept == list(event)
            assert record["accumulated"][head] == pytest.approx(list(event.values()), rel=1e-3)
            end = PROMPT + number * EVERY
            positions = kept + list(range(end, end + EVERY))


def test_request_with_a_single_event_stores_no_sums(llama: str, run_engine: Run) -> None:
    """A request that is compressed once has its whole budget for tokens."""
    report = run_engine(
        llama,
        [[request("a", prompt(PROMPT, seed=1), 4)]],
        settings={"policy": "h2o", "budget": 0.5},
        record_kept=True,
    )
    assert [sum(r["counts"]) for r in report["kept"]] == [PROMPT // BLOCK] * LAYERS
