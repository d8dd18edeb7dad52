"""How alike keys are, over pages."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.merging.neighbours import key_distances, neighbour_cosines


def some_others(entries: PagedEntries) -> Tensor:
    """For every entry any other one; for padding, anything."""
    shape = (entries.num_sequences, entries.capacity)
    drawn = random(*shape, seed=8).abs() * 1000
    others = drawn.long() % entries.lengths[:, None].clamp_min(1)
    return others.masked_fill(~entries.valid(), 2**40)


def test_cosines_equal_the_oracle() -> None:
    entries = make_entries([3, 0, 17, 1], block_size=4, head_size=8)
    results = neighbour_cosines(PagedKV.of(entries))
    assert_close(results, torch.tensor(oracles.neighbour_cosines(entries)), torch.float32)


def test_distances_equal_the_oracle() -> None:
    entries = make_entries([3, 0, 17, 1], block_size=4, head_size=8)
    others = some_others(entries).clamp_max(0).where(~entries.valid(), some_others(entries))
    results = key_distances(PagedKV.of(entries), others)
    assert_close(results, torch.tensor(oracles.key_distances(entries, others)), torch.float32)


def test_zero_keys_have_cosine_0() -> None:
    entries = make_entries([20])
    entries.pages.zero_()
    assert not neighbour_cosines(PagedKV.of(entries)).any()
