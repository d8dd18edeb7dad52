"""Models whose blocks are long, since a state of another layer fills one: budgets are in pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests.engine.conftest import Run, check_as_alone, each_alone, request
from tests.engine.masked_oracle import MaskedDecoder
from tests.tiny_models import prompt

SCHEDULERS = "vllm_kvcompress.vllm_plugin.scheduler_side.scheduler"
CHECKED = {"KVCOMPRESS_CHECK": "1"}
# vLLM's gated delta nets for CPUs compute in bfloat16.
DELTA_NETS = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}
HEADS = 2


@dataclass(frozen=True)
class Model:
    """A model, and what its blocks are.

    Attributes:
        family: of `tiny_models`.
        block: tokens of a block of vLLM's.
        page: tokens of a page.
        engine: arguments of vLLM.
        tolerance: of log-probabilities, compared with Hugging Face's; None: its model differs.
    """

    family: str
    block: int
    page: int
    engine: dict[str, Any] = field(default_factory=dict)
    tolerance: float | None = None


MODELS = {
    # Requests that run together differ from those alone in stock vLLM, too.
    "convolutions": Model("lfm2", 96, 32, {"block_size": 96}),
    "delta-nets": Model("qwen3_next", 96, 32, DELTA_NETS, 0.015),
    "delta-nets-in-longer-pages": Model(
        "qwen3_next", 128, 64, {**DELTA_NETS, "block_size": 64}, 0.015
    ),
}


def sharpen(model: Any) -> None:
    """Makes attention sharper where keys and queries are normalised under another name."""
    for name, parameter in model.named_parameters():
        if name.endswith("q_layernorm.weight"):
            parameter.data.mul_(8)


def build(model: Model, directory: Path) -> str:
    return str(tiny_models.build(model.family, directory / "divided", change=sharpen))


def kept_of(event: dict[str, Any], page: int) -> list[list[int]]:
    """Returns the kept positions of each head at an event of one layer."""
    heads, first = [], 0
    for count in event["counts"]:
        heads.append(event["kept"][first : first + count * page])
        first += count * page
    return heads


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("policy", "num_tokens"), [("adakv", 1000), ("snapkv", 750)])
def test_heads_keep_their_budget_and_decoding_attends_to_that(
    model_directory: Path, run_engine: Run, name: str, policy: str, num_tokens: int
) -> None:
    """A quarter of a prompt, up to a page, in as few blocks as hold that."""
    model = MODELS[name]
    path, budget = build(model, model_directory), 0.25 * num_tokens
    report = run_engine(
        path,
        [[request("r", prompt(num_tokens, seed=1), 20)]],
        settings={"policy": policy, "budget": 0.25},
        record_kept=True,
        environment=CHECKED,
        **model.engine,
    )
    events = sorted(report["kept"], key=lambda event: event["layer"])
    assert len(events) == 2
    num_full = num_tokens // model.page * model.page
    for event in events:
        counts = [count * model.page for count in event["counts"]]
        assert abs(sum(counts) / HEADS - budget) < model.page
        if policy == "snapkv":
            assert all(abs(count - budget) < model.page for count in counts)
        assert event["tail"] == num_tokens - num_full
    kept = [kept_of(event, model.page) for event in events]
    num_kept = sum(len(head) for layer in kept for head in layer) // (2 * HEADS)
    room = num_full % model.block
    num_blocks = math.ceil(max(0, num_kept - room) / model.block)
    tail = math.ceil((num_tokens + 18) / model.block) - num_full // model.block
    assert report["held"][-2]["r"] == num_blocks + tail
    (event,) = report["events"]
    assert event["blocks_freed"] == num_full // model.block
    assert event["blocks_written"] == num_blocks
    if model.tolerance is None:
        return
    output = report["outputs"]["r"]
    oracle = MaskedDecoder(path, report["prompts"]["r"], kept, num_full)
    check(oracle, output, model.tolerance)
    everything = [[list(range(num_full))] * HEADS] * 2
    with pytest.raises(AssertionError):
        check(MaskedDecoder(path, report["prompts"]["r"], everything, num_full), output, 0.03)


def check(oracle: MaskedDecoder, output: dict[str, Any], tolerance: float) -> None:
    """That the oracle gives each generated token's candidates the same log-probabilities."""
    logits = oracle.first_logits
    for token, found in zip(output["tokens"], output["logprobs"], strict=True):
        expected = torch.log_softmax(logits, dim=0)
        for candidate, logprob in found.items():
            assert logprob == pytest.approx(float(expected[int(candidate)]), abs=tolerance)
        logits = oracle.step(token)


def crowd(**more: Any) -> list[list[dict[str, Any]]]:
    """Prompts that share a beginning, more than fit, and repetitions of what may be evicted."""
    shared = prompt(200, seed=9)
    first = [
        request(f"{n}", shared + prompt(90 * n, seed=n), 60, at_step=2 * n, **more)
        for n in range(4)
    ]
    again = [request(f"again {n}", first[n]["prompt"], 4, **more) for n in (3, 0)]
    return [first, *([each] for each in again)]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_uncompressed_requests_are_those_of_stock_vllm(
    model_directory: Path, run_engine: Run, asynchronous: bool
) -> None:
    """With hits, evictions, preemptions and prompts that are read in several chunks."""
    model = MODELS["convolutions"]
    path = build(model, model_directory)
    options: dict[str, Any] = {
        **model.engine,
        "asynchronous": asynchronous,
        "num_gpu_blocks_override": 16,
        "max_model_len": 576,
        "max_num_batched_tokens": 192,
        "environment": CHECKED,
    }
    stock = run_engine(path, crowd(), **options)
    settings = {"policy": "snapkv", "budget": 0.25, "request_policies": ["none"]}
    kind = "AsyncCompressionScheduler" if asynchronous else "CompressionScheduler"
    options["scheduler_cls"] = f"{SCHEDULERS}.{kind}"
    report = run_engine(path, crowd(xargs={"kv_policy": "none"}), settings=settings, **options)
    assert report["outputs"] == stock["outputs"]
    assert report["preemptions"] == stock["preemptions"] > 0


TRIGGERS: dict[str, dict[str, Any]] = {
    "again-and-again": {"policy": "adakv", "budget": 160, "trigger": "prompt,decode:40"},
    "in-chunks": {"policy": "keydiff", "budget": 0.3, "trigger": "chunk:100"},
    "with-state": {"policy": "d2o", "budget": 0.3, "trigger": "prompt,decode:70"},
}


@pytest.mark.parametrize(
    ("name", "asynchronous"), list(zip(TRIGGERS, [True, False, True], strict=True))
)
def test_requests_together_are_those_alone(
    model_directory: Path, run_engine: Run, name: str, asynchronous: bool
) -> None:
    """Few triggers: where bfloat16 is emulated, vLLM's delta nets take a minute for each."""
    model = MODELS["delta-nets"]
    path = build(model, model_directory)
    requests = [
        request(f"{n}", prompt(130 + 170 * n, seed=n), 110 - 20 * n, at_step=3 * n)
        for n in range(4)
    ]
    kind = "AsyncCompressionScheduler" if asynchronous else "CompressionScheduler"
    options: dict[str, Any] = {
        **model.engine,
        "asynchronous": asynchronous,
        "num_gpu_blocks_override": 16,
        "max_model_len": 768,
        "max_num_batched_tokens": 256,
        "environment": CHECKED,
        "scheduler_cls": f"{SCHEDULERS}.{kind}",
    }
    phases = [requests, *each_alone(requests)]
    report = run_engine(path, phases, settings=TRIGGERS[name], **options)
    assert len(report["events"]) > 4
    assert report["free_at_end"] == 15
    check_as_alone(report["outputs"], [each["id"] for each in requests])
