"""Blocks that a compressed request holds and frees, and that none is lost.

The scenario runner compares the bookkeeping of scheduler, block pool and worker after every step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.tools import capacity

BLOCK = 32
QUARTER = {"policy": "adakv", "budget": 0.25}


def last_held(report: dict[str, Any], name: str) -> int:
    """Returns the number of blocks that a request held in its last step."""
    return [held[name] for held in report["held"] if name in held][-1]


def test_budget_of_a_quarter_keeps_a_quarter_of_the_blocks(llama: str, run_engine: Run) -> None:
    sizes = (1000, 1024, 1500)
    phases = [[request(f"{size}", prompt(size, 1), 8)] for size in sizes]
    report = run_engine(llama, phases, settings=QUARTER)
    for size in sizes:
        kept = math.ceil(0.25 * (size // BLOCK))
        tail = math.ceil((size + 8) / BLOCK) - size // BLOCK
        assert last_held(report, f"{size}") == kept + tail
    usage = [value for value in report["usage"] if value > 0]
    assert usage[-1] == pytest.approx((kept + tail) / (report["num_blocks"] - 1))
    assert report["free_at_end"] == report["num_blocks"] - 1
    # `vllm-kvcompress plan` says the same of a cache of that many blocks.
    shape = capacity.read_shape(llama, "float32", num_ranks=1)
    cache_bytes = report["num_blocks"] * BLOCK * shape.token_bytes
    fits = capacity.plan(shape, Settings.from_dict(QUARTER), cache_bytes, 2048, BLOCK)
    share = math.ceil(fits.num_blocks / (fits.compressed or 1))  # in whole blocks, as vLLM reports
    assert report["max_concurrency"] == pytest.approx(fits.num_blocks / share, rel=1e-3)


def test_freed_blocks_are_reused_by_waiting_requests(llama: str, run_engine: Run) -> None:
    """A pool for one uncompressed prompt serves four compressed ones side by side."""
    requests = [request(f"r{i}", prompt(1000, seed=i), 60) for i in range(4)]
    report = run_engine(llama, [requests], settings=QUARTER, num_gpu_blocks_override=90)
    assert max(len(held) for held in report["held"]) == 4
    assert all(len(output["tokens"]) == 60 for output in report["outputs"].values())
    assert report["preemptions"] == 0


def test_second_request_hits_the_prefix_of_a_compressed_one(llama: str, run_engine: Run) -> None:
    """The window of 32 queries is computed anew; all blocks before it come from the cache."""
    tokens = prompt(1000, seed=3)
    report = run_engine(
        llama,
        [[request("first", tokens)], [request("second", tokens)], [request("third", tokens)]],
        settings=QUARTER,
    )
    first, second, third = (report["outputs"][name] for name in ("first", "second", "third"))
    assert first["cached"] == 0
    assert second["cached"] == third["cached"] == (1000 - 32) // BLOCK * BLOCK
    assert first["tokens"] == second["tokens"] == third["tokens"]


def test_compressed_tokens_never_enter_the_prefix_cache(llama: str, run_engine: Run) -> None:
    """A second turn hits the first prompt's blocks, not those of the compressed answer."""
    first = request("a", prompt(640, seed=4), 100)
    phases = [[first], [request("b", prompt(50, seed=5), follows="a")]]
    report = run_engine(llama, phases, settings=QUARTER)
    assert report["outputs"]["b"]["cached"] == 640


@pytest.mark.parametrize("trigger", ["prompt", "chunk:256"])
def test_as_many_requests_run_as_the_start_up_report_says(
    llama: str, run_engine: Run, trigger: str
) -> None:
    """vLLM's own figure, for prompts of the maximum length; nobody is preempted."""
    requests = [request(f"r{i}", prompt(1000, seed=i), 24) for i in range(9)]
    report = run_engine(
        llama,
        [requests],
        settings={**QUARTER, "trigger": trigger},
        num_gpu_blocks_override=101,
        max_model_len=1024,
        max_num_batched_tokens=256,
    )
    most = max(len(held) for held in report["held"])
    # A request takes 4 steps to be read and is there for 24 more: enough to pile up.
    assert 4 <= most <= report["max_concurrency"] + 1
    assert most >= math.floor(report["max_concurrency"])
    assert report["preemptions"] == 0


def test_prompts_in_prefill_reserve_their_peak_blocks(llama: str, run_engine: Run) -> None:
    """Two prompts whose first chunks both fit, but not their peaks: the second one waits."""
    requests = [request(f"r{i}", prompt(1500, seed=i), 8) for i in range(2)]
    report = run_engine(
        llama,
        [requests],
        settings=QUARTER,
        num_gpu_blocks_override=101,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=128,  # so that they would be read side by side
    )
    assert report["preemptions"] == 0
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_preempted_requests_resume_with_the_same_outputs(llama: str, run_engine: Run) -> None:
    """A pool too small for all: preempted requests recompute, with the same outputs."""
    requests = [request(f"r{i}", prompt(300 + 7 * i, seed=i), 250) for i in range(6)]
    roomy = run_engine(llama, [requests], settings=QUARTER)
    tight = run_engine(
        llama,
        [requests],
        settings=QUARTER,
        num_gpu_blocks_override=60,
        max_model_len=640,
        environment={"KVCOMPRESS_CHECK": "1"},
    )
    assert roomy["preemptions"] == 0
    assert tight["preemptions"] > 0
    for name, output in roomy["outputs"].items():
        assert tight["outputs"][name]["tokens"] == output["tokens"], name
    assert tight["free_at_end"] == tight["num_blocks"] - 1


def test_aborts_at_every_stage_free_all_blocks(llama: str, run_engine: Run) -> None:
    """Aborts requests while they wait, read their prompt, run their event, and decode."""
    requests = [request(f"r{i}", prompt(900, seed=i), 40, abort_at_step=i) for i in range(8)] + [
        request("stays", prompt(700, seed=99), 40)
    ]
    report = run_engine(llama, [requests], settings=QUARTER)
    assert len(report["outputs"]["stays"]["tokens"]) == 40
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_chunk_trigger_serves_a_prompt_four_times_the_pool(llama: str, run_engine: Run) -> None:
    """40 blocks hold 1,280 tokens; the prompt has 5,200."""
    settings = {"policy": "snapkv", "budget": 256, "trigger": "chunk:256"}
    report = run_engine(
        llama,
        [[request("a", prompt(5200, seed=7), 300), request("b", prompt(3000, seed=8), 30)]],
        settings=settings,
        num_gpu_blocks_override=41,
        max_model_len=5600,
    )
    assert len(report["outputs"]["a"]["tokens"]) == 300
    assert len(report["outputs"]["b"]["tokens"]) == 30
    assert max(max(held.values(), default=0) for held in report["held"]) <= 40


def test_decode_trigger_keeps_a_long_answer_small(llama: str, run_engine: Run) -> None:
    settings = {"policy": "snapkv", "budget": 128, "trigger": "prompt,decode:64"}
    report = run_engine(llama, [[request("a", prompt(500, seed=7), 400)]], settings=settings)
    assert len(report["outputs"]["a"]["tokens"]) == 400
    # 4 kept blocks, 64 tokens since, one partial block, and 4 fresh ones at an event
    assert max(held["a"] for held in report["held"][60:] if "a" in held) <= 4 + 2 + 1 + 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("free_sources_early", "owners by block: expected"),
        ("free_sources_unseen", "NaNs detected in logits"),
    ],
)
def test_debug_mode_detects_reads_of_freed_blocks(
    llama: str, run_engine: Run, damage: str, message: str
) -> None:
    """Source blocks freed too early are reported by owner checks, or by their poison.

    Prefix caching is off, since what it knows stays readable.
    """
    with pytest.raises(pytest.fail.Exception, match=message):
        run_engine(
            llama,
            [[request("a", prompt(300, seed=1), 4)]],
            settings=QUARTER,
            environment={"KVCOMPRESS_CHECK": "1"},
            probes=[f"tests.engine.damage:{damage}"],
            enable_prefix_caching=False,
            max_num_batched_tokens=128,
        )


def test_debug_mode_where_windows_have_smaller_heads(
    model_directory: Path, run_engine: Run
) -> None:
    """Windows do not take poisoned keys for their values; a read of freed blocks is detected."""
    given: dict[str, Any] = {
        "settings": QUARTER,
        "environment": {"KVCOMPRESS_CHECK": "1"},
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 128,
    }
    phases = [[request(f"{i}", prompt(300, seed=i), 40) for i in range(3)]]
    model = str(tiny_models.build("gemma4", model_directory))
    report = run_engine(model, phases, **given)
    assert report["free_at_end"] == report["num_blocks"] - 1
    alone = [[request("a", prompt(300, seed=1), 4)]]
    probes = ["tests.engine.damage:free_sources_unseen"]
    with pytest.raises(pytest.fail.Exception, match="NaNs detected in logits"):
        run_engine(model, alone, probes=probes, **given)
