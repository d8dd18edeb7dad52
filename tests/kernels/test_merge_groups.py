"""Groups of neighbours, merged over pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.merging.merged_entries import merge_groups


def make_case(entries: PagedEntries) -> tuple[Tensor, Tensor, Tensor]:
    """Links, also of the first entry and of padding; weights of which padding has wild ones."""
    shape = (entries.num_sequences, entries.capacity)
    link = random(*shape, seed=5) > -0.3
    keys, values = random(*shape, seed=6).abs() + 0.1, random(*shape, seed=7).abs() + 0.1
    padding = ~entries.valid()
    return link, keys.masked_fill(padding, torch.nan), values.masked_fill(padding, torch.nan)


def test_twin_equals_the_oracle() -> None:
    entries = make_entries([3, 0, 17, 8], block_size=4, head_size=8)
    link, *weights = make_case(entries)
    results = merge_groups(PagedKV.of(entries), link, *weights)
    for which in (0, 1):
        expected = torch.tensor(oracles.merged(entries, link, weights[which], which))
        assert_close(results[which], expected, torch.float32)


def test_summed_values_are_means_times_the_entries() -> None:
    entries = make_entries([3, 17], block_size=4, head_size=8)
    link, *weights = make_case(entries)
    view = PagedKV.of(entries)
    keys, means = merge_groups(view, link, *weights)
    found_keys, sums = merge_groups(view, link, *weights, sum_values=True)
    size = torch.zeros(2, entries.capacity)
    for head, length in enumerate((3, 17)):
        first = 0
        for place in range(length):
            first = first if link[head, place] and place else place
            size[head, first] += 1
    assert torch.equal(found_keys, keys)
    assert_close(sums, means * size[..., None], torch.float32)


def some_steps(entries: PagedEntries, halves: bool, rotary: int) -> tuple[Rotary, Tensor]:
    """Back and forth, and for padding anything."""
    shape = (entries.num_sequences, entries.capacity)
    steps = (random(*shape, seed=8) * 50).long().masked_fill(~entries.valid(), 2**40)
    return Rotary(random(rotary // 2, seed=9).abs(), halves), steps


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rerotated_keys_equal_the_oracle(halves: bool, rotary: int) -> None:
    entries = make_entries([3, 0, 17, 8], block_size=4, head_size=8)
    link, *weights = make_case(entries)
    rerotated = some_steps(entries, halves, rotary)
    keys, values = merge_groups(PagedKV.of(entries), link, *weights, rerotated)
    expected = oracles.merged(entries, link, weights[0], 0, rerotated)
    torch.testing.assert_close(keys, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert torch.equal(values, merge_groups(PagedKV.of(entries), link, *weights)[1])
