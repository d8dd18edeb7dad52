from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.vllm_plugin.worker_side.attention import base
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import sequences


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    data=st.data(),
    num_heads=st.integers(1, 3),
)
def test_every_head_of_a_request_becomes_a_sequence(
    lengths: list[int], data: st.DataObject, num_heads: int
) -> None:
    """Against loops over requests, heads and tokens."""
    rows = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    places, firsts = [], [0]
    for row in rows:
        for head in range(num_heads):
            for token in range(starts[row], starts[row + 1]):
                places.append(token * num_heads + head)
            firsts.append(len(places))
    found, found_firsts = sequences(np.array(starts), np.array(rows), num_heads)
    assert found.tolist() == places
    assert found_firsts.tolist() == firsts
    assert (found.dtype, found_firsts.dtype) == (np.int64, np.int32)


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    data=st.data(),
    enough=st.integers(2, 12),
)
def test_the_longest_run_of_consecutive_requests_comes_last(
    lengths: list[int], data: st.DataObject, enough: int
) -> None:
    """Against a loop over runs; requests are split only where the run has enough tokens."""
    rows = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1))))
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][-1] == row - 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    expected = [rows]
    longest = max(runs, key=lambda run: sum(lengths[row] for row in run), default=[])
    if len(runs) > 1 and sum(lengths[row] for row in longest) >= enough:
        expected = [[row for row in rows if row not in longest], longest]
    with patch.object(base, "MIN_RUN_TOKENS", enough):
        parts = base.longest_run_last(np.array(rows, dtype=np.int64), np.array(starts))
    assert [part.tolist() for part in parts] == expected
