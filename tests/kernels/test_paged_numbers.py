"""Numbers in pages, read back by plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.cases import random, some_bias
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers


@pytest.mark.parametrize("lengths", [[5, 0, 3, 11], [7, 40, 1], [0, 0]])
@pytest.mark.parametrize("width", [1, 6, 50])
def test_first_numbers_of_every_sequence(lengths: list[int], width: int) -> None:
    numbers = some_bias(lengths, page=8)
    results = numbers.gathered(width)
    for s, row in enumerate(results.tolist()):
        numbers_read = oracles.numbers_of(numbers, s)
        assert row == (numbers_read + [0.0] * width)[:width]


def test_all_numbers_of_sequences_of_equal_length() -> None:
    numbers = some_bias([9, 9, 9, 9], page=4)
    assert numbers.whole(9).tolist() == [oracles.numbers_of(numbers, s) for s in range(4)]


def test_rows_as_pages() -> None:
    rows = random(3, 5)
    assert torch.equal(PagedNumbers.of_rows(rows).gathered(5), rows)


def test_wrong_shapes_and_types_are_refused() -> None:
    numbers = some_bias([4, 4, 4, 4])
    for changes, said in (
        ({"pages": numbers.pages.half()}, "expected numbers in fp32, got torch.float16"),
        ({"pages": numbers.pages[:, ::2]}, "one behind the other, got shape"),
        ({"lengths": numbers.lengths[:3]}, r"got \(4,\), \(3,\) and \(2, "),
        ({"page_table": numbers.page_table.repeat(2, 1)[:3]}, r"got \(4,\), \(4,\) and \(3, "),
        ({"page_table": numbers.page_table[:, ::2]}, "rows lie side by side"),
    ):
        with pytest.raises(InvariantError, match=said):
            replace(numbers, **changes)
