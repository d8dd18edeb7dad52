"""Norms remembered by page are those of the values that lie there now."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_kvcompress.cache.page_norms import PageNorms

NUM_PAGES, BLOCK_SIZE, WIDTH = 12, 2, 4

pages = st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=NUM_PAGES)
heads = st.lists(st.lists(st.integers(0, NUM_PAGES - 1), max_size=WIDTH), min_size=1, max_size=3)
actions = st.lists(st.one_of(st.tuples(st.just("write"), pages), st.tuples(st.just("read"), heads)))


@given(actions)
def test_norms_are_those_of_the_last_write(todo: list[tuple[str, list]]) -> None:
    remembered = PageNorms(NUM_PAGES, BLOCK_SIZE)
    written = [[float(page), page + 0.5] for page in range(NUM_PAGES)]
    for time, (action, what) in enumerate(todo):
        if action == "write":
            for page in what:
                written[page] = [100.0 * time + page, 100.0 * time + page + 0.5]
            remembered.forget(torch.tensor(what, dtype=torch.int64))
            continue
        padded = [row + [NUM_PAGES - 1] * (WIDTH - len(row)) for row in what]

        def compute(first: int, rows: list[list[int]] = what) -> Tensor:
            # Behind a head's last page lies nothing that belongs to it.
            numbers = torch.full((len(rows), WIDTH, BLOCK_SIZE), -1.0)
            for head, row in enumerate(rows):
                for column, page in enumerate(row):
                    numbers[head, column] = torch.tensor(written[page])
            return numbers[:, first:].flatten(1)

        counts = torch.tensor([len(row) for row in what])
        found = remembered.read(torch.tensor(padded), counts, compute).tolist()
        for row, numbers in zip(what, found, strict=True):
            expected = [number for page in row for number in written[page]]
            assert numbers[: len(expected)] == expected


def test_known_pages_are_not_computed_again() -> None:
    remembered = PageNorms(NUM_PAGES, BLOCK_SIZE)
    table, counts, asked = torch.tensor([[3, 5, 7]]), torch.tensor([3]), []

    def compute(first: int) -> Tensor:
        asked.append(first)
        return torch.zeros(1, (3 - first) * BLOCK_SIZE)

    remembered.read(table[:, :2], counts - 1, lambda first: compute(first)[:, : 2 * BLOCK_SIZE])
    remembered.read(table, counts, compute)
    remembered.read(table, counts, compute)
    assert asked == [0, 2]
    remembered.forget_all()
    remembered.read(table, counts, compute)
    assert asked == [0, 2, 0]
