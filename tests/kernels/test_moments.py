"""MomentKV's state over pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries, random
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels import moment_size, paged_torch
from vllm_kvcompress.kernels.paged_entries import PagedEntries

RESIDUALS = "vllm_kvcompress.kernels.residuals_triton.moment_residuals"
MOMENTS = "vllm_kvcompress.kernels.moments_triton.add_to_moments"


def test_twin_is_the_oracle() -> None:
    """In two batches, of which a head may have none."""
    entries = make_entries([3, 17, 8], block_size=4, head_size=8)
    evicted = random(3, entries.capacity) > 0
    early = torch.arange(entries.capacity) < 7
    state = torch.zeros(3, moment_size(8))
    for part in (evicted & early, evicted & ~early):
        state = paged_torch.add_to_moments(entries, state, part)
    expected = torch.tensor(oracles.moments(entries, evicted))
    assert_close(state, expected, torch.float32)


@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 32), (128, 128), (256, 64)])
def test_is_the_twin(backend: Backend, head_size: int, block_size: int) -> None:
    entries = make_entries([200, 0, 1, 45], block_size, head_size, backend.dtype)
    evicted = random(4, entries.capacity) > -0.5
    evicted[3] = False
    state = random(4, moment_size(head_size))
    state[:, 0] = torch.tensor([0.0, 3.0, 7.0, 5.0])
    expected = backend.twin(paged_torch.add_to_moments, entries, state, evicted)
    found = backend.call(MOMENTS, entries, state, evicted)
    # Inputs are the same 16-bit numbers for both, and all sums are in fp32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[3], expected[3])


def test_more_entries_than_a_split_has(backend: Backend) -> None:
    entries = make_entries([1200], dtype=backend.dtype)
    evicted = random(1, entries.capacity) > 0
    state = torch.zeros(1, moment_size(64))
    expected = backend.twin(paged_torch.add_to_moments, entries, state, evicted)
    found = backend.call(MOMENTS, entries, state, evicted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def residuals_of(entries: PagedEntries, dtype: torch.dtype) -> tuple[PagedEntries, Tensor]:
    """Entries, and a state after other ones were evicted; nothing yet in the last head."""
    heads, dims = entries.num_sequences, entries.head_size
    others = make_entries([90] * heads, entries.block_size, dims, dtype, seed=7)
    evicted = torch.ones(heads, others.capacity, dtype=torch.bool)
    evicted[-1] = False
    state = torch.zeros(heads, moment_size(dims))
    return entries, paged_torch.add_to_moments(others, state, evicted)


def test_residuals_twin_is_the_oracle() -> None:
    entries, state = residuals_of(make_entries([3, 17, 8], 4, 8), torch.float32)
    found = paged_torch.moment_residuals(entries, state, 0.4)
    assert_close(found, torch.tensor(oracles.residuals(entries, state, 0.4)), torch.float32)


@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 32), (128, 128), (256, 64)])
def test_residuals_are_the_twins(backend: Backend, head_size: int, block_size: int) -> None:
    entries = make_entries([200, 0, 1, 45], block_size, head_size, backend.dtype)
    entries, state = residuals_of(entries, backend.dtype)
    expected = backend.twin(paged_torch.moment_residuals, entries, state, head_size**-0.5)
    found = backend.call(RESIDUALS, entries, state, head_size**-0.5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_what_a_launch_of_residuals_refuses(interpreter: Child) -> None:
    with pytest.raises(InvariantError, match=r"expected a state \[1, 4225\] in fp32"):
        interpreter.call(RESIDUALS, make_entries([5]), torch.zeros(1, 9), 1.0)


def test_what_a_launch_refuses(interpreter: Child) -> None:
    entries = make_entries([5, 3])
    evicted = torch.ones(2, entries.capacity, dtype=torch.bool)
    with pytest.raises(InvariantError, match=r"expected a state .* start from zeros"):
        interpreter.call(MOMENTS, entries, torch.zeros(2, 9), evicted)
    state = torch.zeros(2, moment_size(64))
    with pytest.raises(InvariantError, match=r"expected evicted \[2, 32\] in torch.bool"):
        interpreter.call(MOMENTS, entries, state, evicted[:, 1:])
