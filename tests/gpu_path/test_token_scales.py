"""Caches with a scale per token and head on the path for GPUs: vLLM's Triton attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from offline.quantized import CACHES
from tests.engine import mean_keys
from tests.engine.conftest import check_as_alone, each_alone, request
from tests.engine.oracle import BLOCK, follow, kept_positions
from tests.engine.test_context_reuse import REUSE as CONTEXTS
from tests.engine.test_context_reuse import ask
from tests.engine.test_conversations import REUSE as CONVERSATIONS
from tests.engine.test_conversations import check, conversation
from tests.engine.test_fp8_cache import Fp8Decoder
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt

INT8, FP8, INT4 = "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"
TYPES = {"probes": ["takes_types_for_gpus"]}
CHECKED = {"environment": {"KVCOMPRESS_CHECK": "1"}}


class TokenScaledDecoder(Fp8Decoder):
    """A decoder that reads every key and value after a round trip through the cache's type."""

    def stored(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return CACHES[self.name](keys), CACHES[self.name](values)


@pytest.mark.parametrize(
    ("name", "kernels", "num_tokens", "max_tokens", "policy"),
    [
        (INT8, "torch", 500, 40, "adakv+criticalkv"),
        (FP8, "torch", 500, 40, "pyramidkv"),
        (INT8, "triton", 98, 3, "keydiff"),
        (INT4, "triton", 98, 3, "snapkv"),
    ],
)
def test_decoding_matches_dense_attention_over_the_kept_numbers(
    llama: str,
    run_gpu_path: Run,
    name: str,
    kernels: str,
    num_tokens: int,
    max_tokens: int,
    policy: str,
) -> None:
    """With vLLM's own kernels, interpreted, where prompts are short."""
    tokens = prompt(num_tokens, seed=1)
    report = run_gpu_path(
        llama,
        [[request("a", tokens, max_tokens)]],
        settings={"policy": policy, "budget": 0.25},
        record_kept=True,
        kernels=kernels,
        kv_cache_dtype=name,
        **TYPES,
    )
    output, kept = report["outputs"]["a"], kept_positions(report["kept"], len(report["kept"]))
    full = len(tokens) // BLOCK * BLOCK
    decoder = TokenScaledDecoder(llama, tokens, kept, full, name=name, scales=[])
    # Processors round differently: a number that fp8 stores a step higher moves logprobs by 1e-3.
    follow(decoder, output, within=5e-3 if name == FP8 else 2e-3)


class LessTheMeanDecoder(mean_keys.LessTheMean, TokenScaledDecoder):
    """A decoder of keys that are stored less their mean."""


@pytest.mark.parametrize(("name", "kernels"), [(INT8, "torch"), (INT4, "triton")])
def test_keys_with_a_bias_are_stored_less_the_mean_key(
    model_directory: Path, run_gpu_path: Run, name: str, kernels: str
) -> None:
    model, tokens = mean_keys.build(model_directory), prompt(130, seed=1)
    report = run_gpu_path(
        model,
        [[request("a", tokens, 4)]],
        settings={"policy": "snapkv", "budget": 0.25},
        record_kept=True,
        kernels=kernels,
        kv_cache_dtype=name,
        **TYPES,
    )
    kept = kept_positions(report["kept"], len(report["kept"]))
    context = model, tokens, kept, len(tokens) // BLOCK * BLOCK
    LessTheMeanDecoder.means = mean_keys.mean_keys(model)
    decoder = LessTheMeanDecoder(*context, name=name, scales=[])
    follow(decoder, report["outputs"]["a"], within=5e-3)
    whole_keys = TokenScaledDecoder(*context, name=name, scales=[])
    with pytest.raises(AssertionError):
        follow(whole_keys, report["outputs"]["a"], within=5e-3)


@pytest.mark.parametrize(
    ("name", "kernels", "num_tokens", "max_tokens"),
    [(INT8, "torch", 300, 8), (FP8, "torch", 300, 8), (INT4, "triton", 70, 3)],
)
def test_budget_one_is_stock_vllm(
    llama: str, run_gpu_path: Run, name: str, kernels: str, num_tokens: int, max_tokens: int
) -> None:
    """With the same type of cache, token for token."""
    how: dict[str, Any] = {"kernels": kernels, "kv_cache_dtype": name, **TYPES}
    phases = [[request("a", prompt(num_tokens, seed=1), max_tokens)]]
    stock = run_gpu_path(llama, phases, **how)
    report = run_gpu_path(llama, phases, settings={"policy": "adakv", "budget": 1.0}, **how)
    for request_id, expected in stock["outputs"].items():
        assert report["outputs"][request_id]["tokens"] == expected["tokens"], request_id


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"policy": "snapkv", "budget": 0.3, "trigger": "chunk:128,decode:8"}, INT8),
        ({"policy": "h2o", "budget": 0.3, "trigger": "prompt,decode:8"}, FP8),
        ({"policy": "adakv", "budget": 96, "trigger": "prompt", "ceiling": 160}, INT8),
        ({"policy": "none", "read": "quest:0.3"}, INT8),
    ],
    ids=["chunks", "received-attention", "ceiling", "reading"],
)
def test_batched_requests_have_the_outputs_that_they_have_alone(
    llama: str, run_gpu_path: Run, settings: dict[str, Any], name: str
) -> None:
    """In the debug mode, scheduled ahead; two requests share a prefix."""
    shared = prompt(200, seed=1)
    requests = [
        request("a", [*shared, *prompt(100, seed=2)], 24),
        request("b", [*shared, *prompt(140, seed=3)], 24, at_step=3),
        request("c", prompt(90, seed=4), 24, at_step=4),
    ]
    phases = [requests, *each_alone(requests)]
    report = run_gpu_path(
        llama, phases, settings=settings, kernels="torch", kv_cache_dtype=name, **TYPES, **CHECKED
    )
    assert report["events"] or "read" in settings
    assert report["free_at_end"] == report["num_blocks"] - 1
    assert report["outputs"]["b"]["cached"] >= 64
    check_as_alone(report["outputs"], ("a", "b", "c"))


def test_memory_pressure_compresses_requests(llama: str, run_gpu_path: Run) -> None:
    """Pages hold the last queries, and room is left over in each."""
    report = run_gpu_path(
        llama,
        [[request(f"r{i}", prompt(200, seed=i), 60) for i in range(4)]],
        settings={"policy": "snapkv", "budget": 0.25, "trigger": "pressure:0.6"},
        num_gpu_blocks_override=44,
        max_model_len=300,
        kernels="torch",
        kv_cache_dtype=INT8,
        **TYPES,
        **CHECKED,
    )
    assert {event["trigger"] for event in report["events"]} == {"pressure"}
    assert [len(output["tokens"]) for output in report["outputs"].values()] == [60] * 4
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_later_questions_begin_with_the_compressed_context(llama: str, run_gpu_path: Run) -> None:
    later = [ask("second", 2, output=12), ask("third", 3, output=12, at_step=2)]
    report = run_gpu_path(
        llama,
        [[ask("first", 1, output=12)], later, *each_alone(later)],
        settings=CONTEXTS,
        kernels="torch",
        kv_cache_dtype=INT8,
        **TYPES,
        **CHECKED,
    )
    assert report["contexts_reused"] == 2
    check_as_alone(report["outputs"], ["second", "third"])
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_continued_turns_have_the_outputs_of_one_request(llama: str, run_gpu_path: Run) -> None:
    """The next turn gets a copy of a turn's partial block, scales included."""
    report = run_gpu_path(
        llama,
        conversation("turn", [20, 45, 33], 1),
        settings=CONVERSATIONS,
        kernels="torch",
        kv_cache_dtype=FP8,
        **TYPES,
        **CHECKED,
    )
    check(report, ["turn1", "turn2"])


def test_two_ranks_give_the_outputs_of_one(llama: str, run_gpu_path: Run) -> None:
    phases = [[request("a", prompt(300, seed=1), 5), request("b", prompt(200, seed=2), 5)]]
    how: dict[str, Any] = {
        "settings": {"policy": "snapkv", "budget": 0.25},
        "kernels": "torch",
        "kv_cache_dtype": INT8,
        **TYPES,
    }
    one = run_gpu_path(llama, phases, **how)
    two = run_gpu_path(
        llama,
        phases,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **how,
    )
    for name in ("a", "b"):
        assert two["outputs"][name]["tokens"] == one["outputs"][name]["tokens"], name
    assert two["held"] == one["held"]
