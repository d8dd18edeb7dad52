"""The pages that a decode step reads, as a GPU chooses them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.backends import Backend
from tests.kernels.cases import random
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.page_choice import (
    Choice,
    PageLists,
    choose_pages,
    key_bounds,
    key_means,
    rounded_outwards,
)

LAUNCHER = "vllm_kvcompress.kernels.page_choice_triton.choose_pages"


def some_pages(
    counts: list[int],
    read: list[int],
    head_size: int,
    dtype: torch.dtype,
    equal: bool = False,
    num_means: int = 0,
) -> tuple[Tensor, Tensor, PageLists]:
    """Queries, summaries and pages; what lies behind a sequence's last page is some page, too."""
    queries = random(len(counts), 3, head_size, seed=1, dtype=dtype)
    width = max(counts) + 5
    keys = random(len(counts) * width, 8, head_size, seed=2, dtype=dtype)
    if equal:
        keys[::3] = keys[0]
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(3))
    rows = order.view(len(counts), width).to(torch.int32)
    table = torch.cat((rows, rows), dim=1)[:, :width]  # a part of longer rows
    summaries = key_means(keys, num_means) if num_means else key_bounds(keys)
    return queries, summaries, PageLists(table, torch.tensor(counts), torch.tensor(read))


def check(
    backend: Backend,
    pages: tuple[Tensor, Tensor, PageLists],
    choice: Choice,
    scales: Tensor | None = None,
) -> None:
    """The interpreter against the twin, in fp32, so that rounding makes no ties."""
    results = backend.call(LAUNCHER, *pages, choice, scales)
    exact = (pages[0].float(), pages[1].float() if scales is None else pages[1], pages[2])
    expected = backend.twin(twin(choose_pages), *exact, choice, scales)
    assert results.shape == expected.shape
    for row, number in enumerate(pages[2].num_read.tolist()):
        assert results[row, :number].tolist() == expected[row, :number].tolist()


@pytest.mark.parametrize("head_size", [64, 80])
def test_launchers_choose_as_the_twin(backend: Backend, head_size: int) -> None:
    """One page, a tile of 32, one more, and over several; read: one, some and all."""
    pages = some_pages([1, 32, 33, 100, 9], [1, 8, 33, 25, 3], head_size, backend.dtype)
    check(backend, pages, Choice(40))


@pytest.mark.parametrize("num_means", [1, 2, 4])
def test_pages_are_chosen_by_means_of_their_parts(backend: Backend, num_means: int) -> None:
    pages = some_pages([1, 33, 70], [1, 8, 20], 80, backend.dtype, num_means=num_means)
    check(backend, pages, Choice(20, 1, 1, num_means))


def test_bounds_in_8_bits(backend: Backend) -> None:
    """Scales differ from page to page."""
    queries, bounds, pages = some_pages([1, 33, 70], [1, 8, 20], 80, backend.dtype)
    bounds *= torch.exp2(torch.arange(len(bounds)) % 5)[:, None].to(bounds.dtype)
    codes, scales = rounded_outwards(bounds)
    check(backend, (queries, codes, pages), Choice(20), scales)


def test_first_and_last_pages_are_always_read(backend: Backend) -> None:
    pages = some_pages([50, 7], [12, 7], 64, backend.dtype)
    check(backend, pages, Choice(12, num_first=2, num_last=5))


def test_of_equally_good_pages_the_later_ones_are_read(backend: Backend) -> None:
    """Queries of zero, over a tile of 1,024 scores, and pages with the same keys."""
    queries, *others = some_pages([1500, 40], [700, 11], 16, backend.dtype)
    check(backend, (queries * 0, *others), Choice(700))
    check(backend, some_pages([60, 40], [30, 11], 16, backend.dtype, equal=True), Choice(30))


def test_a_chunk_has_more_queries_than_a_program_takes(backend: Backend) -> None:
    """The launcher leaves them to the twin."""
    _, *pages = some_pages([40, 70], [9, 20], 64, backend.dtype)
    queries = random(2, 300, 64, seed=5, dtype=backend.dtype)
    check(backend, (queries, *pages), Choice(20, 1, 2))
