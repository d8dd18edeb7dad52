"""Page tables that are parts of larger ones: rows lie further apart than they are long."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.backends import Backend
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers

LAUNCHES = "tests.kernels.launches."
KERNELS = "vllm_kvcompress.kernels."
NAMES = [
    KERNELS + "attention.decode_triton.decode_attention",
    KERNELS + "attention.prefill_triton.prefill_attention",
    KERNELS + "window_mass_triton.window_mass",
    KERNELS + "value_norms_triton.value_norms_l1",
    KERNELS + "value_norms_triton.value_norms_l2",
    KERNELS + "merging.nearest_keys_triton.nearest_keys",
    LAUNCHES + "compacted",
]


def arguments_of(name: str, entries: PagedEntries) -> tuple[Any, ...]:
    """Entries of three heads, or a view of them; biases of fewer than there is room for."""
    dtype, wanted, view = entries.pages.dtype, entries.valid(), PagedKV.of(entries)
    bias = random(3, 40)
    held = set(entries.page_table.flatten().tolist())
    spare = [page for page in range(len(entries.pages)) if page not in held]
    added = PagedNumbers.of_rows(bias)
    chosen: dict[str, tuple[Any, ...]] = {
        "decode_attention": (entries, random(3, 4, 64, dtype=dtype), 0.1, added),
        "prefill_attention": (entries, random(3, 4, 5, 64, dtype=dtype), 0.1, added),
        "window_mass": (PagedKV.of(entries, 2), random(4, 12, 64, dtype=dtype), 0.1, bias),
        "value_norms_l1": (view, random(3, 64, 2, 32, dtype=dtype), wanted),
        "value_norms_l2": (view, random(3, 2, 64, 64, dtype=dtype)),
        "nearest_keys": (
            view,
            random(*wanted.shape) > 0.5,
        ),
        "compacted": (entries, torch.tensor([1, 0, 1]), torch.arange(32), torch.tensor(spare[:2])),
    }
    return chosen[name.rpartition(".")[2]]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_larger_table_give_the_same_results(backend: Backend, name: str) -> None:
    entries = make_entries([77, 0, 130], dtype=backend.dtype)
    arguments = arguments_of(name, entries)
    expected = backend.call(name, *arguments)
    results = backend.call(LAUNCHES + "from_longer_rows", name, *arguments)
    if isinstance(expected, torch.Tensor):
        expected, results = (expected,), (results,)
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
        assert other.nan_to_num().any()
