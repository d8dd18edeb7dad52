"""OBCache's scores over pages."""

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
from vllm_kvcompress.kernels.window_perturbation import reference

PERTURBATION = "vllm_kvcompress.kernels.window_perturbation.perturbation_triton.window_perturbation"
VARIANTS = ["value", "key", "joint"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_tail", "stride"), [(0, 1), (2, 1), (3, 1), (2, 2), (0, 3)])
def test_twin_is_the_oracle(num_tail: int, stride: int, variant: str) -> None:
    """A head shorter than the window, too."""
    entries = make_entries([3, 17, 8], block_size=4, head_size=8)
    queries = random(5, 6, 8)
    how = (queries, 0.3, variant, stride)
    changes = reference.window_perturbation(PagedKV.of(entries, num_tail), *how)
    expected = oracles.perturbation(entries, num_tail, *how)
    assert_close(changes, torch.tensor(expected), torch.float32)
    assert changes.any()


def check(
    backend: Backend,
    entries: PagedEntries,
    num_tail: int,
    window: int,
    group: int,
    variant: str,
    stride: int = 1,
) -> None:
    num_heads = entries.num_sequences
    queries = random(window, num_heads * group, entries.head_size, dtype=backend.dtype)
    view, scale = PagedKV.of(entries, num_tail), entries.head_size**-0.5
    arguments = (view, queries, scale, variant, stride)
    expected = backend.twin(reference.window_perturbation, *arguments)
    changes = backend.call(PERTURBATION, *arguments)
    size = expected.amax(dim=1, keepdim=True).clamp_min(1e-30)
    assert_close(changes / size, expected / size, backend.dtype)
    assert (changes >= 0).all()
    assert expected.any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_tail", [0, 15])
def test_variants_and_tails(backend: Backend, variant: str, num_tail: int) -> None:
    entries = make_entries([64 + num_tail, 16 + num_tail], dtype=backend.dtype)
    check(backend, entries, num_tail, 4, 2, variant)


@pytest.mark.parametrize(("head_size", "block_size"), [(80, 32), (128, 16), (256, 64)])
def test_shapes(backend: Backend, head_size: int, block_size: int) -> None:
    check(
        backend, make_entries([200, 0, 1], block_size, head_size, backend.dtype), 0, 3, 4, "joint"
    )


def test_more_rows_than_a_program_takes(backend: Backend) -> None:
    check(backend, make_entries([50, 33], dtype=backend.dtype), 3, 45, 4, "joint")


def test_one_query_of_some_counts(backend: Backend) -> None:
    """Before all entries of a head, too; a window that is no multiple of the stride."""
    check(backend, make_entries([50, 33], dtype=backend.dtype), 3, 45, 2, "joint", stride=4)


def test_more_entries_than_a_split_has(backend: Backend) -> None:
    """Outputs of several programs become one; the second head lies in the first split."""
    check(backend, make_entries([2100, 30], dtype=backend.dtype), 4, 3, 2, "key")


def test_no_change_is_negative() -> None:
    """Where an entry is all that is seen, the output is its value, but for rounding."""
    entries = make_entries([1] * 50, block_size=4, head_size=8)
    changes = reference.window_perturbation(PagedKV.of(entries), random(1, 50, 8), 2.0, "key")
    assert (changes >= 0).all()
    assert (changes < 0.01).all()
    assert changes.any()


def test_no_queries(backend: Backend) -> None:
    entries = make_entries([20], dtype=backend.dtype)
    none = random(0, 4, 64, dtype=backend.dtype)
    changes = backend.call(PERTURBATION, PagedKV.of(entries), none, 1.0, "value")
    assert changes.shape == (1, entries.capacity)
    assert not changes.any()


def test_what_a_launch_refuses(interpreter: Child) -> None:
    view = PagedKV.of(make_entries([5, 3]))
    with pytest.raises(InvariantError, match=r"expected queries \[window, 2 \* group, 64\]"):
        interpreter.call(PERTURBATION, view, random(3, 5, 64), 1.0, "key")
    with pytest.raises(InvariantError, match="expected a variant of value, key, joint, got 'all'"):
        interpreter.call(PERTURBATION, view, random(3, 4, 64), 1.0, "all")
