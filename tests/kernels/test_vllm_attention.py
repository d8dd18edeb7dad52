"""vLLM's Triton attention, as gpu_check compares with it, does the same as the kernels here."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_parts import vllm_attention
from tests.kernels.backends import Backend, assert_close
from tests.kernels.cases import make_entries, random
from vllm_kvcompress.kernels.attention import prefill_attention
from vllm_kvcompress.kernels.dispatch import twin

LAUNCH = "tests.kernels.launches.vllm_outputs"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs the sources of vllm"
)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize(("lengths", "head_size"), [([45, 5, 130], 64), ([9] * 130, 16)])
def test_same_outputs(
    backend: Backend, num_queries: int, lengths: list[int], head_size: int
) -> None:
    """Few sequences, which vLLM splits, and as many as it does not."""
    entries = make_entries(lengths, head_size=head_size, dtype=backend.dtype)
    inside = entries.page_table.masked_fill(entries.page_table == 2**31 - 1, 0)
    entries = replace(entries, page_table=inside)
    queries = random(len(lengths), num_queries, 4, head_size, dtype=backend.dtype)
    expected, _ = backend.twin(twin(prefill_attention), entries, queries.transpose(1, 2), 0.1)
    outputs = backend.call(LAUNCH, entries, queries, 0.1)
    assert_close(outputs.transpose(1, 2), expected, backend.dtype)


def test_vllm_stays_as_it_was_imported() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}
    vllm_attention.unified_attention.cache_clear()
    assert vllm_attention.why_not() is None
    after = {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}
    assert after == before


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    vllm_attention.unified_attention.cache_clear()
    assert "ImportError: vllm has no" in str(vllm_attention.why_not())
    vllm_attention.unified_attention.cache_clear()
