"""Some rows of queries and outputs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.attention.query_rows import EVERY_ROW, places, rows_at

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 9), unique=True))
def test_outputs_of_chosen_rows_are_written_and_no_others(numbers: list[int]) -> None:
    queries, outputs = torch.arange(30.0).view(10, 3), torch.full((10, 3), -1.0)
    where = places(np.array(numbers, dtype=np.int64), CPU)
    with rows_at(where, queries, outputs) as (mine, written):
        assert mine.shape == written.shape == (len(numbers), 3)
        written.copy_(2 * mine)
    for row in range(10):
        wanted = [2.0 * (3 * row + column) for column in range(3)]
        assert outputs[row].tolist() == (wanted if row in numbers else [-1.0] * 3)


def test_neighbours_are_taken_where_they_lie() -> None:
    queries, outputs = torch.arange(30.0).view(10, 3), torch.zeros(10, 3)
    where = places(np.array([4, 5, 6]), CPU)
    assert where == slice(4, 7)
    for chosen in (where, EVERY_ROW):
        with rows_at(chosen, queries, outputs) as (mine, written):
            assert mine.data_ptr() == queries[chosen].data_ptr()
            assert written.data_ptr() == outputs[chosen].data_ptr()


def test_others_are_not() -> None:
    for numbers in ([4, 6], [5, 4], [], [3, 3]):
        assert isinstance(places(np.array(numbers, dtype=np.int64), CPU), torch.Tensor)
