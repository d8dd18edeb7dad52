"""Decode attention over ragged pages."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.backends import Backend, Device, assert_close
from tests.kernels.cases import make_entries, random, some_bias
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.attention import decode_attention
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.dispatch import twin

MODULE = "vllm_kvcompress.kernels.attention.decode_triton."
DECODE = MODULE + "decode_attention"
RAGGED = [45, 0, 1, 130, 16, 0, 77, 33]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_twin_equals_the_oracle(group: int, with_bias: bool) -> None:
    entries = make_entries([7, 0, 1, 19], block_size=4, head_size=8)
    queries = random(4, group, 8)
    bias = some_bias([5, 0, 3, 11], page=4) if with_bias else None
    outputs, lse = twin(decode_attention)(entries, queries, 0.3, bias)
    expected, sums = oracles.prefill(entries, queries[:, :, None], 0.3, bias)
    assert_close(outputs, torch.tensor(expected)[:, :, 0], torch.float32)
    assert lse is not None
    assert_close(lse, torch.tensor(sums)[:, :, 0], torch.float32)


def check(backend: Backend, entries: object, group: int, bias: PagedNumbers | None) -> None:
    """Triton against the twin, into an output full of NaN."""
    queries = random(len(entries.lengths), group, entries.head_size, dtype=backend.dtype)
    arguments = (entries, queries, entries.head_size**-0.5, bias)
    expected, expected_lse = backend.twin(twin(decode_attention), *arguments)
    out = torch.full_like(queries, torch.nan)
    outputs, lse = backend.call(DECODE, *arguments, True, out)
    assert outputs.dtype == backend.dtype
    assert_close(outputs, expected, backend.dtype)
    assert_close(lse, expected_lse, backend.dtype)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_groups(backend: Backend, group: int) -> None:
    check(backend, make_entries(RAGGED, dtype=backend.dtype), group, None)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes(backend: Backend, head_size: int) -> None:
    entries = make_entries([45, 0, 70], head_size=head_size, dtype=backend.dtype)
    check(backend, entries, 4, some_bias([50, 2, 33]))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(backend: Backend, block_size: int) -> None:
    """Tiles inside a page, and tiles over several."""
    entries = make_entries([300, 5, 129], block_size=block_size, dtype=backend.dtype)
    check(backend, entries, 4, None)


def test_bias_of_some_entries(backend: Backend) -> None:
    """Entries behind the bias have none."""
    entries = make_entries(RAGGED, dtype=backend.dtype)
    check(backend, entries, 4, some_bias([40, 0, 9, 100, 16, 8, 0, 33]))


def test_bias_in_a_page_per_sequence(backend: Backend) -> None:
    entries = make_entries(RAGGED, dtype=backend.dtype)
    check(backend, entries, 4, PagedNumbers.of_rows(3 * random(len(RAGGED), 40)))


@pytest.mark.parametrize("search", [4, 16])
def test_more_sequences_than_are_compared_at_once(backend: Backend, search: int) -> None:
    """A search in two steps, and in three."""
    lengths = [0] * 45
    lengths[0], lengths[3], lengths[20], lengths[44] = 40, 1, 90, 17
    entries = make_entries(lengths, head_size=16, dtype=backend.dtype)
    queries = random(45, 2, 16, dtype=backend.dtype)
    expected, _ = backend.twin(twin(decode_attention), entries, queries, 0.1)
    launch = "tests.kernels.launches.decode_searching"
    outputs = backend.call(launch, entries, queries, 0.1, search)
    assert_close(outputs, expected, backend.dtype)


@pytest.mark.parametrize("requests", [256, 1024])
def test_a_program_reads_few_lengths_however_many_requests(
    interpreter: Child, requests: int
) -> None:
    """Requests of one head each: few reads to find its share, three in a reduction."""
    lengths = [0] * requests
    lengths[-6:] = [40, 0, 1, 130, 16, 9]
    entries = make_entries(lengths, head_size=16)
    queries = random(len(lengths), 1, 16)
    launch = "tests.kernels.launches.decode_counting"
    outputs, tile_ends, most = interpreter.call(launch, entries, queries, 0.1)
    assert_close(outputs, twin(decode_attention)(entries, queries, 0.1)[0], torch.float32)
    assert tile_ends[-7:].tolist() == [0, 1, 1, 2, 4, 5, 6]
    # Two steps of a search, how many tiles there are, and two numbers for each of its sequences.
    of_pieces, of_reduction = most[min(most)], most[requests]
    assert of_pieces <= 2 * 128 + 1 + 2 * 4
    assert of_reduction == 3


@pytest.mark.parametrize("num_sequences", [1, 1024, 2500])
def test_tiles_are_summed_up_layer_by_layer(backend: Backend, num_sequences: int) -> None:
    """Rows of both are parts of longer ones."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(0, 200, (3, num_sequences + 2), generator=generator).to(torch.int32)
    expected = torch.full_like(lengths, -1)
    for layer, row in enumerate(lengths[:, 1:-1].tolist()):
        ends, total = [], 0
        for length in row:
            total += math.ceil(length / 64)
            ends.append(total)
        expected[layer, 1:-1] = torch.tensor(ends)
    device = "cuda" if isinstance(backend, Device) else "cpu"
    for module in ("attention", "attention.decode_triton"):
        launch = "tests.kernels.launches.tiles_summed"
        assert torch.equal(backend.call(launch, module, lengths, device), expected)


def test_sequences_without_entries(backend: Backend) -> None:
    check(backend, make_entries([0, 0], dtype=backend.dtype), 4, None)


def test_lengths_by_request_and_head_and_no_lse(backend: Backend) -> None:
    entries = make_entries([20, 5, 0, 33], dtype=backend.dtype)
    by_head = type(entries)(entries.pages, entries.page_table, entries.lengths.view(2, 2), 16, 64)
    queries = random(4, 4, 64, dtype=backend.dtype)
    expected, _ = backend.call(DECODE, entries, queries, 0.1)
    outputs, lse = backend.call(DECODE, by_head, queries, 0.1, None, False)
    assert lse is None
    assert torch.equal(outputs, expected)


def test_a_batch_is_its_requests(backend: Backend) -> None:
    """Other requests of a batch only move the cuts between pieces."""
    entries = make_entries(RAGGED, dtype=backend.dtype)
    queries = random(len(RAGGED), 4, 64, dtype=backend.dtype)
    together, _ = backend.call(DECODE, entries, queries, 0.1)
    alone = type(entries)(entries.pages, entries.page_table[3:4], entries.lengths[3:4], 16, 64)
    by_itself, _ = backend.call(DECODE, alone, queries[3:4], 0.1)
    assert_close(together[3:4], by_itself, backend.dtype)


def test_launcher_refuses_wrong_shapes(interpreter: Child) -> None:
    entries = make_entries([5, 3])
    for queries, said in (
        (random(2, 4, 32), r"expected queries \[2, group, 64\], got \(2, 4, 32\); view"),
        (random(2, 4, 64).half(), "expected queries of the pages' type torch.float32"),
    ):
        with pytest.raises(InvariantError, match=said):
            interpreter.call(DECODE, entries, queries, 0.1)
    with pytest.raises(InvariantError, match="biases of 2 sequences, got 3"):
        interpreter.call(DECODE, entries, random(2, 4, 64), 0.1, some_bias([1, 2, 3]))


def test_addresses_beyond_32_bits(interpreter: Child) -> None:
    """A page more than 2^31 elements into the cache; only what is used of it is ever touched."""
    launch = "tests.kernels.launches.decode_far_and_near"
    far, near = interpreter.call(launch, torch.float16, "cpu")
    assert torch.equal(far, near)
