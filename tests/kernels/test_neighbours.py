"""How alike keys are, and how far values from their mean, over pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries, random
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels import paged_torch
from vllm_kvcompress.kernels.paged_entries import PagedEntries

COSINES = "vllm_kvcompress.kernels.neighbours_triton.neighbour_cosines"
DISTANCES = "vllm_kvcompress.kernels.neighbours_triton.key_distances"
RESIDUALS = "vllm_kvcompress.kernels.value_residuals_triton.value_residuals"
SHAPES = [(64, 16), (80, 32), (128, 128), (256, 64)]
ORDERS = [(2, 0), (1, 0), (2, 3)]


def some_others(entries: PagedEntries) -> Tensor:
    """For every entry any other one; for padding, anything."""
    shape = (entries.num_sequences, entries.capacity)
    drawn = random(*shape, seed=8).abs() * 1000
    others = drawn.long() % entries.lengths[:, None].clamp_min(1)
    return others.masked_fill(~entries.valid(), 2**40)


def some_weights(entries: PagedEntries) -> Tensor:
    """That sum to about 1, and NaN for padding."""
    shape = (entries.num_sequences, entries.capacity)
    weights = random(*shape, seed=9).abs() / entries.lengths[:, None].clamp_min(1)
    return weights.masked_fill(~entries.valid(), torch.nan)


def test_cosines_of_the_twin_are_the_oracle_s() -> None:
    entries = make_entries([3, 0, 17, 1], block_size=4, head_size=8)
    found = paged_torch.neighbour_cosines(entries)
    assert_close(found, torch.tensor(oracles.neighbour_cosines(entries)), torch.float32)


def test_distances_of_the_twin_are_the_oracle_s() -> None:
    entries = make_entries([3, 0, 17, 1], block_size=4, head_size=8)
    others = some_others(entries).clamp_max(0).where(~entries.valid(), some_others(entries))
    found = paged_torch.key_distances(entries, others)
    assert_close(found, torch.tensor(oracles.key_distances(entries, others)), torch.float32)


@pytest.mark.parametrize(("order", "num_pairs"), ORDERS)
def test_residuals_of_the_twin_are_the_oracle_s(order: int, num_pairs: int) -> None:
    """A head has fewer entries than there are pairs, too."""
    entries = make_entries([3, 0, 17, 1], block_size=4, head_size=8)
    weights = some_weights(entries)
    found = paged_torch.value_residuals(entries, weights, order, num_pairs)
    expected = oracles.value_residuals(entries, weights, order, num_pairs)
    assert_close(found, torch.tensor(expected), torch.float32)


@pytest.mark.parametrize(("head_size", "block_size"), SHAPES)
def test_cosines_and_distances_are_the_twins(
    backend: Backend, head_size: int, block_size: int
) -> None:
    entries = make_entries([200, 0, 1, 45], block_size, head_size, backend.dtype)
    expected = backend.twin(paged_torch.neighbour_cosines, entries)
    # Inputs are the same 16-bit numbers for both, and all sums are in fp32.
    assert_close(backend.call(COSINES, entries), expected, torch.float32)
    others = some_others(entries)
    known = others.masked_fill(~entries.valid(), 0)
    expected = backend.twin(paged_torch.key_distances, entries, known)
    assert_close(backend.call(DISTANCES, entries, others), expected, torch.float32)


@pytest.mark.parametrize(("head_size", "block_size"), SHAPES)
@pytest.mark.parametrize(("order", "num_pairs"), ORDERS)
def test_residuals_are_the_twins(
    backend: Backend, head_size: int, block_size: int, order: int, num_pairs: int
) -> None:
    """The first head has more entries than a program of the first pass reads."""
    entries = make_entries([700, 0, 1, 45], block_size, head_size, backend.dtype)
    weights = some_weights(entries)
    expected = backend.twin(paged_torch.value_residuals, entries, weights, order, num_pairs)
    found = backend.call(RESIDUALS, entries, weights, order, num_pairs)
    assert found.shape == (1 + num_pairs, 4, entries.capacity)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_zero_keys_are_like_nothing(backend: Backend) -> None:
    entries = make_entries([20], dtype=backend.dtype)
    entries.pages.zero_()
    assert not backend.call(COSINES, entries).any()


def test_what_launches_refuse(interpreter: Child) -> None:
    entries = make_entries([5])
    with pytest.raises(InvariantError, match=r"others \[1, 32\] in torch.int64, got \(1, 5\)"):
        interpreter.call(DISTANCES, entries, torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(InvariantError, match=r"expected weights \[1, 32\] in torch.float32"):
        interpreter.call(RESIDUALS, entries, torch.zeros(1, 32).half(), 2, 0)
    with pytest.raises(InvariantError, match="expected norms of order 1 or 2, got 3"):
        interpreter.call(RESIDUALS, entries, torch.zeros(1, 32), 3, 0)
