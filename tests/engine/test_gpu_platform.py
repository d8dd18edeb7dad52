"""Registration and refusals where vLLM's platform is CUDA; nothing here runs on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.engine.test_refusals import MLA, SETTINGS, engine_config
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec
from vllm_kvcompress.vllm_plugin.startup.registration import kernels_for, use_gpu_backend
from vllm_kvcompress.vllm_plugin.worker_side import memory


@pytest.fixture(scope="module")
def on_cuda(llama: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Output of cuda_platform.py for this model, and one with MLA."""
    latents = tmp_path_factory.mktemp("latents")
    (latents / "config.json").write_text(json.dumps(MLA))
    command = [sys.executable, "-m", "tests.engine.cuda_platform", llama, str(latents)]
    root = Path(__file__).parents[2]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert output.returncode == 0, output.stderr[-3000:]
    return json.loads(output.stdout.splitlines()[-1])


def test_classes_named_for_cuda_exist(on_cuda: dict[str, Any]) -> None:
    assert on_cuda["options"]["attention_backend"] == "CUSTOM"
    parents = on_cuda["parents"]
    assert "vllm.v1.core.sched.async_scheduler.AsyncScheduler" in parents["scheduler_cls"]
    assert "vllm.v1.worker.gpu_worker.Worker" in parents["worker_cls"]


def test_backend_is_registered_as_custom(on_cuda: dict[str, Any]) -> None:
    assert on_cuda["said"]["CUSTOM"].endswith("gpu_flash.CompressedFlashBackend")


def test_full_graphs_need_kernels_for_all_requests_and_model_runner_v2(
    on_cuda: dict[str, Any],
) -> None:
    """By default vLLM captures whole decoding steps; piecewise with FlashAttention alone,
    and with model runner V1."""
    assert len(on_cuda["graphs"]) == 16
    for how, modes in on_cuda["graphs"].items():
        _, attention, _, runner = how.split()
        full = attention != "flash" and runner == "V2"
        ours = "FULL_AND_PIECEWISE" if full else "PIECEWISE"
        assert modes == ["FULL_AND_PIECEWISE", ours], how


def test_auto_picks_own_kernels_where_they_allow_full_graphs(
    on_cuda: dict[str, Any],
) -> None:
    """Unless other kernels are named; `auto` falls back where `own` would be refused."""
    assert {how: takes for how, takes in on_cuda["own_kernels"].items() if takes} == {
        "auto": True,
        "own, eager": True,
    }
    assert len(on_cuda["own_kernels"]) == 8


def test_piecewise_graphs_capture_no_attention(on_cuda: dict[str, Any]) -> None:
    """So that measurements, which ask for them, can look at every layer's outputs."""
    assert on_cuda["piecewise"] == {
        "auto": ["PIECEWISE", "PIECEWISE"],
        "own": ["PIECEWISE", "PIECEWISE"],
    }


def test_auto_takes_flash_attention_4_on_blackwell(on_cuda: dict[str, Any]) -> None:
    """In the place of FlashInfer; heads of 256 elements get blocks of 128 tokens."""
    assert on_cuda["blackwell"]["stock"] == ["FLASHINFER", "FLASH_ATTN"]
    assert on_cuda["blackwell"]["by_head_size"] == {
        "64": ["flash", 4, 16],
        "128": ["flash", 4, 16],
        "256": ["flash", 4, 128],
    }


def test_models_with_mla_take_vllms_triton_mla(on_cuda: dict[str, Any]) -> None:
    """Which vLLM's CUDA platform takes for these layers; steps are captured without attention."""
    found = on_cuda["latents"]
    assert set(found["kernels"].values()) == {"triton-mla"}
    assert found["path"].endswith("latent_gpu.CompressedTritonLatentBackend")
    assert found["graphs"][1] == "PIECEWISE"
    assert "told to take FLASHMLA; add --attention-backend CUSTOM" in found["FLASHMLA"]


@pytest.mark.parametrize("named", ["none", "FLASHINFER", "CUSTOM, FLASH_ATTN"])
def test_backends_besides_custom_are_refused(on_cuda: dict[str, Any], named: str) -> None:
    said = on_cuda["said"][named]
    assert f"told to take {named}; add --attention-backend CUSTOM" in said


def test_platforms_besides_cuda_are_refused(llama: str) -> None:
    """The platform here is CPU, which stands for all that are not CUDA."""
    config = engine_config(llama, SETTINGS, attention_backend="CUSTOM")
    with pytest.raises(UnsupportedError, match="made for CUDA, and this is cpu"):
        use_gpu_backend(config, "triton")


def test_kernels_are_those_asked_for_or_else_those_that_exist(llama: str) -> None:
    config = engine_config(llama, SETTINGS)
    assert kernels_for(config, "flash") == "flash"
    assert kernels_for(config, "auto") == "triton"  # this build has no FlashAttention


def test_too_little_memory_for_an_event_is_refused(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(memory, "_run_longest", out_of_memory)
    for name in ("reset_peak_memory_stats", "memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, lambda: 0)
    config = engine_config(llama, SETTINGS)
    state = SimpleNamespace(vllm_config=config, settings=Settings(policy="adakv", budget=0.25))
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = CompressedAttentionSpec.from_full_attention(
        full, Settings(policy="adakv", budget=0.25), ()
    )
    with pytest.raises(UnsupportedError, match=r"does not fit.* lower --max-model-len"):
        memory.reserved_bytes(state, None, {"layer": spec}, 0)
    assert memory.reserved_bytes(state, None, {"layer": full}, 100) == 1


@pytest.mark.parametrize(
    ("option", "num_bytes"),
    [("parts=2", 256), ("parts=4", 512), ("bounds=exact", 256), ("bounds=int8", 64 + 4)],
)
def test_memory_of_page_summaries_is_reserved(
    llama: str, monkeypatch: pytest.MonkeyPatch, option: str, num_bytes: int
) -> None:
    """Some vectors beside the 32 of a page of 16 tokens, of what tables and events leave."""
    monkeypatch.setattr(memory, "_event_bytes", lambda *_: 100)
    settings = Settings(policy="none", read=f"quest:0.25,{option}")
    state = SimpleNamespace(vllm_config=engine_config(llama, SETTINGS), settings=settings)
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = CompressedAttentionSpec.from_full_attention(full, settings, ())
    before = int(100 * memory.FRAGMENTATION + memory.TABLES_SHARE * 10_000)
    expected = before + (10_000 - before) * num_bytes // (32 * 128 + num_bytes)
    assert memory.reserved_bytes(state, None, {"layer": spec}, 10_000) == expected
