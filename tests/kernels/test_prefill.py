"""A chunk's attention over pages."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries, random, some_bias
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.attention import prefill_attention
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.dispatch import twin

PREFILL = "vllm_kvcompress.kernels.attention.prefill_triton.prefill_attention"
DECODE = "vllm_kvcompress.kernels.attention.decode_triton.decode_attention"


@pytest.mark.parametrize("with_bias", [False, True])
def test_twin_equals_the_oracle(with_bias: bool) -> None:
    """Sequences shorter than the chunk, whose first queries see nothing, are among them."""
    entries = make_entries([7, 0, 3, 19], block_size=4, head_size=8)
    queries = random(4, 2, 5, 8)
    bias = some_bias([5, 0, 3, 11], page=4) if with_bias else None
    outputs, lse = twin(prefill_attention)(entries, queries, 0.3, bias)
    expected, sums = oracles.prefill(entries, queries, 0.3, bias)
    assert_close(outputs, torch.tensor(expected), torch.float32)
    assert lse is not None
    assert_close(lse, torch.tensor(sums), torch.float32)


def check(
    backend: Backend,
    entries: PagedEntries,
    num_queries: int,
    group: int,
    bias: PagedNumbers | None = None,
) -> None:
    shape = (entries.num_sequences, num_queries, group, entries.head_size)
    queries = random(*shape, dtype=backend.dtype).transpose(1, 2)
    arguments = (entries, queries, entries.head_size**-0.5, bias)
    expected, expected_lse = backend.twin(twin(prefill_attention), *arguments)
    # Sequences further apart than they are long, as where a batch has other queries between.
    out = queries.new_full((*shape[:1], 2 * num_queries, *shape[2:]), torch.nan)
    out = out.transpose(1, 2)[:, :, :num_queries]
    outputs, lse = backend.call(PREFILL, *arguments, True, out)
    assert_close(outputs, expected, backend.dtype)
    assert_close(lse, expected_lse, backend.dtype)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_groups(backend: Backend, group: int) -> None:
    check(backend, make_entries([133, 70], dtype=backend.dtype), 13, group)


@pytest.mark.parametrize(("head_size", "block_size"), [(80, 32), (128, 16), (256, 64), (96, 128)])
def test_shapes(backend: Backend, head_size: int, block_size: int) -> None:
    entries = make_entries([200, 0, 3], block_size, head_size, backend.dtype)
    check(backend, entries, 9, 4, some_bias([150, 0, 2]))


@pytest.mark.parametrize("length", [127, 128, 129, 260])
def test_every_row_ends_at_its_own_entry(backend: Backend, length: int) -> None:
    """Several blocks of rows, whose ends fall before, on and behind the ends of tiles."""
    check(backend, make_entries([length], dtype=backend.dtype), 101, 2)


def test_one_query_is_decoding(backend: Backend) -> None:
    entries = make_entries([45, 0, 1, 130], dtype=backend.dtype)
    queries = random(4, 4, 64, dtype=backend.dtype)
    bias = some_bias([40, 0, 1, 100])
    expected, expected_lse = backend.call(DECODE, entries, queries, 0.1, bias)
    outputs, lse = backend.call(PREFILL, entries, queries[:, :, None], 0.1, bias)
    assert_close(outputs[:, :, 0], expected, backend.dtype)
    assert_close(lse[:, :, 0], expected_lse, backend.dtype)


def test_no_lse_and_no_queries(backend: Backend) -> None:
    entries = make_entries([5], dtype=backend.dtype)
    queries = random(1, 4, 2, 64, dtype=backend.dtype)
    assert backend.call(PREFILL, entries, queries, 0.1, None, False)[1] is None
    outputs, _ = backend.call(PREFILL, entries, queries[:, :, :0], 0.1)
    assert outputs.shape == (1, 4, 0, 64)


def test_launcher_refuses_wrong_shapes(interpreter: Child) -> None:
    with pytest.raises(InvariantError, match=r"expected queries \[2, group, m, 64\]"):
        interpreter.call(PREFILL, make_entries([5, 3]), random(2, 4, 64), 1.0)
