"""Draft models beside compression: their layers have blocks of their own, which no event frees."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.conftest import Drafting
from tests.draft_models import speculation
from tests.engine.conftest import Run, request
from tests.engine.test_speculation import CHECKED, NOTED, POLICIES, requests, settings
from tests.tiny_models import prompt

WHOLE = {"xargs": {"kv_policy": "none"}}
COMPRESSED = {**settings("chunk:128,decode:20"), "request_policies": [*POLICIES, "none"]}
PHASES = [
    requests()[:2],
    [request("second", prompt(700, 0)[:650] + prompt(90, seed=2), 40)],
    [request("whole", prompt(640, seed=3), 40, **WHOLE)],
    [request("again", prompt(640, seed=3)[:610] + prompt(30, seed=4), 40, **WHOLE)],
]


@pytest.fixture(scope="module")
def outputs_without(run_engine: Run) -> Run:
    """Runs `PHASES` without drafts, once for every model."""
    return cache(
        lambda model: run_engine(
            model, PHASES, settings=COMPRESSED, probes=[NOTED], environment=CHECKED
        )
    )


def check_drafted(report: dict[str, Any], plain: dict[str, Any]) -> None:
    """Checks that some drafts were rejected, and that all else is as without drafts."""
    drafted, accepted = report["drafts"]
    assert 0 < accepted < drafted
    assert sorted(report["positions"]) == sorted(plain["positions"])
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name


def test_outputs_with_a_draft_model_are_those_without(drafting: Drafting, run_engine: Run) -> None:
    """Events at the same positions; the draft is as large as the model, or a layer of it."""
    given = {"settings": settings("chunk:128,decode:20"), "probes": [NOTED], "environment": CHECKED}
    target, drafts = drafting("draft_model")
    plain = run_engine(target, [requests()], **given)
    for each in (speculation("draft_model", target), drafts):
        report = run_engine(target, [requests()], speculative_config=each, **given)
        check_drafted(report, plain)


@pytest.mark.parametrize(
    ("model", "block_size"),
    [("windows", 64), ("sinks", 64), ("head-sizes", 128), ("shared", 32), ("both", 64)],
)
def test_sliding_windows_beside_what_is_compressed(
    model: str, block_size: int, drafting: Drafting, run_engine: Run, outputs_without: Run
) -> None:
    """Prefix hits are of the model's two kinds of layers and of the draft's, in its blocks.

    Stock vLLM's runner for CPUs gives other outputs with drafts for such models than without.
    """
    served, drafts = drafting(model)
    report = run_engine(
        served,
        PHASES,
        settings=COMPRESSED,
        speculative_config=drafts,
        probes=[NOTED],
        environment=CHECKED,
    )
    plain = outputs_without(served)
    check_drafted(report, plain)
    for name in ("second", "again"):
        expected = plain["outputs"][name]["cached"] // block_size * block_size
        assert report["outputs"][name]["cached"] == expected > 0


def test_prefix_hits_and_preemption(drafting: Drafting, run_engine: Run) -> None:
    """A hit is one of both models; a preempted request reads everything again in both."""
    common = prompt(700, seed=7)
    first = [request("first", common + prompt(60, seed=1), 40)]
    others = [request("second", common + prompt(90, seed=2), 40)]
    others += [request(f"grows-{i}", prompt(150, seed=10 + i), 200) for i in range(6)]
    pool = {"num_gpu_blocks_override": 62, "max_model_len": 1024}
    report = check_preempted("draft_model", pool, [first, others], drafting, run_engine)
    assert report["outputs"]["second"]["cached"] == 640  # in blocks of 64 tokens


@pytest.mark.parametrize(("model", "num_blocks"), [("shared", 60), ("both", 50)])
def test_preemption_where_windows_differ_or_caches_are_shared(
    model: str, num_blocks: int, drafting: Drafting, run_engine: Run
) -> None:
    requests = [request(f"grows-{i}", prompt(150, seed=10 + i), 100) for i in range(5)]
    pool = {"num_gpu_blocks_override": num_blocks, "max_model_len": 400}
    check_preempted(model, pool, [requests], drafting, run_engine)


def check_preempted(
    model: str, pool: dict[str, int], phases: list, drafting: Drafting, run_engine: Run
) -> dict[str, Any]:
    """Checks that requests are preempted in so small a pool, with outputs as without drafts."""
    given = {"settings": settings("prompt"), "probes": [NOTED], "environment": CHECKED}
    target, drafts = drafting(model)
    plain = run_engine(target, phases, **given)
    report = run_engine(target, phases, speculative_config=drafts, **pool, **given)
    assert report["preemptions"] > 0
    assert report["drafts"][1] > 0
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name
    return report


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_outputs_with_heads_that_draft_are_those_without(
    method: str, drafting: Drafting, run_engine: Run, outputs_without: Run
) -> None:
    """Their layers read hidden states, which depend on events; prefix hits are of both models.

    The tokens that are drafted for what is not compressed are those of stock vLLM.
    """
    served, drafts = drafting(method)
    given = {"speculative_config": drafts, "probes": [NOTED]}
    report = run_engine(served, PHASES, settings=COMPRESSED, environment=CHECKED, **given)
    check_drafted(report, outputs_without(served))
    assert report["outputs"]["second"]["cached"] > 0
    stock = run_engine(served, PHASES[2:], **given)
    assert report["outputs"]["again"]["cached"] == 512  # 9 blocks of 64; vLLM drops the last
    for name in ("whole", "again"):
        assert report["drafted"][name] == stock["drafted"][name], name
        assert report["outputs"][name]["tokens"] == stock["outputs"][name]["tokens"], name


def test_uncompressed_requests_accept_what_stock_vllm_does(
    drafting: Drafting, run_engine: Run
) -> None:
    """With a budget of 1.0, and beside compression: drafts are those of an untouched cache."""
    target, drafts = drafting("draft_model")
    given = {"speculative_config": drafts, "probes": [NOTED]}
    stock = run_engine(target, [requests()], **given)
    drafted, accepted = stock["drafts"]
    assert accepted > drafted // 2
    for ours in (settings(budget=1.0), {**settings(), "min_tokens": 1000}):
        report = run_engine(target, [requests()], settings=ours, environment=CHECKED, **given)
        assert report["drafts"] == stock["drafts"]
        for name, expected in stock["outputs"].items():
            assert report["outputs"][name]["tokens"] == expected["tokens"], name


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_ranks_draft_what_one_does(method: str, drafting: Drafting, run_engine: Run) -> None:
    """Tensor parallel: drafts, events and outputs are those of one rank, after a prefix hit too.

    The policy keeps as much for every head; others divide a rank's memory among its own heads.
    """
    served, drafts = drafting(method)
    ours = {**settings("chunk:128,decode:20"), "policy": "snapkv", "request_policies": POLICIES}
    given = {"settings": ours, "speculative_config": drafts, "probes": [NOTED]}
    phases = [[request("first", prompt(700, 0), 80), request("other", prompt(333, 1), 80)]]
    phases.append(PHASES[1])
    one = run_engine(served, phases, environment=CHECKED, **given)
    two = run_engine(
        served,
        phases,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", **CHECKED},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **given,
    )
    assert 0 < two["drafts"][1] < two["drafts"][0]
    assert two["drafts"] == one["drafts"]
    assert two["positions"] == one["positions"]
    assert two["outputs"]["second"]["cached"] == one["outputs"]["second"]["cached"] > 0
    for name, expected in one["outputs"].items():
        assert two["outputs"][name]["tokens"] == expected["tokens"], name
    assert two["free_at_end"] == two["num_blocks"] - 1
