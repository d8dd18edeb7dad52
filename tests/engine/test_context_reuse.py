"""Contexts that are compressed once and serve later requests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Run, check_as_alone, each_alone, request
from tests.engine.kv_events import announcing
from tests.tiny_models import prompt

BLOCK = 32
CONTEXT = prompt(700, seed=1)
NAMED = {"kv_context_tokens": len(CONTEXT)}
FULL_BLOCKS = len(CONTEXT) // BLOCK
REUSE = {"policy": "adakv", "budget": 0.25, "reuse_contexts": True}
KEPT = math.ceil(FULL_BLOCKS / 4)


def ask(name: str, seed: int, output: int = 40, **more: Any) -> dict[str, Any]:
    """Returns a question about the context, whose length depends on its seed."""
    xargs = {**NAMED, **more.pop("xargs", {})}
    tokens = CONTEXT + prompt(20 + 5 * seed, seed=100 + seed)
    return request(name, tokens, output, xargs=xargs, **more)


@pytest.mark.parametrize(
    ("policy", "trigger"),
    [("adakv", "prompt"), ("snapkv+criticalkv", "chunk:256,decode:16"), ("momentkv", "prompt")],
)
def test_later_questions_begin_with_the_compressed_context(
    llama: str, run_engine: Run, policy: str, trigger: str, tmp_path: Path
) -> None:
    """Requests one after the other and side by side have the outputs that they have alone.

    The compressed context is not announced to routers, which know prompts only.
    """
    settings = {**REUSE, "policy": policy, "trigger": trigger}
    later = [ask("second", 2), ask("third", 3, at_step=2)]
    phases = [[ask("first", 1)], later, *each_alone(later)]
    report = run_engine(llama, phases, settings=settings, **announcing(tmp_path))
    assert report["contexts_reused"] == 2
    # The contexts of the first request, and of those that are alone; their last blocks, and all
    # after them, depend on the compression.
    assert 0 < report["kv_events"]["stored"] <= 3 * FULL_BLOCKS
    assert report["outputs"]["first"]["cached"] == 0
    for name in ("second", "third"):
        assert report["outputs"][name]["cached"] == FULL_BLOCKS * BLOCK
    check_as_alone(report["outputs"], ["second", "third"])
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_shared_context_holds_its_blocks_once(llama: str, run_engine: Run) -> None:
    first, *others = [ask(f"r{i}", i, output=60, at_step=4 * (i > 0)) for i in range(5)]
    report = run_engine(llama, [[first, *others]], settings=REUSE)
    together = [
        (held, usage)
        for held, usage in zip(report["held"], report["usage"], strict=True)
        if len(held) == 5
    ]
    assert len(together) > 20
    held, usage = together[-1]
    used = round(usage * (report["num_blocks"] - 1))
    assert used == sum(held.values()) - 4 * KEPT
    assert all(blocks < KEPT + 6 for blocks in held.values())


def test_requests_share_a_context_only_with_equal_policy_budget_and_salt(
    llama: str, run_engine: Run
) -> None:
    settings = {
        **REUSE,
        "request_policies": ["keydiff", "none"],
        "min_request_budget": 0.1,
        "max_request_budget": 0.5,
    }
    choices: list[dict[str, Any]] = [
        {},
        {"kv_policy": "keydiff"},
        {"kv_budget": 0.5},
        {"kv_policy": "none"},
        {"kv_context_tokens": 640},
    ]
    phases = [[ask(f"r{i}", i, output=2, xargs=xargs)] for i, xargs in enumerate(choices)]
    phases += [[ask(salt, 6, output=2, salt=salt)] for salt in ("one", "another")]
    phases += [[ask("again", 9, xargs=choices[2])], [ask("same", 9, salt="one")], [ask("none", 9)]]
    report = run_engine(llama, phases, settings=settings)
    names = ("one", "another", "again", "same", "none")
    cached = [report["outputs"][name]["cached"] for name in names]
    assert cached == [0, 0, *[FULL_BLOCKS * BLOCK] * 3]
    assert report["contexts_reused"] == 3, "by these last ones alone"


def test_without_reuse_contexts_every_request_reads_its_context(
    llama: str, run_engine: Run
) -> None:
    report = run_engine(
        llama, [[ask("a", 1)], [ask("b", 2)]], settings={"policy": "adakv", "budget": 0.25}
    )
    assert report["contexts_reused"] == 0
    assert report["outputs"]["b"]["cached"] == (len(CONTEXT) - 32) // BLOCK * BLOCK


def test_request_for_prompt_log_probabilities_reads_its_context(
    llama: str, run_engine: Run
) -> None:
    """A compressed context would leave them undefined."""
    scored, again = (ask(name, 2, prompt_logprobs=0) for name in ("scored", "again"))
    phases = [[ask("first", 1)], [scored], [again], *each_alone([scored])]
    report = run_engine(llama, phases, settings=REUSE)
    assert report["contexts_reused"] == 0
    fresh = report["outputs"]["alone scored"]
    assert len(fresh["prompt_logprobs"]) == len(scored["prompt"])
    for name in ("scored", "again"):
        output = report["outputs"][name]
        assert output["cached"] == 0
        assert output["tokens"] == fresh["tokens"]
        for said, expected in zip(output["prompt_logprobs"], fresh["prompt_logprobs"], strict=True):
            assert said == pytest.approx(expected, abs=1e-5)


def test_context_is_evicted_by_requests_that_need_its_blocks(llama: str, run_engine: Run) -> None:
    """The next question then reads the context again."""
    pool = {"num_gpu_blocks_override": 71, "max_model_len": 1760}
    filler = [request("filler", prompt(1700, seed=5), 30)]  # takes 53 blocks, and 14 fresh ones
    phases = [[ask("first", 1)], filler, [ask("second", 2)], [ask("third", 3)]]
    report = run_engine(llama, phases, settings={**REUSE, "min_tokens": 5000}, **pool)
    assert report["contexts_reused"] == 0  # min_tokens: nothing was compressed
    phases += each_alone(phases[2])
    report = run_engine(llama, phases, settings=REUSE, **pool)
    assert report["contexts_reused"] == 1
    assert report["outputs"]["second"]["cached"] == 0
    assert report["outputs"]["third"]["cached"] == FULL_BLOCKS * BLOCK
    check_as_alone(report["outputs"], ["second"])
    assert report["preemptions"] == 0
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_preempted_requests_begin_with_their_context_again(llama: str, run_engine: Run) -> None:
    requests = [ask(f"r{i}", i, output=250, at_step=5 * (i > 0)) for i in range(7)]
    roomy = run_engine(llama, [requests], settings=REUSE)
    tight = run_engine(
        llama, [requests], settings=REUSE, num_gpu_blocks_override=48, max_model_len=1088
    )
    assert roomy["preemptions"] == 0
    assert tight["preemptions"] > 0
    for name, output in roomy["outputs"].items():
        assert tight["outputs"][name]["tokens"] == output["tokens"], name
    assert tight["free_at_end"] == tight["num_blocks"] - 1


def test_reuse_contexts_needs_prefix_caching(llama: str, run_engine: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="--kv-reuse-contexts needs vLLM's"):
        run_engine(llama, [[ask("a", 1)]], settings=REUSE, enable_prefix_caching=False)
