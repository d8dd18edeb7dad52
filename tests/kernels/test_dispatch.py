"""One name per kernel, whatever the device; and what pages must look like."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.kernels.cases import make_entries, random
from tests.kernels.child import Child
from tests.policies.test_imports import import_without
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels import paged, paged_torch, selection, selection_torch
from vllm_kvcompress.kernels.paged_entries import PagedEntries

KERNELS = {
    "apportion": "apportion_triton",
    "compact_pages": "compact_triton",
    "correct_with_moments": "correction_triton",
    "decode_attention": "decode_triton",
    "nearest_keys": "nearest_triton",
    "prefill_attention": "prefill_triton",
    "top_entries": "top_entries_triton",
    "value_norms_l1": "value_norms_triton",
    "window_mass": "window_mass_triton",
    "window_perturbation": "perturbation_triton",
}


SELECTION = ("apportion", "top_entries")


@pytest.mark.parametrize("module", ["paged", "selection"])
def test_nothing_imports_triton_before_it_is_needed(module: str) -> None:
    done = import_without(f"vllm_kvcompress.kernels.{module}", "triton", "vllm")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", KERNELS)
def test_launchers_have_their_twins_signature(compiler: Child, name: str) -> None:
    launcher = f"vllm_kvcompress.kernels.{KERNELS[name]}.{name}"
    names, twins = (selection, selection_torch) if name in SELECTION else (paged, paged_torch)
    twin = str(inspect.signature(getattr(twins, name)))
    assert compiler.call("tests.kernels.launches.signature_of", launcher) == twin
    assert str(inspect.signature(getattr(names, name))) == twin


def test_pages_on_the_cpu_take_the_twin() -> None:
    entries = make_entries([5, 3])
    queries = random(2, 4, 64)
    expected, _ = paged_torch.decode_attention(entries, queries, 0.1)
    outputs, _ = paged.decode_attention(entries, queries, 0.1)
    assert torch.equal(outputs, expected)


def test_launchers_refuse_pages_on_the_cpu(compiler: Child) -> None:
    entries = make_entries([5])
    with pytest.raises(
        InvariantError, match=r"expected pages or tensors on a CUDA device.*kernels\.paged"
    ):
        compiler.call(
            "vllm_kvcompress.kernels.nearest_triton.nearest_keys", entries, entries.valid()
        )


def test_pages_that_do_not_fit() -> None:
    good = make_entries([5, 3])
    pages, table, lengths = good.pages, good.page_table, good.lengths
    with pytest.raises(InvariantError, match=r"expected pages \[num_pages, 4096\].*\(5, 2048\)"):
        PagedEntries(pages, table, lengths, 16, 128)
    with pytest.raises(InvariantError, match="rows lie side by side"):
        PagedEntries(pages, table.t().contiguous().t(), lengths, 16, 64)
    with pytest.raises(InvariantError, match=r"expected 2 lengths, one per row.*got 3"):
        PagedEntries(pages, table, torch.tensor([1, 2, 3]), 16, 64)
