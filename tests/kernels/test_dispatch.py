"""One name per kernel, whatever the device; and what pages must look like."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from offline.gathered_kv import GatheredKV
from tests.kernels.cases import make_entries, random
from tests.kernels.child import Child
from tests.policies.test_imports import import_without
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels import dispatch
from vllm_kvcompress.kernels.attention import decode_attention
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.window_mass import window_mass

LAUNCHER = "vllm_kvcompress.kernels.merging.nearest_keys_triton.nearest_keys"
KERNELS = (
    "apportion_triton.apportion",
    "attention.decode_triton.decode_attention",
    "attention.prefill_triton.prefill_attention",
    "compaction_triton.compact_pages",
    "merging.nearest_keys_triton.nearest_keys",
    "merging.moments_triton.correct_with_moments",
    "value_norms_triton.value_norms_l1",
    "value_norms_triton.value_norms_l2",
    "window_mass_triton.window_mass",
    "page_choice_triton.choose_pages",
    "top_entries_triton.top_entries",
)


def operators_beside(launcher: str) -> str:
    """Returns the module of the torch operators beside a launcher's module."""
    module = launcher.rpartition(".")[0]
    if module.startswith("attention."):
        return "vllm_kvcompress.kernels.attention"
    return f"vllm_kvcompress.kernels.{module.removesuffix('_triton')}"


def test_nothing_imports_triton_before_it_is_needed() -> None:
    modules = sorted({operators_beside(launcher) for launcher in KERNELS})
    done = import_without(modules, "triton", "vllm")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("launcher", KERNELS)
def test_launchers_have_their_twins_signature(compiler: Child, launcher: str) -> None:
    name = launcher.rpartition(".")[2]
    operator = getattr(importlib.import_module(operators_beside(launcher)), name)
    signature = str(inspect.signature(twin(operator)))
    launcher = f"vllm_kvcompress.kernels.{launcher}"
    assert compiler.call("tests.kernels.launches.signature_of", launcher) == signature
    assert str(inspect.signature(operator)) == signature


def test_pages_on_the_cpu_take_the_twin() -> None:
    entries = make_entries([5, 3])
    queries = random(2, 4, 64)
    expected, _ = twin(decode_attention)(entries, queries, 0.1)
    outputs, _ = decode_attention(entries, queries, 0.1)
    assert torch.equal(outputs, expected)


def test_launchers_refuse_pages_on_the_cpu(compiler: Child) -> None:
    view = PagedKV.of(make_entries([5]))
    with pytest.raises(
        InvariantError, match=r"expected pages or tensors on a CUDA device.*call the operator"
    ):
        compiler.call(LAUNCHER, view, view.valid)


def test_launchers_refuse_gathered_tensors(compiler: Child) -> None:
    view = GatheredKV.of(random(1, 5, 8), random(1, 5, 8))
    with pytest.raises(InvariantError, match=r"keys and values in pages, got GatheredKV.*operator"):
        compiler.call(LAUNCHER, view, view.valid)


def test_gathered_tensors_take_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin takes them on any device."""
    monkeypatch.setattr(dispatch, "takes_triton", lambda device: True)
    view = GatheredKV.of(random(1, 5, 8), random(1, 5, 8))
    mass = window_mass(view, random(3, 2, 8), 0.3)
    assert torch.equal(mass, twin(window_mass)(view, random(3, 2, 8), 0.3))
    assert mass.any()


def test_pages_of_wrong_shapes_are_refused() -> None:
    good = make_entries([5, 3])
    pages, table, lengths = good.pages, good.page_table, good.lengths
    with pytest.raises(InvariantError, match=r"expected pages \[num_pages, 4096\].*\(5, 2048\)"):
        PagedEntries(pages, table, lengths, 16, 128)
    with pytest.raises(InvariantError, match="rows lie side by side"):
        PagedEntries(pages, table.t().contiguous().t(), lengths, 16, 64)
    with pytest.raises(InvariantError, match=r"expected 2 lengths, one per row.*got 3"):
        PagedEntries(pages, table, torch.tensor([1, 2, 3]), 16, 64)
