from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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
