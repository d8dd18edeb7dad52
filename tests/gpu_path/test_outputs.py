"""The GPU path computes what it should, whatever runner, kernels and scheduling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.conftest import request
from tests.engine.oracle import KeptTokensDecoder
from tests.engine.test_compressed_attention import kept_positions
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt

BLOCK = 32
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
    "how",
    [
        pytest.param({}, id="asynchronous"),
        pytest.param({"asynchronous": False}, id="synchronous"),
        pytest.param({"runner": "V1", "asynchronous": False}, id="runner-V1"),
        pytest.param({"kernels": "flash", "dtype": "bfloat16"}, id="flash"),
    ],
)
@pytest.mark.parametrize("budget", [0.25, 1.0])
def test_whole_requests_are_those_of_stock_vllm(
    llama: str, run_gpu_path: Run, how: dict[str, Any], budget: float
) -> None:
    """With budget 1.0, and with short requests beside compressed ones."""
    phases = mixed_batch()
    if budget < 1:
        phases = [
            [request("short", prompt(60, seed=2), 24), request("long", prompt(1100, seed=1), 24)]
        ]
    settings = {"policy": "adakv+criticalkv", "budget": budget}
    stock = run_gpu_path(llama, phases, **how)
    report = run_gpu_path(llama, phases, settings=settings, **how)
    assert bool(report["events"]) == (budget < 1)
    for name in ["short"] if budget < 1 else stock["outputs"]:
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
        ("keydiff", 130, {"kernels": "triton", "max_tokens": 3}),
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
    kept = kept_positions(report["kept"], num_layers=3)
    decoder = KeptTokensDecoder(llama, tokens, kept, num_tokens // BLOCK * BLOCK)
    logits = decoder.first_logits
    output = report["outputs"]["a"]
    assert len(output["tokens"]) == max_tokens
    for token, logprobs in zip(output["tokens"], output["logprobs"], strict=True):
        expected = torch.log_softmax(logits, 0)
        for candidate, logprob in logprobs.items():
            assert float(expected[int(candidate)]) == pytest.approx(logprob, abs=2e-3)
        logits = decoder.step(token)


@pytest.mark.parametrize(
    ("how", "settings", "engine"),
    [
        pytest.param({}, ADAKV, {}, id="mixed"),
        pytest.param({}, {**ADAKV, "trigger": "chunk:128"}, {}, id="chunk"),
        pytest.param({}, {**ADAKV, "trigger": "prompt,decode:8"}, {}, id="decode"),
        pytest.param({}, {"policy": "momentkv", "budget": 0.25}, {}, id="moments"),
        pytest.param({}, {"policy": "kvmerger", "budget": 0.3}, {}, id="merging"),
        pytest.param({}, {"policy": "h2o", "budget": 0.25, "trigger": "chunk:128"}, {}, id="sums"),
        pytest.param({"asynchronous": False}, ADAKV, {}, id="synchronous"),
        pytest.param({"runner": "V1", "asynchronous": False}, ADAKV, {}, id="runner-V1"),
        pytest.param({}, ADAKV, {"num_gpu_blocks_override": 40}, id="scarce-memory"),
    ],
)
def test_a_request_in_a_batch_is_a_request_alone(
    llama: str,
    run_gpu_path: Run,
    how: dict[str, Any],
    settings: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """However scheduled; the books of scheduler and worker are compared after every step."""
    phases = mixed_batch()
    together = run_gpu_path(llama, phases, settings=settings, **how, **engine)
    requests = [r for phase in phases for r in phase]
    for r in requests:
        r.pop("at_step", None)
    alone = run_gpu_path(llama, [[r] for r in requests], settings=settings, **how)
    assert len(together["events"]) >= 5
    for name, expected in alone["outputs"].items():
        assert together["outputs"][name]["tokens"] == expected["tokens"], name
    for report in (together, alone):
        assert report["free_at_end"] == report["num_blocks"] - 1


@pytest.mark.parametrize(
    "settings",
    [
        ADAKV,
        {"policy": "snapkv", "budget": 0.3, "trigger": "chunk:128"},
        {"policy": "momentkv", "budget": 0.25, "trigger": "prompt,decode:16"},
        {"policy": "kvslimmer", "budget": 0.3},
        {"policy": "d2o", "budget": 0.3},
        {"policy": "keydiff", "budget": 0.2, "trigger": "prompt,pressure:0.5"},
    ],
    ids=lambda settings: settings["policy"],
)
def test_outputs_are_those_of_the_cpu_build(
    llama: str, run_gpu_path: Run, run_engine: Run, settings: dict[str, Any]
) -> None:
    """The same policies, on other pages and through other kernels, keep the same tokens."""
    phases = mixed_batch()
    there = run_gpu_path(llama, phases, settings=settings, record_kept=True)
    here = run_engine(llama, phases, settings=settings, record_kept=True)
    assert there["kept"]
    for name, expected in here["outputs"].items():
        assert there["outputs"][name]["tokens"] == expected["tokens"], name
