"""Pipeline parallelism: each stage compresses its own layers, with the outputs of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import failing_policy
from tests.engine.conftest import Run, request
from tests.engine.test_measured_heads import AUTO, kept_file, plain_scores
from tests.failing_policy import failing
from tests.tiny_models import prompt

STAGES: dict[str, Any] = {
    # On CPUs vLLM makes room for an earlier stage's outputs only when it warms up its compiler.
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
}


def environment(layers: str, **more: str) -> dict[str, str]:
    """Returns variables for two stages of so many layers each."""
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_PP_LAYER_PARTITION": layers}
    # To look up what was compiled before, both would read all sources of torch and Triton.
    return {**bound, "VLLM_USE_AOT_COMPILE": "0", **more}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_stages_have_the_outputs_of_one_process(
    llama: str, run_engine: Run, tmp_path: Path, asynchronous: bool
) -> None:
    """Two unequal stages free the same blocks, and one's failure ends the request alone.

    Several requests are in flight at a time, prompts are read in chunks, decode steps read a part,
    and a conversation goes on from what both stages kept.
    """
    phases = [
        [request("a", prompt(900, seed=1), 24), request("b", prompt(300, seed=2), 40)],
        [request("again", prompt(900, seed=1), 24, xargs={"kv_read": 0.75})],
        [request("next", prompt(200, seed=3), 24, follows="b")],
    ]
    settings: dict[str, Any] = {"policy": "adakv+criticalkv", "budget": 0.25, "read": "quest:0.5"}
    settings |= {"min_request_read": 0.4, "reuse_conversations": "reuse"}
    settings |= {"trigger": "prompt,decode:32", "request_policies": ["failing"]}
    path = {"PYTHONPATH": str(failing_policy.install(tmp_path))}
    bad = failing(failing_policy.NO_SCORE, at_step=1, xargs={"kv_policy": "failing"})
    beside = request("beside", prompt(600, seed=4), 24)
    one = run_engine(llama, [*phases, [beside]], environment=path, settings=settings)
    two = run_engine(
        llama,
        [*phases, [beside, bad]],
        environment=environment("2,1", **path),
        settings=settings,
        asynchronous=asynchronous,
        **STAGES,
    )
    for name in ("a", "b", "again", "next", "beside"):
        assert two["outputs"][name]["tokens"] == one["outputs"][name]["tokens"], name
        assert two["outputs"][name]["cached"] == one["outputs"][name]["cached"], name
    assert two["conversations_continued"] == one["conversations_continued"] == 1
    assert len(two["events"]) == len(one["events"]) >= 5
    assert two["outputs"][bad["id"]]["finish_reason"] == "error"
    assert two["skipped"] == {**one["skipped"], "failing error": 1}
    for report in (one, two):
        assert report["free_at_end"] == report["num_blocks"] - 1


def test_stages_measure_the_heads_of_all_layers(
    llama: str, run_engine: Run, tmp_path: Path
) -> None:
    """One file has the scores of both, and the next start divides by them."""
    asked = [[request("a", prompt(640, seed=1), 8)]]
    variables = environment("1,2", VLLM_CACHE_ROOT=str(tmp_path))
    report = run_engine(llama, asked, settings=AUTO, environment=variables, **STAGES)
    scores = json.loads(kept_file(tmp_path).read_text())
    expected = plain_scores(llama, 513, 2)
    assert len(scores) == len(expected) == 12
    for name, values in expected.items():
        assert scores[name][:2] == pytest.approx(values, abs=1e-4)
    assert len(report["events"]) == 1
