"""How a GPU worker starts: in which order, with how much memory, and what stays right later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.engine.conftest import request
from tests.gpu_path.conftest import ROOT, Run
from tests.gpu_path.stand_ins import CONSUMED_BYTES, REQUESTED_BYTES
from tests.tiny_models import prompt
from vllm_kvcompress.vllm_plugin.worker_side.memory import FRAGMENTATION, TABLES_SHARE

ADAKV = {"policy": "adakv", "budget": 0.25}
CRITICAL = {"policy": "adakv+criticalkv", "budget": 0.25}


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_kernels_are_warmed_up_before_vllm_watches_for_compilation(
    llama: str, run_gpu_path: Run, runner: str
) -> None:
    """Compiled models, with an error for what Triton compiles later; then requests."""
    report = run_gpu_path(
        llama,
        [[request("a", prompt(600, seed=1), 4)]],
        settings=CRITICAL,
        runner=runner,
        asynchronous=runner == "V2",
        probes=["start_up", "compiled"],
        environment={"VLLM_CPU_CI_ENV": "1"},
        enforce_eager=False,
        jit_monitor_mode="error",
    )
    steps = report["start_up"]
    names = [name for name, _ in steps if name != "profile_run"]
    vllm = ["warmup_kernels", "capture_model"] if runner == "V2" else ["capture_model"]
    assert names == ["bind", "warm_up", *vllm, "enable_gpu_sync_check"]
    assert [watched for _, watched in steps] == [False] * (len(steps) - 1) + [True]
    assert len(report["events"]) == 1


def test_the_reserve_stays_whoever_sizes_the_cache(
    llama: str, run_gpu_path: Run, tmp_path: Path
) -> None:
    """Profiling, and vLLM's start-up plan that remembers it; a user's own size is left alone."""

    def start(**engine: Any) -> dict[str, Any]:
        return run_gpu_path(
            llama,
            [],
            settings=ADAKV,
            probes=["memory"],
            environment={
                "VLLM_ENABLE_STARTUP_PLAN": "1",
                "VLLM_CACHE_ROOT": str(tmp_path),
            },
            num_gpu_blocks_override=None,
            **engine,
        )

    chosen = start(kv_cache_memory_bytes=2**26)
    assert chosen["ours"] == chosen["vllm"] == 2**26
    profiled, planned = start(), start()
    assert profiled["vllm"] == REQUESTED_BYTES - CONSUMED_BYTES
    assert planned["vllm"] == profiled["vllm"] - 150 * 2**20  # which vLLM leaves free then
    assert chosen["measured"] == []
    scores = 2048 * 2 * 4  # of every token of the longest request, for two heads, in fp32
    splits = 4 * 128 * 2 * 16 * (32 + 2)  # of 128 sequences of two heads, 16 each
    for report in (profiled, planned):
        (event,) = report["measured"]
        assert event["peak"] > scores
        assert event["left"] == 0
        reserved = FRAGMENTATION * event["peak"] + TABLES_SHARE * report["vllm"]
        assert report["vllm"] - report["ours"] == int(reserved) + splits


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_reloaded_weights_are_those_that_policies_read(
    llama: str, run_gpu_path: Run, tmp_path: Path, runner: str
) -> None:
    """After new weights, requests are compressed as by a server that began with them."""
    other = str(tiny_models.build("llama", tmp_path, seed=1))
    phases = [[request(name, prompt(600, seed=seed), 12)] for seed, name in enumerate("ab")]
    how = {"settings": CRITICAL, "runner": runner, "asynchronous": runner == "V2"}
    reloading = ["reload_weights", {"weights_path": other}]
    report = run_gpu_path(llama, phases, record_kept=True, calls=[[1, *reloading]], **how)
    expected = run_gpu_path(other, phases[1:], record_kept=True, **how)
    assert report["outputs"]["b"]["tokens"] == expected["outputs"]["b"]["tokens"]
    num_layers = len(expected["kept"])
    assert [k["kept"] for k in report["kept"][-num_layers:]] == [
        k["kept"] for k in expected["kept"]
    ]


def test_attention_over_single_heads_is_compiled_before_requests(
    llama: str, run_gpu_path: Run
) -> None:
    """vLLM's Triton kernel, for as many sequences and as long chunks as requests bring."""
    phases = [[request(f"r{i}", prompt(300, seed=i), 16 + 4 * (7 - i)) for i in range(8)]]
    settings = {**ADAKV, "trigger": "chunk:128"}
    report = run_gpu_path(llama, phases, settings=settings, probes=["by_head"])
    before, later = report["compiled"]["before"], report["compiled"]["while"]
    assert len(later) >= 4
    assert [kind for kind in later if kind not in before] == []


def test_vllm_checks_that_our_part_of_a_step_waits_for_nothing() -> None:
    """With VLLM_GPU_SYNC_CHECK, once all is warm, as it does its own part."""
    command = [sys.executable, "-m", "tests.gpu_path.sync_check"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert output.returncode == 0, output.stderr[-3000:]
    names = ["begin_step", "end_forward", "end_step"]
    expected = [[name, mode] for mode in (None, "error") for name in names]
    assert json.loads(output.stdout.splitlines()[-1]) == expected
