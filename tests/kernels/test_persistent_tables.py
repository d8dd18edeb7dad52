"""Page tables that are parts of larger ones: rows lie further apart than they are long."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.backends import Backend
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers

LAUNCHES = "tests.kernels.launches."
KERNELS = "vllm_kvcompress.kernels."
NAMES = [
    KERNELS + "attention.decode_triton.decode_attention",
    KERNELS + "attention.prefill_triton.prefill_attention",
    KERNELS + "window_mass.window_mass_triton.window_mass",
    KERNELS + "value_norms.value_norms_triton.value_norms_l1",
    KERNELS + "merging.nearest_keys.nearest_triton.nearest_keys",
    LAUNCHES + "compacted",
]


def arguments_of(name: str, entries: PagedEntries) -> tuple[Any, ...]:
    """Of three heads; biases of fewer entries than there is room for."""
    dtype, wanted = entries.pages.dtype, entries.valid()
    bias = random(3, 40)
    held = set(entries.page_table.flatten().tolist())
    spare = [page for page in range(len(entries.pages)) if page not in held]
    added = PagedNumbers.of_rows(bias)
    chosen: dict[str, tuple[Any, ...]] = {
        "decode_attention": (random(3, 4, 64, dtype=dtype), 0.1, added),
        "prefill_attention": (random(3, 4, 5, 64, dtype=dtype), 0.1, added),
        "window_mass": (2, random(4, 12, 64, dtype=dtype), 0.1, bias),
        "value_norms_l1": (random(3, 64, 2, 32, dtype=dtype), wanted),
        "nearest_keys": (random(*wanted.shape) > 0.5,),
        "compacted": (torch.tensor([1, 0, 1]), torch.arange(32), torch.tensor(spare[:2])),
    }
    return chosen[name.rpartition(".")[2]]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_from_a_table_of_its_own(backend: Backend, name: str) -> None:
    entries = make_entries([77, 0, 130], dtype=backend.dtype)
    arguments = arguments_of(name, entries)
    expected = backend.call(name, entries, *arguments)
    found = backend.call(LAUNCHES + "from_longer_rows", name, entries, *arguments)
    if isinstance(expected, torch.Tensor):
        expected, found = (expected,), (found,)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
        assert other.nan_to_num().any()
