"""Kept tokens in fresh pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import Backend
from tests.kernels.cases import make_entries
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.compaction import compact_pages

LAUNCHES = "tests.kernels.launches."


def make_case(
    page_counts: list[int], block_size: int, head_size: int, dtype: torch.dtype
) -> tuple[PagedEntries, Tensor, Tensor, Tensor]:
    """Sources of partial pages, and NaN pages for the kept tokens in between."""
    lengths = [(count + 1) * block_size + 3 for count in page_counts]
    entries = make_entries(lengths, block_size, head_size, dtype)
    total = sum(page_counts)
    fresh = torch.full((total, entries.pages.shape[1]), torch.nan, dtype=dtype)
    targets = torch.arange(total).flip(0) + len(entries.pages)
    generator = torch.Generator().manual_seed(3)
    kept = [
        torch.randperm(length, generator=generator)[: count * block_size].sort().values
        for length, count in zip(lengths, page_counts, strict=True)
    ]
    entries = PagedEntries(
        torch.cat([entries.pages, fresh]),
        entries.page_table,
        entries.lengths,
        block_size,
        head_size,
    )
    return entries, torch.tensor(page_counts), torch.cat(kept), targets


def test_twin_equals_the_oracle() -> None:
    entries, counts, kept, targets = make_case([1, 3, 2], 4, 8, torch.float32)
    sources = [oracles.rows_of(entries, which) for which in (0, 1)]
    before = entries.pages.clone()
    compact_pages(entries, counts, kept, targets)
    flat = [head for head, count in enumerate(counts.tolist()) for _ in range(4 * count)]
    for index, (head, entry) in enumerate(zip(flat, kept.tolist(), strict=True)):
        page = entries.pages[targets[index // 4]].view(4, 2, 8)
        for which in (0, 1):
            assert page[index % 4, which].double().tolist() == sources[which][head][entry]
    untouched = len(before) - len(targets)
    assert torch.equal(entries.pages[:untouched].isnan(), before[:untouched].isnan())
    assert torch.equal(entries.pages[:untouched].nan_to_num(), before[:untouched].nan_to_num())


@pytest.mark.parametrize(
    ("block_size", "head_size"), [(16, 64), (16, 80), (32, 128), (64, 96), (128, 256), (48, 64)]
)
def test_every_bit_is_the_twins(backend: Backend, block_size: int, head_size: int) -> None:
    entries, counts, kept, targets = make_case([1, 0, 2], block_size, head_size, backend.dtype)
    pages = backend.call(LAUNCHES + "compacted", entries, counts, kept, targets)
    compact_pages(entries, counts, kept, targets)
    assert torch.equal(pages.isnan(), entries.pages.isnan())
    assert torch.equal(pages.nan_to_num(), entries.pages.nan_to_num())
    assert not pages[targets].isnan().any()


def test_launcher_refuses_wrong_shapes(interpreter: Child) -> None:
    entries, counts, kept, targets = make_case([1, 1], 16, 64, torch.float32)
    with pytest.raises(InvariantError, match=r"expected 32 kept indices .* got 31.*full pages"):
        interpreter.call(LAUNCHES + "compacted", entries, counts, kept[1:], targets)
    with pytest.raises(InvariantError, match="expected 2 page counts"):
        interpreter.call(LAUNCHES + "compacted", entries, counts[1:], kept, targets)
