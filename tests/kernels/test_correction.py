"""Attention outputs, corrected from states in pages."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import random, some_bias
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.merging.moments import correct_with_moments, packed_size

CORRECT = "tests.kernels.launches.corrected"
TRITON = "merging.moments_triton"
SCALE = 0.2


def some_states(num_sequences: int, dims: int, page: int, order: int = 1) -> PagedNumbers:
    """States in scattered pages, of heads of which every third has evicted nothing."""
    size = packed_size(dims, order)
    states = some_bias([size] * num_sequences, page)
    heads = num_sequences // len(states.page_table)
    halves = (random(num_sequences, 2 * size) / 4).half().view(torch.float32)
    for s in range(num_sequences):
        for index in (0, *range(2 + 2 * dims, size)):
            place = int(states.starts[s]) + index
            row = states.page_table[s // heads, place // page]
            states.pages[row, place % page] = halves[s, index] if index else 7.0 * (s % 3)
    return states


def unpacked(states: PagedNumbers, s: int, dims: int) -> list[float]:
    """Count, means and cross moments of a sequence, number by number."""
    packed = oracles.numbers_of(states, s)
    count, unit = packed[:2]
    halves: list[float] = []
    for number in packed[2 + 2 * dims :]:
        halves += struct.unpack("<2e", struct.pack("<f", number))
    return [count, *packed[2 : 2 + 2 * dims], *(x * unit * count for x in halves)]


def some_outputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, log-sum-exps of which one is of nothing, and queries; as a batch has them."""
    num_sequences, group, num_queries, dims = shape
    rows = (num_queries, num_sequences, group, dims)
    lse = 3 * random(*shape[:3], seed=3)
    lse[-1, 0, 0] = -torch.inf
    outputs, queries = (random(*rows, seed=seed, dtype=dtype) for seed in (4, 5))
    return outputs.permute(1, 2, 0, 3), lse, queries.permute(1, 2, 0, 3)


@pytest.mark.parametrize("order", [0, 1])
def test_twin_equals_the_oracle(order: int) -> None:
    states = some_states(4, 6, 8, order)
    outputs, lse, queries = some_outputs(4, 2, 3, 6)
    expected = [
        [
            [
                oracles.corrected(*each, (unpacked(states, s, 6) + [0.0] * 36)[:49], SCALE)
                for each in zip(*rows, strict=True)
            ]
            for rows in zip(*members, strict=True)
        ]
        for s, members in enumerate(
            zip(outputs.tolist(), lse.tolist(), queries.tolist(), strict=True)
        )
    ]
    correct_with_moments(states, outputs, lse, queries, SCALE)
    assert_close(outputs, torch.tensor(expected), torch.float32)


@pytest.mark.parametrize(
    ("dims", "group", "num_queries", "page", "order"),
    [
        (64, 4, 1, 1024, 1),
        (80, 1, 7, 640, 0),
        (128, 8, 1, 2048, 1),
        (96, 3, 30, 768, 1),
        (256, 4, 2, 8192, 1),
    ],
)
def test_launcher_equals_twin(
    backend: Backend, dims: int, group: int, num_queries: int, page: int, order: int
) -> None:
    states = some_states(3 if num_queries > 1 else 4, dims, page, order)
    arguments = some_outputs(states.num_sequences, group, num_queries, dims, dtype=backend.dtype)
    expected = backend.call(CORRECT, "merging.moments", states, *arguments, dims**-0.5)
    results = backend.call(CORRECT, TRITON, states, *arguments, dims**-0.5)
    assert results.dtype == backend.dtype
    assert_close(results, expected, backend.dtype)
    assert torch.equal(results[0], arguments[0][0])  # nothing was evicted
    assert not torch.equal(results[1], arguments[0][1])


def test_states_by_address_give_the_same_outputs(backend: Backend) -> None:
    """Sequences without a state keep their outputs."""
    states = some_states(6, 64, 1024)
    states.lengths[2:4] = 0
    arguments = some_outputs(6, 2, 1, 64, dtype=backend.dtype)
    asked = (states, *arguments, SCALE)
    expected = backend.call(CORRECT, "merging.moments", *asked)
    results = [
        backend.call("tests.kernels.addressed.corrected", module, *asked)
        for module in ("merging.moments", TRITON)
    ]
    for outputs in results:
        assert_close(outputs, expected, backend.dtype)
        assert torch.equal(outputs[2:4], arguments[0][2:4])
        assert not torch.equal(outputs[4], arguments[0][4])


def test_launcher_refuses_wrong_shapes(interpreter: Child) -> None:
    states = some_states(3, 16, page=32)
    outputs, lse, queries = some_outputs(3, 2, 4, 16)
    for arguments, said in (
        ((outputs[:, :, :3], lse, queries), r"expected an output \(3, 2, 4, 16\)"),
        ((outputs, lse[..., :3], queries), r"contiguous log-sum-exps \(3, 2, 4\)"),
        (some_outputs(2, 2, 4, 16), "states of 2 sequences"),
    ):
        with pytest.raises(InvariantError, match=said):
            interpreter.call(CORRECT, TRITON, states, *arguments, SCALE)
