"""Rows of queries and outputs that some requests of a batch own."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.attention.batch import EVERY_ROW, row_index, selected_rows

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 9), unique=True))
def test_outputs_of_chosen_rows_are_written_and_no_others(numbers: list[int]) -> None:
    queries, outputs = torch.arange(30.0).view(10, 3), torch.full((10, 3), -1.0)
    where = row_index(np.array(numbers, dtype=np.int64), CPU)
    with selected_rows(where, queries, outputs) as (selected, written):
        assert selected.shape == written.shape == (len(numbers), 3)
        written.copy_(2 * selected)
    for row in range(10):
        wanted = [2.0 * (3 * row + column) for column in range(3)]
        assert outputs[row].tolist() == (wanted if row in numbers else [-1.0] * 3)


def test_consecutive_rows_are_not_copied() -> None:
    queries, outputs = torch.arange(30.0).view(10, 3), torch.zeros(10, 3)
    where = row_index(np.array([4, 5, 6]), CPU)
    assert where == slice(4, 7)
    for chosen in (where, EVERY_ROW):
        with selected_rows(chosen, queries, outputs) as (selected, written):
            assert selected.data_ptr() == queries[chosen].data_ptr()
            assert written.data_ptr() == outputs[chosen].data_ptr()


def test_other_rows_are_indexed_by_a_tensor() -> None:
    for numbers in ([4, 6], [5, 4], [], [3, 3]):
        assert isinstance(row_index(np.array(numbers, dtype=np.int64), CPU), torch.Tensor)
