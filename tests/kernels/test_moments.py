"""MomentKV's state over pages."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.merging.moments import add_to_moments, moment_residuals, moment_size


def test_twin_equals_the_oracle() -> None:
    """Two batches of evicted entries, empty ones of some heads among them."""
    entries = make_entries([3, 17, 8], block_size=4, head_size=8)
    evicted = random(3, entries.capacity) > 0
    early = torch.arange(entries.capacity) < 7
    state = torch.zeros(3, moment_size(8))
    for part in (evicted & early, evicted & ~early):
        state = add_to_moments(PagedKV.of(entries), state, part)
    expected = torch.tensor(oracles.moments(entries, evicted))
    assert_close(state, expected, torch.float32)


def residuals_of(entries: PagedEntries, dtype: torch.dtype) -> tuple[PagedEntries, Tensor]:
    """Entries, and a state after other ones were evicted; nothing yet in the last head."""
    heads, dims = entries.num_sequences, entries.head_size
    others = make_entries([90] * heads, entries.block_size, dims, dtype, seed=7)
    evicted = torch.ones(heads, others.capacity, dtype=torch.bool)
    evicted[-1] = False
    state = torch.zeros(heads, moment_size(dims))
    return entries, add_to_moments(PagedKV.of(others), state, evicted)


def test_residuals_twin_is_the_oracle() -> None:
    entries, state = residuals_of(make_entries([3, 17, 8], 4, 8), torch.float32)
    results = moment_residuals(PagedKV.of(entries), state, 0.4)
    assert_close(results, torch.tensor(oracles.residuals(entries, state, 0.4)), torch.float32)
