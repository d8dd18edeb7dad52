"""Models with other layers beside full attention, on the GPU path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests.engine.conftest import request
from tests.gpu_path.conftest import Run
from tests.gpu_path.graphs import IN_GRAPHS
from tests.tiny_models import prompt

SNAPKV = {"policy": "snapkv", "budget": 0.25}
# vLLM's gated delta nets for CPUs compute in bfloat16, of which logits round to 1/128 or 1/256.
HYBRID = {"dtype": "bfloat16", "enable_prefix_caching": False}
# vLLM takes the library that fits the CPU, capped or not; that for avx512_bf16 asks oneDNN for what
# a cap forbids. On a CPU without, vLLM takes one that does not ask.
FORBIDDEN = "ONEDNN_MAX_CPU_ISA" in os.environ and torch.cpu._is_avx512_bf16_supported()
# One step of Gemma 3n amplifies rounding a hundredfold: 2.3e-4 were seen with AVX2 alone.
SHARED = 1e-4 if torch.cpu._is_avx512_supported() else 1e-3
CAPPED = pytest.mark.skipif(FORBIDDEN, reason="ONEDNN_MAX_CPU_ISA forbids what vLLM asks it for")


def check_outputs(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """That the same was generated, up to a choice between candidates that are as good."""
    for ours, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        (chosen, best), shared = (max(each, key=each.get) for each in (ours, theirs)), {*ours}
        for token in shared & {*theirs}:
            assert ours[token] == pytest.approx(theirs[token], abs=tolerance)
        if chosen != best:
            assert theirs.get(chosen) == pytest.approx(theirs[best], abs=tolerance)
            return


@pytest.mark.parametrize(
    ("family", "options", "gpu", "tolerance"),
    [
        # Not in graphs, since vLLM's gated delta nets for CPUs decide in Python what a step does.
        pytest.param("qwen3_next", HYBRID, {}, 0.02, id="gated-delta-nets", marks=CAPPED),
        pytest.param("gemma3", {}, {}, 1e-4, id="sliding-windows"),
        pytest.param("gemma3", {}, IN_GRAPHS, 1e-4, id="sliding-windows-in-graphs"),
        pytest.param("gemma4", {}, {}, 1e-3, id="two-head-sizes"),
        pytest.param("gemma4", {}, IN_GRAPHS, 1e-3, id="two-head-sizes-in-graphs"),
        pytest.param("gemma3n", {}, {}, SHARED, id="shared-caches"),
        pytest.param("gpt_oss", {}, {}, 1e-4, id="sinks"),
        pytest.param("gpt_oss", {}, IN_GRAPHS, 1e-4, id="sinks-in-graphs"),
    ],
)
def test_model_runner_v2_gives_the_outputs_of_the_cpu_build(
    tmp_path: Path,
    run_gpu_path: Run,
    run_engine: Run,
    family: str,
    options: dict[str, Any],
    gpu: dict[str, Any],
    tolerance: float,
) -> None:
    """Requests of all lengths come and go, so that rows are not in the order of arrival."""
    model = str(tiny_models.build(family, tmp_path))
    phases = [
        [
            request("long", prompt(700, seed=1), 12),
            request("short", prompt(50, seed=2), 12),
            request("late", prompt(400, seed=3), 12, at_step=2),
            request("later", prompt(560, seed=4), 12, at_step=4),
        ]
    ]
    options = {"max_num_batched_tokens": 256, **options}
    stock = run_engine(model, phases, **options)
    expected = run_engine(model, phases, settings=SNAPKV, **options)
    found = run_gpu_path(model, phases, settings=SNAPKV, **gpu, **options)
    assert len(found["events"]) == len(expected["events"]) >= 3
    assert found["free_at_end"] == found["num_blocks"] - 1
    if gpu:
        assert sum(found["replays"].values()) == found["steps"]["decodes"] > 0
    for name, output in expected["outputs"].items():
        check_outputs(found["outputs"][name], output, tolerance)
    check_outputs(found["outputs"]["short"], stock["outputs"]["short"], tolerance)
    for name in ("long", "later"):
        with pytest.raises(AssertionError):
            check_outputs(found["outputs"][name], stock["outputs"][name], tolerance)


def test_sinks_go_through_vllms_triton_kernels(
    tmp_path: Path, run_gpu_path: Run, run_engine: Run
) -> None:
    """Uncompressed requests through those, compressed ones through this package's, interpreted."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = str(tiny_models.build("gpt_oss", tmp_path, **layers))
    phases = [[request("long", prompt(140, seed=1), 3), request("short", prompt(50, seed=2), 3)]]
    expected = run_engine(model, phases, settings=SNAPKV)
    found = run_gpu_path(model, phases, settings=SNAPKV, kernels="triton")
    assert len(found["events"]) == len(expected["events"]) == 1
    for name, output in expected["outputs"].items():
        check_outputs(found["outputs"][name], output, 1e-4)
