"""What kept entries get of evicted ones: values spread (CaM), keys and values merged (D2O)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import assert_close
from tests.kernels.cases import make_entries, random
from tests.kernels.test_nearest_keys import some_kept
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.merging.merged_entries import merge_into, spread_values


def some_shares(entries: PagedEntries, kept: Tensor) -> Tensor:
    """Nothing of kept entries, nor of padding."""
    shares = random(*kept.shape, seed=6).abs().masked_fill(kept, 0)
    return shares.masked_fill(~entries.valid(), 0)


def some_targets(entries: PagedEntries, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Some evicted entries go to the first kept one, others to any; and with what weights."""
    targets = torch.zeros(kept.shape, dtype=torch.int64)
    weights = random(*kept.shape, seed=6).clamp_min(0)
    generator = torch.Generator().manual_seed(9)
    for s in range(len(kept)):
        here = (kept[s] & entries.valid()[s]).nonzero()[:, 0]
        if len(here):
            drawn = torch.randint(0, len(here), targets[s].shape, generator=generator)
            targets[s] = here[drawn * (drawn % 3 > 0)]
        weights[s] *= len(here) > 0
    return targets, weights.masked_fill(kept | ~entries.valid(), 0)


@pytest.mark.parametrize("most", [0.0, 0.7, 100.0])
@pytest.mark.parametrize("num_targets", [1, 3, 100])
def test_spreading_twin_is_the_oracle(num_targets: int, most: float) -> None:
    entries = make_entries([3, 27, 0, 8], block_size=4, head_size=8)
    kept = some_kept(entries) & entries.valid()
    shares = some_shares(entries, kept)
    results = spread_values(PagedKV.of(entries), kept, shares, num_targets, most)
    expected = oracles.spread(entries, kept, shares, num_targets, most)
    assert_close(results * kept[..., None], torch.tensor(expected), torch.float32)


def test_merging_twin_is_the_oracle() -> None:
    entries = make_entries([3, 27, 0, 8], block_size=4, head_size=8)
    kept = some_kept(entries) & entries.valid()
    targets, weights = some_targets(entries, kept)
    for which, results in enumerate(merge_into(PagedKV.of(entries), targets, weights)):
        expected = oracles.merged_into(entries, which, kept, targets, weights)
        assert_close(results * kept[..., None], torch.tensor(expected), torch.float32)
