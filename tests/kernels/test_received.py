"""What kept entries get of evicted ones: values spread (CaM), keys and values merged (D2O)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries, random
from tests.kernels.child import Child
from tests.kernels.test_nearest import some_kept
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels import paged_torch
from vllm_kvcompress.kernels.paged_entries import PagedEntries

SPREAD = "vllm_kvcompress.kernels.spread_triton.spread_values"
MERGE = "vllm_kvcompress.kernels.merge_into_triton.merge_into"
SHAPES = [(64, 16), (80, 32), (128, 128), (256, 64)]


def some_shares(entries: PagedEntries, kept: Tensor) -> Tensor:
    """Nothing of kept entries; padding has wild ones."""
    shares = random(*kept.shape, seed=6).abs().masked_fill(kept, 0)
    return shares.masked_fill(~entries.valid(), torch.nan)


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


@pytest.mark.parametrize("num_targets", [1, 3, 100])
def test_spreading_twin_is_the_oracle(num_targets: int) -> None:
    entries = make_entries([3, 27, 0, 8], block_size=4, head_size=8)
    kept = some_kept(entries)
    shares = some_shares(entries, kept)
    found = paged_torch.spread_values(entries, kept, shares, num_targets)
    expected = oracles.spread(entries, kept, shares, num_targets)
    assert_close(found, torch.tensor(expected), torch.float32)


def test_merging_twin_is_the_oracle() -> None:
    entries = make_entries([3, 27, 0, 8], block_size=4, head_size=8)
    kept = some_kept(entries)
    targets, weights = some_targets(entries, kept)
    for which, found in enumerate(paged_torch.merge_into(entries, kept, targets, weights)):
        expected = oracles.merged_into(entries, which, kept, targets, weights)
        assert_close(found, torch.tensor(expected), torch.float32)


@pytest.mark.parametrize("num_targets", [1, 32, 1000])
@pytest.mark.parametrize(("head_size", "block_size"), SHAPES)
def test_spreading_is_the_twin(
    backend: Backend, head_size: int, block_size: int, num_targets: int
) -> None:
    """Over gaps longer than a tile; where nothing is kept, and where everything is."""
    entries = make_entries([600, 0, 1, 45, 33, 170], block_size, head_size, backend.dtype)
    kept = some_kept(entries)
    kept[0, 130:420], kept[3], kept[4] = False, False, True
    shares = some_shares(entries, kept)
    expected = backend.twin(paged_torch.spread_values, entries, kept, shares, num_targets)
    found = backend.call(SPREAD, entries, kept, shares, num_targets)
    assert found.dtype == backend.dtype
    # Shares are rounded to the pages' type, as the weights of attention are.
    scale = 1 + expected.float().abs().max()
    assert_close(found / scale, expected / scale, backend.dtype)
    assert (found[0, 420:] != entries.values()[0, 420:]).any()


@pytest.mark.parametrize(("head_size", "block_size"), SHAPES)
def test_merging_is_the_twin(backend: Backend, head_size: int, block_size: int) -> None:
    entries = make_entries([300, 0, 1, 45, 33, 170], block_size, head_size, backend.dtype)
    kept = some_kept(entries)
    kept[3], kept[4] = False, True
    arguments = (entries, kept, *some_targets(entries, kept))
    expected = backend.twin(paged_torch.merge_into, *arguments)
    found = backend.call(MERGE, *arguments)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == backend.dtype
        assert_close(one, other, backend.dtype)
    assert torch.equal(found[0][4, :33], entries.keys()[4, :33])  # nothing came


def test_what_a_launch_refuses(interpreter: Child) -> None:
    entries = make_entries([5, 3])
    kept = some_kept(entries)
    shares, targets = some_shares(entries, kept), some_targets(entries, kept)[0]
    with pytest.raises(InvariantError, match=r"shares \[2, 32\] in torch.float32"):
        interpreter.call(SPREAD, entries, kept, shares.double(), 3)
    with pytest.raises(InvariantError, match=r"targets \[2, 32\] in torch.int64"):
        interpreter.call(MERGE, entries, kept, targets.int(), shares)
