"""Memory pressure: which requests are compressed, and how many blocks are missing."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.scheduling.pressure import Candidate, Pool, choose

candidates = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.integers(1, 60), st.integers(1, 60)), max_size=7
)


@given(candidates, st.integers(-5, 120), st.integers(-3, 80))
def test_no_more_requests_than_needed_are_chosen(
    offered: list[Candidate], shortage: int, room: int
) -> None:
    worth = [c for c in offered if c.is_worth_it]
    chosen = choose(worth, shortage, room)
    assert all(c.sources - c.written >= c.sources / 8 for c in chosen)
    assert sum(c.written for c in chosen) <= max(room, 0)
    # Without the last one it would not have been enough.
    assert not chosen or sum(c.gain for c in chosen[:-1]) < shortage
    if sum(c.gain for c in chosen) < shortage:
        left = room - sum(c.written for c in chosen)
        assert all(c.written > left for c in worth if c not in chosen)


def test_largest_gain_is_chosen_first() -> None:
    long, short, done = Candidate("a", 40, 10), Candidate("b", 12, 3), Candidate("c", 10, 9)
    assert [c.is_worth_it for c in (long, short, done)] == [True, True, False]
    for order in itertools.permutations((long, short)):
        assert choose(order, 1, 100) == [long]
        assert choose(order, 31, 100) == [long, short]
        assert choose(order, 31, 9) == [short]


def test_shortage_is_the_largest_of_mark_running_and_waiting() -> None:
    pool = Pool(
        size=100, free=20, pending_frees=0, reserved=5, growth=2, needed_until_freed=3, wanted=0
    )
    assert pool.room == 17
    assert pool.shortage(0.9, min_written=3) == -10
    assert pool.shortage(0.7, min_written=3) == 10
    assert pool.shortage(0.9, min_written=20) == 5 + 2 + 20 - 20
    assert replace(pool, reserved=25).shortage(0.9, 3) == 25 + 2 + 3 - 20
    assert replace(pool, wanted=50).shortage(0.9, 3) == 30
    assert replace(pool, wanted=50, pending_frees=8).shortage(0.9, 3) == 22
