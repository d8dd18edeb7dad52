"""The most similar kept key of every evicted one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import oracles
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries
from tests.kernels.child import Child
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.merging.nearest_keys import nearest_keys

NEAREST = "vllm_kvcompress.kernels.merging.nearest_keys_triton.nearest_keys"


def some_kept(entries: PagedEntries, share: float = 0.3) -> Tensor:
    """Flags at random, behind the lengths too."""
    generator = torch.Generator().manual_seed(4)
    return torch.rand(entries.num_sequences, entries.capacity, generator=generator) < share


def test_twin_equals_the_oracle() -> None:
    entries = make_entries([3, 17, 0, 8], block_size=4, head_size=8)
    kept = some_kept(entries)
    kept[3] = False
    cosines, places = nearest_keys(PagedKV.of(entries), kept)
    expected, where = oracles.nearest(entries, kept.tolist())
    assert_close(cosines, torch.tensor(expected), torch.float32)
    assert places.tolist() == where


@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 32), (128, 128), (256, 64)])
def test_launcher_equals_twin(backend: Backend, head_size: int, block_size: int) -> None:
    entries = make_entries([300, 0, 1, 45, 33, 170], block_size, head_size, backend.dtype)
    kept = some_kept(entries)
    kept[3], kept[4, :33] = False, True  # nothing kept, and nothing evicted
    cosines, places = backend.call(NEAREST, PagedKV.of(entries), kept)
    expected, where = backend.twin(twin(nearest_keys), PagedKV.of(entries), kept)
    # Inputs are the same 16-bit numbers for both, and all sums are in fp32.
    assert_close(cosines, expected, torch.float32)
    assert torch.equal(places, where)
    assert places[0].unique().numel() > 40  # from several tiles


def test_of_equal_keys_the_first_is_the_nearest(backend: Backend) -> None:
    entries = make_entries([150], dtype=backend.dtype)
    rows = entries.pages.view(-1, 16, 2, 64)
    rows[:] = rows[int(entries.page_table[0, 0]), 0]
    kept = torch.zeros(1, entries.capacity, dtype=torch.bool)
    kept[0, [70, 71, 149]] = True
    cosines, places = backend.call(NEAREST, PagedKV.of(entries), kept)
    gone = entries.valid() & ~kept
    assert (places[gone] == 70).all()
    assert_close(cosines[gone], torch.ones(147), torch.float32)


def test_the_least_dissimilar_key_is_the_nearest(backend: Backend) -> None:
    """With negative cosines only, and any numbers behind the last kept key."""
    entries = make_entries([40], dtype=backend.dtype)
    rows = entries.pages.view(-1, 16, 2, 64)
    kept = torch.zeros(1, entries.capacity, dtype=torch.bool)
    kept[0, [5, 20]] = True
    rows[:, :, 0] = 1
    for place, size in ((5, -2.0), (20, -1.0)):
        key = rows[int(entries.page_table[0, place // 16]), place % 16, 0]
        key[:] = size
        key[:place] = 0  # turned away from the others by so much
    cosines, places = backend.call(NEAREST, PagedKV.of(entries), kept)
    gone = entries.valid() & ~kept
    assert (places[gone] == 20).all()
    assert_close(cosines[gone], torch.full((38,), -((44 / 64) ** 0.5)), torch.float32)


def test_zero_keys_have_cosine_0(backend: Backend) -> None:
    entries = make_entries([20], dtype=backend.dtype)
    entries.pages.zero_()
    kept = some_kept(entries)
    cosines, places = backend.call(NEAREST, PagedKV.of(entries), kept)
    assert not cosines.any()
    first = int(kept[0].nonzero()[0])
    assert (places[entries.valid() & ~kept] == first).all()


def test_launcher_refuses_wrong_shapes(interpreter: Child) -> None:
    view = PagedKV.of(make_entries([5]))
    with pytest.raises(
        InvariantError, match=r"expected kept \[1, 32\] in torch.bool, got \(1, 5\)"
    ):
        interpreter.call(NEAREST, view, torch.ones(1, 5, dtype=torch.bool))
