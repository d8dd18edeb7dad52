"""The GPU path computes what it should, whatever runner, kernels and scheduling."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.conftest import request
from tests.engine.oracle import BLOCK, ChunksDecoder, PagesDecoder, check_decoding, follow
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt

ADAKV = {"policy": "adakv+criticalkv", "budget": 0.25}


def mixed_batch() -> list[list[dict[str, Any]]]:
    """Long, chunked, short, late, with shared prefixes; then one of them once more."""
    shared = prompt(130, seed=9)
    first = [
        request("long", prompt(600, seed=1), 20),
        request("short", prompt(5, seed=2), 12),
        request("shared-1", shared + prompt(150, seed=4), 12, at_step=2),
        request("shared-2", shared + prompt(77, seed=5), 12, at_step=4),
        request("late", prompt(300, seed=6), 12, at_step=6),
    ]
    return [first, [request("again", prompt(600, seed=1), 12)]]


@pytest.mark.parametrize(
    ("how", "budget"),
    [
        pytest.param({}, 0.25, id="asynchronous"),
        pytest.param({}, 1.0, id="asynchronous-budget-1"),
        pytest.param({"kernels": "flash2", "dtype": "bfloat16"}, 0.25, id="flash-2"),
        pytest.param({"kernels": "flash3", "dtype": "bfloat16"}, 0.25, id="flash-3"),
    ],
)
def test_uncompressed_requests_have_the_outputs_of_stock_vllm(
    llama: str, run_gpu_path: Run, how: dict[str, Any], budget: float
) -> None:
    """With budget 1.0, and with short requests beside compressed ones."""
    phases = mixed_batch()
    if budget < 1:
        short, compressed = prompt(60, seed=2), prompt(1100, seed=1)
        behind = request("behind", prompt(50, seed=3), 12, at_step=9)  # a run of its own
        phases = [[request("short", short, 24), request("long", compressed, 24), behind]]
    settings = {"policy": "adakv+criticalkv", "budget": budget}
    stock = run_gpu_path(llama, phases, **how)
    report = run_gpu_path(llama, phases, settings=settings, **how)
    assert bool(report["events"]) == (budget < 1)
    for name in ["short", "behind"] if budget < 1 else stock["outputs"]:
        expected, output = stock["outputs"][name], report["outputs"][name]
        assert output["tokens"] == expected["tokens"], name
        assert output["cached"] == expected["cached"], name
        assert output["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=1e-5)


@pytest.mark.parametrize(
    ("policy", "num_tokens", "how"),
    [
        ("adakv+criticalkv", 640, {}),
        ("pyramidkv", 1000, {"asynchronous": False}),
        ("adakv", 1000, {"runner": "V1", "asynchronous": False}),
        ("adakv", 640, {"attention": "own"}),
        ("keydiff", 98, {"kernels": "triton", "max_tokens": 3}),
    ],
)
def test_decoding_matches_dense_attention_over_the_kept_tokens(
    llama: str, run_gpu_path: Run, policy: str, num_tokens: int, how: dict[str, Any]
) -> None:
    """Every generated token, past block boundaries; once with vLLM's own kernels, interpreted."""
    how = dict(how)
    tokens, max_tokens = prompt(num_tokens, seed=1), how.pop("max_tokens", 40)
    attention = how.pop("attention", "auto")
    report = run_gpu_path(
        llama,
        [[request("a", tokens, max_tokens)]],
        settings={"policy": policy, "budget": 0.25, "attention": attention},
        record_kept=True,
        **how,
    )
    assert len(report["outputs"]["a"]["tokens"]) == max_tokens
    check_decoding(llama, tokens, report["kept"], report["outputs"]["a"])


@pytest.mark.parametrize("kernels", ["flash3", "triton"])
def test_reading_a_part(no_padding: str, run_gpu_path: Run, kernels: str) -> None:
    """Whole requests, past a block's boundary, scheduled ahead of what runs."""
    interpreted = kernels == "triton"
    tokens = prompt(150 if interpreted else 300, seed=1)
    small = {"kernels": kernels, "max_num_batched_tokens": 64}
    report = run_gpu_path(
        no_padding,
        [[request("a", tokens, 3 if interpreted else 24)]],
        settings={"policy": "none", "read": "quest:0.3,score=mean,global=0,local=0"},
        **(small if interpreted else {}),
    )
    everything = [[list(range(len(tokens) // BLOCK * BLOCK))] * 2] * 3
    size = len(tokens) // BLOCK * BLOCK
    follow(PagesDecoder(no_padding, tokens, everything, size, part=0.3), report["outputs"]["a"])


def test_reading_a_part_of_the_prompt(no_padding: str, run_gpu_path: Run) -> None:
    """Chunks of several queries and one of a single token, beside a request that decodes."""
    read = "longcache:global=32,local=64,span=32,top=2,prefill=128,score=mean"
    tokens, short = prompt(257, seed=1), prompt(90, seed=2)
    report = run_gpu_path(
        no_padding,
        [[request("b", short, 6), request("a", tokens, 12, at_step=1)]],
        settings={"policy": "none", "read": read},
        max_num_seqs=8,
    )
    everything = [[list(range(256))] * 2] * 3
    how = {"number": 5, "always": (1, 2), "chunk": 128, "num_read_fully": 128}
    follow(ChunksDecoder(no_padding, tokens, everything, 256, **how), report["outputs"]["a"])


CHUNK = {"policy": "snapkv", "budget": 0.3, "trigger": "chunk:128"}
CHECKED = {"KVCOMPRESS_CHECK": "1"}
TWO_TABLES = {"probes": ["two_tables"]}
SCARCE = {"num_gpu_blocks_override": 32, "max_model_len": 700}


@pytest.fixture(scope="module")
def alone(llama: str, run_engine: Run) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Outputs of the same requests on the CPU build, one by one."""
    known: dict[str, dict[str, Any]] = {}

    def run(settings: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(settings)
        if key not in known:
            requests = [{**r, "at_step": 0} for phase in mixed_batch() for r in phase]
            known[key] = run_engine(
                llama, [[r] for r in requests], settings=settings, max_num_batched_tokens=256
            )
        return known[key]["outputs"]

    return run


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        pytest.param({}, ADAKV, id="asynchronous"),
        pytest.param({"runner": "V1", "asynchronous": False}, ADAKV, id="runner-V1"),
        pytest.param(SCARCE, ADAKV, id="scarce-memory"),
        pytest.param({}, CHUNK, id="chunks"),
        pytest.param(TWO_TABLES, {**ADAKV, "trigger": "prompt,decode:8"}, id="decoding"),
        pytest.param({}, {"policy": "momentkv", "budget": 0.25}, id="moments"),
        pytest.param(TWO_TABLES, {"policy": "kvslimmer", "budget": 0.3}, id="merging"),
    ],
)
def test_a_request_in_a_batch_is_a_request_alone_on_the_cpu_build(
    llama: str,
    run_gpu_path: Run,
    alone: Callable[[dict[str, Any]], dict[str, Any]],
    how: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """However scheduled, in the debug mode: what is read and written is checked in every step."""
    report = run_gpu_path(llama, mixed_batch(), settings=settings, environment=CHECKED, **how)
    assert len(report["events"]) >= 4
    assert report.get("two_tables", 5) >= 5
    assert report["free_at_end"] == report["num_blocks"] - 1
    for name, expected in alone(settings).items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("free_sources_early", "owners by block: expected"),
        ("free_sources_unseen", "NaNs detected in logits"),
    ],
)
def test_the_debug_mode_finds_reads_of_freed_blocks(
    llama: str, run_gpu_path: Run, damage: str, message: str
) -> None:
    """The CPU build's test is `tests/engine/test_block_accounting.py`."""
    with pytest.raises(pytest.fail.Exception, match=message):
        run_gpu_path(
            llama,
            [[request("a", prompt(300, seed=1), 4)]],
            settings=ADAKV,
            environment=CHECKED,
            probes=[f"tests.engine.damage:{damage}"],
            asynchronous=False,  # or the scenario's own check of owners comes first
            enable_prefix_caching=False,
            max_num_batched_tokens=128,
        )


def test_requests_are_compressed_under_memory_pressure(llama: str, run_gpu_path: Run) -> None:
    """Under pressure, with the last queries in the pool's own blocks; nobody is preempted."""
    phases = [[request(f"r{i}", prompt(200, seed=i), 60) for i in range(4)]]
    settings = {"policy": "snapkv", "budget": 0.25, "trigger": "pressure:0.6"}
    report = run_gpu_path(
        llama, phases, settings=settings, num_gpu_blocks_override=34, max_model_len=300
    )
    assert {event["trigger"] for event in report["events"]} == {"pressure"}
    assert report["preemptions"] == 0
    assert [len(output["tokens"]) for output in report["outputs"].values()] == [60] * 4
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_two_ranks_give_the_outputs_of_one(llama: str, run_gpu_path: Run) -> None:
    """Tensor parallel: each rank compresses its own heads and frees the same blocks."""
    phases = [[request("a", prompt(300, seed=1), 5), request("b", prompt(200, seed=2), 5)]]
    settings = {"policy": "snapkv", "budget": 0.25}
    one = run_gpu_path(llama, phases, settings=settings)
    two = run_gpu_path(
        llama,
        phases,
        settings=settings,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    for name in ("a", "b"):
        assert two["outputs"][name]["tokens"] == one["outputs"][name]["tokens"], name
    assert two["held"] == one["held"]
