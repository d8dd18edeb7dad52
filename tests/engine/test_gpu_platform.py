"""What is said and registered where vLLM's platform is CUDA; nothing here runs on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_refusals import SETTINGS, engine_config
from vllm_kvcompress.config import Settings
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.vllm_plugin.attention.registration import kernels_for, use_gpu_backend
from vllm_kvcompress.vllm_plugin.memory import RINGS, reserved_bytes


@pytest.fixture(scope="module")
def on_cuda(llama: str) -> dict[str, Any]:
    """See cuda_platform.py."""
    command = [sys.executable, "-m", "tests.engine.cuda_platform", llama]
    root = Path(__file__).parents[2]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert output.returncode == 0, output.stderr[-3000:]
    return json.loads(output.stdout.splitlines()[-1])


def test_serving_on_cuda_takes_classes_that_exist(on_cuda: dict[str, Any]) -> None:
    assert on_cuda["options"]["attention_backend"] == "CUSTOM"
    parents = on_cuda["parents"]
    assert "vllm.v1.core.sched.async_scheduler.AsyncScheduler" in parents["scheduler_cls"]
    assert "vllm.v1.worker.gpu_worker.Worker" in parents["worker_cls"]


def test_the_backend_is_registered_as_custom(on_cuda: dict[str, Any]) -> None:
    assert on_cuda["said"]["CUSTOM"].endswith("gpu_flash.CompressedFlashBackend")


def test_attention_runs_between_graphs(on_cuda: dict[str, Any]) -> None:
    """By default vLLM captures whole decoding steps too; ours are captured in pieces only."""
    assert len(on_cuda["graphs"]) == 4
    for how, (wanted, found) in on_cuda["graphs"].items():
        assert (wanted, found) == ("FULL_AND_PIECEWISE", "PIECEWISE"), how


@pytest.mark.parametrize("named", ["none", "FLASHINFER", "CUSTOM, FLASH_ATTN"])
def test_other_backends_are_refused(on_cuda: dict[str, Any], named: str) -> None:
    said = on_cuda["said"][named]
    assert f"told to take {named}; add --attention-backend CUSTOM" in said


def test_other_gpus_are_refused(llama: str) -> None:
    """The platform here is CPU, which stands for all that are not CUDA."""
    config = engine_config(llama, SETTINGS, attention_backend="CUSTOM")
    with pytest.raises(UnsupportedError, match="made for CUDA, and this is cpu"):
        use_gpu_backend(config, "triton")


def test_kernels_are_those_asked_for_or_those_that_exist(llama: str) -> None:
    config = engine_config(llama, SETTINGS)
    assert kernels_for(config, "flash") == "flash"
    assert kernels_for(config, "auto") == "triton"  # this build has no FlashAttention


def test_memory_for_events_grows_with_the_longest_request(llama: str) -> None:
    config = engine_config(llama, SETTINGS)
    config.cache_config.block_size = 16
    pipelines = resolve_settings(Settings("adakv+criticalkv", 0.25))
    sizes = []
    for tokens in (4096, 8192):
        config.model_config.max_model_len = tokens
        sizes.append(reserved_bytes(config, pipelines, available=0))
    num_layers, num_heads, num_query_heads, head_size, window = 3, 2, 4, 32, 32
    itemsize = config.model_config.dtype.itemsize
    rings = RINGS * window * num_layers * num_query_heads * head_size * itemsize
    assert sizes[0] > rings + 4096 * num_heads * 4  # at least a score for every token and head
    assert 1.8 < (sizes[1] - rings) / (sizes[0] - rings) < 2.2
    assert reserved_bytes(config, pipelines, available=10**9) - sizes[1] == 10**7
