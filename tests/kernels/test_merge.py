"""Groups of neighbours, merged over pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels import paged_torch
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.rotary import Turns


def make_case(entries: PagedEntries) -> tuple[Tensor, Tensor, Tensor]:
    """Links, also of the first entry and of padding; weights of which padding has wild ones."""
    shape = (entries.num_sequences, entries.capacity)
    link = random(*shape, seed=5) > -0.3
    keys, values = random(*shape, seed=6).abs() + 0.1, random(*shape, seed=7).abs() + 0.1
    padding = ~entries.valid()
    return link, keys.masked_fill(padding, torch.nan), values.masked_fill(padding, torch.nan)


def test_twin_is_the_oracle() -> None:
    entries = make_entries([3, 0, 17, 8], block_size=4, head_size=8)
    link, *weights = make_case(entries)
    found = paged_torch.merge_groups(entries, link, *weights)
    for which in (0, 1):
        expected = torch.tensor(oracles.merged(entries, link, weights[which], which))
        assert_close(found[which], expected, torch.float32)


def some_turns(entries: PagedEntries, halves: bool, rotary: int) -> Turns:
    """Back and forth, and for padding anything."""
    shape = (entries.num_sequences, entries.capacity)
    steps = (random(*shape, seed=8) * 50).long().masked_fill(~entries.valid(), 2**40)
    return Turns(steps, random(rotary // 2, seed=9).abs(), halves)


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("rotary", [8, 4])
def test_turned_keys_of_the_twin_are_the_oracle_s(halves: bool, rotary: int) -> None:
    entries = make_entries([3, 0, 17, 8], block_size=4, head_size=8)
    link, *weights = make_case(entries)
    turns = some_turns(entries, halves, rotary)
    keys, values = paged_torch.merge_groups(entries, link, *weights, turns)
    expected = oracles.merged(entries, link, weights[0], 0, turns)
    torch.testing.assert_close(keys, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert torch.equal(values, paged_torch.merge_groups(entries, link, *weights)[1])
