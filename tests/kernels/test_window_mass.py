"""The observation window's attention over pages."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries, random
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.window_mass import window_mass, window_masses

MASS = "vllm_kvcompress.kernels.window_mass_triton.window_mass"


@pytest.mark.parametrize("num_tail", [0, 2, 3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("stride", [1, 3])
def test_twin_equals_the_oracle(
    num_tail: int, with_bias: bool, with_sinks: bool, stride: int
) -> None:
    """One head is shorter than the window; the bias is longer than some heads."""
    entries = make_entries([3, 17, 8], block_size=4, head_size=8)
    queries = random(5, 6, 8)
    bias = random(3, entries.capacity) if with_bias else None
    more = (bias, stride, random(3, 2, seed=5) if with_sinks else None)
    mass = twin(window_mass)(PagedKV.of(entries, num_tail), queries, 0.3, *more)
    expected = torch.tensor(oracles.window_mass(entries, num_tail, queries, 0.3, *more))
    assert_close(mass, expected, torch.float32)
    assert expected.any()


def check(
    backend: Backend,
    entries: PagedEntries,
    num_tail: int,
    window: int,
    group: int,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    sinks: torch.Tensor | None = None,
) -> None:
    num_heads = entries.num_sequences
    queries = random(window, num_heads * group, entries.head_size, dtype=backend.dtype)
    arguments = (PagedKV.of(entries, num_tail), queries, 2 * entries.head_size**-0.5, bias)
    arguments = (*arguments, stride, sinks)
    expected = backend.twin(twin(window_mass), *arguments)
    mass = backend.call(MASS, *arguments)
    # Shares of an attention of some hundred entries: compared relative to their sum of 1.
    assert_close(100 * mass, 100 * expected, backend.dtype)
    assert mass.sum() > 0


@pytest.mark.parametrize("group", [1, 4, 8])
def test_groups(backend: Backend, group: int) -> None:
    check(backend, make_entries([133, 70], dtype=backend.dtype), 5, 7, group)


@pytest.mark.parametrize("num_tail", [0, 1, 15])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tails_and_bias(backend: Backend, num_tail: int, with_bias: bool) -> None:
    """The bias goes on behind the body, where it must not count."""
    entries = make_entries([64 + num_tail, 16 + num_tail], dtype=backend.dtype)
    check(backend, entries, num_tail, 4, 2, random(2, entries.capacity) if with_bias else None)


def test_sinks_take_their_share(backend: Backend) -> None:
    """In the model's type, as the model holds them."""
    entries, sinks = make_entries([133, 70], dtype=backend.dtype), 4 + random(2, 3)
    check(backend, entries, 5, 7, 3, sinks=sinks.to(backend.dtype))


def test_heads_with_tails_of_their_own(backend: Backend) -> None:
    """Each head gives the same as alone."""
    tails = [3, 0, 9]
    entries = make_entries([64 + tails[0], 16, 32 + tails[2]], dtype=backend.dtype)
    queries, scale = random(5, 6, entries.head_size, dtype=backend.dtype), 0.2
    bodies = entries.flat_lengths.long() - torch.tensor(tails)
    columns = int(entries.page_table.shape[1])
    view = PagedKV(bodies, max(tails), entries, columns, torch.tensor(tails))
    for results in (
        backend.twin(twin(window_mass), view, queries, scale),
        backend.call(MASS, view, queries, scale),
    ):
        for head, tail in enumerate(tails):
            table = entries.page_table[head : head + 1]
            lengths = entries.flat_lengths[head : head + 1]
            alone = PagedEntries(entries.pages, table, lengths, entries.block_size, 64)
            head_queries = queries[:, 2 * head : 2 * head + 2].contiguous()
            expected = backend.twin(twin(window_mass), PagedKV.of(alone, tail), head_queries, scale)
            assert_close(100 * results[head : head + 1], 100 * expected, backend.dtype)


@pytest.mark.parametrize(("head_size", "block_size"), [(80, 32), (128, 16), (256, 64), (96, 128)])
def test_shapes(backend: Backend, head_size: int, block_size: int) -> None:
    check(backend, make_entries([200, 0, 1], block_size, head_size, backend.dtype), 0, 3, 4)


def test_more_rows_than_a_program_takes(backend: Backend) -> None:
    check(backend, make_entries([50, 33], dtype=backend.dtype), 3, 45, 4)


def test_one_query_of_some(backend: Backend) -> None:
    """Some queries precede all entries of a head; the window is no multiple of the stride."""
    entries = make_entries([50, 33], dtype=backend.dtype)
    check(backend, entries, 3, 45, 2, random(2, entries.capacity), stride=4)


def test_more_entries_than_a_split_has(backend: Backend) -> None:
    """Partial sums of several programs become one softmax."""
    entries = make_entries([1300], dtype=backend.dtype)
    check(backend, entries, 0, 3, 4, random(1, entries.capacity))


def test_windows_that_end_together(backend: Backend) -> None:
    """Each window gives the same as by itself; some exceed a head, some have a stride."""
    entries = make_entries([70, 20, 3], dtype=backend.dtype)
    queries = random(23, 6, entries.head_size, dtype=backend.dtype)
    arguments = (PagedKV.of(entries, 2), queries, 0.2)
    windows = (23, 1), (4, 1), (20, 3)
    results = {
        "twin": backend.twin(twin(window_masses), *arguments, windows),
        "kernel": backend.call(f"{MASS}es", *arguments, windows),
    }
    for index, (size, stride) in enumerate(windows):
        alone = (arguments[0], queries[-size:], 0.2, None, stride)
        expected = backend.twin(twin(window_mass), *alone)
        for name, masses in results.items():
            assert masses.shape == (3, *expected.shape), name
            assert_close(100 * masses[index], 100 * expected, backend.dtype)


def test_no_queries(backend: Backend) -> None:
    entries = make_entries([20], dtype=backend.dtype)
    mass = backend.call(MASS, PagedKV.of(entries), random(0, 4, 64, dtype=backend.dtype), 1.0)
    assert mass.shape == (1, entries.capacity)
    assert not mass.any()


def test_launcher_refuses_wrong_shapes(interpreter: Child) -> None:
    with pytest.raises(InvariantError, match=r"expected queries \[window, 2 \* group, 64\]"):
        interpreter.call(MASS, PagedKV.of(make_entries([5, 3])), random(3, 5, 64), 1.0)
