"""Operators that a CUDA graph replays: where ids and targets are is read when they run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels import addressed, oracles
from tests.kernels.backends import Backend, Device, assert_close
from tests.kernels.cases import some_bias
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.attention import decode_rows
from vllm_kvcompress.kernels.common.paged_entries import QueryTargets
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.dispatch import twin


def biases() -> PagedNumbers:
    """Biases of some entries of the requests that have pages of their own."""
    return some_bias([0, 0, 20, 0, 0, 0, 1, 55, 0, 0])


def check_attended(
    results: tuple[torch.Tensor, torch.Tensor | None], dtype: torch.dtype, bias: PagedNumbers | None
) -> None:
    """Against plain loops over the page table."""
    entries, queries = addressed.make_entries(dtype), addressed.make_queries(dtype)
    by_head = queries.unflatten(1, (addressed.HEADS, -1)).flatten(0, 1)
    outputs, sums = oracles.prefill(entries, by_head[:, :, None], addressed.DIM**-0.5, bias)
    assert_close(results[0], torch.tensor(outputs)[:, :, 0].reshape(queries.shape), dtype)
    if bias is not None:
        assert results[1] is not None
        assert_close(results[1], torch.tensor(sums)[:, :, 0], dtype)


@pytest.mark.parametrize("bias", [None, biases()], ids=["plain", "bias"])
def test_twin_equals_the_oracle(bias: PagedNumbers | None) -> None:
    results = addressed.attended("attention", torch.float32, "cpu", bias)
    check_attended(results, torch.float32, bias)


@pytest.mark.parametrize("bias", [None, biases()], ids=["plain", "bias"])
def test_attention(backend: Backend, bias: PagedNumbers | None) -> None:
    device = "cuda" if isinstance(backend, Device) else "cpu"
    asked = ("attention.decode_triton", backend.dtype, device, bias)
    results = backend.call("tests.kernels.addressed.attended", *asked)
    check_attended(results, backend.dtype, bias)


def check_recorded(memory: torch.Tensor, queries: torch.Tensor, places: list) -> None:
    for request, row in enumerate(places):
        for head, place in enumerate(row):
            if place is not None:
                assert torch.equal(memory[1, place], queries[request, head])
                memory[1, place] = 0
    assert not memory.any()


def test_the_twin_records_where_it_is_told() -> None:
    check_recorded(*addressed.recorded("attention", torch.float32, "cpu"))


def test_recording(backend: Backend) -> None:
    device = "cuda" if isinstance(backend, Device) else "cpu"
    name = "tests.kernels.addressed.recorded"
    check_recorded(*backend.call(name, "attention.decode_triton", backend.dtype, device))


def test_what_is_refused(interpreter: Child) -> None:
    rows, _ = addressed.make_rows(addressed.make_entries(torch.float32), "cpu")
    queries = addressed.make_queries(torch.float32)
    launch = "vllm_kvcompress.kernels.attention.decode_triton.decode_rows"
    with pytest.raises(InvariantError, match=r"expected queries \[5, heads, 64\].*float16"):
        interpreter.call(launch, rows, queries.half(), 1.0, queries)
    with pytest.raises(InvariantError, match=r"expected outputs .*\(4, 4, 64\)"):
        interpreter.call(launch, rows, queries, 1.0, queries[1:])
    targets = QueryTargets(torch.zeros(5, 3, dtype=torch.int64), rows.layer_offsets)
    rows = replace(rows, query_targets=targets)
    with pytest.raises(InvariantError, match=r"expected addresses \[5, 4\]"):
        interpreter.call(launch, rows, queries, 1.0, queries)


def test_nothing_held_is_nothing_read() -> None:
    rows, _ = addressed.make_rows(addressed.make_entries(torch.float32), "cpu")
    rows.lengths.zero_()
    queries = addressed.make_queries(torch.float32)
    out = torch.full_like(queries, torch.nan)
    twin(decode_rows)(rows, queries, 1.0, out)
    assert not out.any()
