"""Contexts that one request prepares for later ones."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from tests import failing_policy
from tests.engine.conftest import Run, request
from tests.engine.oracle import KeptTokensDecoder, kept_positions
from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options
from vllm_kvcompress.vllm_plugin.request_options import RequestCheck, request_options

BLOCK, NUM_SINKS = 32, 4
CONTEXT = prompt(400, seed=1)
COMPRESSED = len(CONTEXT) // BLOCK * BLOCK
NAMED = {"kv_context_tokens": len(CONTEXT)}
REPEATED = CONTEXT + prompt(10, seed=2) + CONTEXT
SETTINGS = {"policy": "adakv", "budget": 0.25, "reuse_contexts": True}


def preparing(name: str, tokens: list[int] = REPEATED, **more: Any) -> dict[str, Any]:
    return request(name, tokens, 1, xargs={**NAMED, "kv_prepare": 1}, **more)


def ask(name: str, seed: int, output: int = 24, **more: Any) -> dict[str, Any]:
    return request(name, CONTEXT + prompt(20 + seed, seed=seed), output, xargs=NAMED, **more)


def highest_attention(model: str) -> torch.Tensor:
    """Returns [layers, KV heads, context] attention of Hugging Face's model, by plain loops."""
    llama = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        attentions = llama(torch.tensor([REPEATED]), output_attentions=True).attentions
    heads = llama.config.num_key_value_heads
    scores = [[[0.0] * COMPRESSED for _ in range(heads)] for _ in attentions]
    for layer, (rows,) in enumerate(attentions):
        group = len(rows) // heads
        for member, queries in enumerate(rows):
            best = scores[layer][member // group]
            for row in queries[COMPRESSED:].tolist():
                for token in range(COMPRESSED):
                    best[token] = max(best[token], row[token])
    return torch.tensor(scores)


def test_questions_begin_with_the_tokens_that_the_repetition_attends_to_most(
    llama: str, run_engine: Run
) -> None:
    """The context is prepared in chunks, beside a request that decodes.

    Kept tokens are those that Hugging Face's model attends to most. Two questions have the outputs
    of that model with only these tokens of the context. A salted question shares nothing.
    """
    phases = [
        [request("beside", prompt(90, seed=8), 40), preparing("preparing", at_step=3)],
        [ask("first", 3), ask("second", 4, at_step=2)],
        [ask("salted", 3, salt="salt")],
    ]
    report = run_engine(
        llama, phases, settings=SETTINGS, record_kept=True, max_num_batched_tokens=130
    )
    assert [(each["policy"], each["trigger"]) for each in report["events"]] == [
        ("adakv", "prompt"),
        ("adakv", "prepare"),
        ("adakv", "prompt"),
    ]
    assert report["contexts_reused"] == 2
    records = report["kept"][3:6]
    kept = kept_positions(records, num_layers=3)
    assert sum(map(sum, (record["counts"] for record in records))) == 3 * 2 * 3
    for kept_of_layer, best in zip(kept, highest_attention(llama), strict=True):
        for positions, scores in zip(kept_of_layer, best.tolist(), strict=True):
            assert positions[:NUM_SINKS] == [0, 1, 2, 3]
            evicted = set(range(COMPRESSED)) - set(positions)
            least = min(scores[token] for token in positions[NUM_SINKS:])
            assert least > max(scores[token] for token in evicted) - 1e-6
    for one in phases[1]:
        output = report["outputs"][one["id"]]
        assert output["cached"] == COMPRESSED
        decoder = KeptTokensDecoder(llama, CONTEXT[:COMPRESSED], kept, COMPRESSED)
        for token in one["prompt"][COMPRESSED:]:
            logits = decoder.step(token)
        for token, logprobs in zip(output["tokens"], output["logprobs"], strict=True):
            expected = torch.log_softmax(logits, 0)
            for candidate, logprob in logprobs.items():
                assert float(expected[int(candidate)]) == pytest.approx(logprob, abs=2e-3)
            logits = decoder.step(token)
    assert report["outputs"]["salted"]["cached"] == 0
    assert len(report["outputs"]["preparing"]["tokens"]) == 1
    assert report["free_at_end"] == report["num_blocks"] - 1


@pytest.mark.parametrize("trigger", ["prompt,decode:16", "chunk:128,pressure:0.9"])
def test_preparation_in_one_step_behind_a_prefix_hit_has_the_same_result(
    llama: str, run_engine: Run, trigger: str
) -> None:
    """Scheduling is asynchronous, and another context is prepared at the same time.

    The context was compressed before by an ordinary request, and its blocks are cached. Questions
    about it are compressed again.
    """
    settings = {**SETTINGS, "policy": "spans", "trigger": trigger}
    other = prompt(320, seed=5)
    phases = [
        [preparing("alone")],
        [ask("first", 3, output=40)],
    ]
    expected = run_engine(llama, phases, settings=settings)
    assert expected["contexts_reused"] == 1
    phases = [
        [ask("ordinary", 6)],
        [preparing("prepared"), preparing("other", other + other, at_step=1)],
        [ask("first", 3, output=40)],
    ]
    phases[1][1]["xargs"]["kv_context_tokens"] = 320
    report = run_engine(
        llama, phases, settings=settings, asynchronous=True, max_num_batched_tokens=1024
    )
    assert report["contexts_reused"] == 1
    # Events at chunks are of other requests: what is cached before them is the same for all.
    assert 0 < report["outputs"]["prepared"]["cached"] < COMPRESSED
    assert report["outputs"]["first"]["cached"] == COMPRESSED
    assert report["outputs"]["first"]["tokens"] == expected["outputs"]["first"]["tokens"]
    assert [each["trigger"] for each in report["events"]].count("prepare") == 2
    assert report["free_at_end"] == report["num_blocks"] - 1


def scores(report: dict[str, Any]) -> None:
    """Reports the number of tokens with scores, step by step (a probe)."""
    from vllm_kvcompress.compression.repetitions import Repetitions

    report["scored"], in_step = [], Repetitions.in_step

    def noting(self: Repetitions, *args: Any) -> Any:
        repetitions = in_step(self, *args)
        report["scored"].append(sum(layers[0].shape[1] for layers in self._scores.values()))
        return repetitions

    Repetitions.in_step = noting


def test_contexts_wait_for_the_scores_of_others(llama: str, run_engine: Run) -> None:
    """There are never more scores than the longest request has; decoding requests go on."""
    contexts = [prompt(352, seed=seed) for seed in (21, 22, 23)]
    named = {"kv_context_tokens": 352}
    phases = [
        [request("beside", prompt(90, seed=8), 40)],
        [request(f"q{i}", [*each, 7, 8], 4, xargs=named) for i, each in enumerate(contexts)],
    ]
    for i, context in enumerate(contexts):
        xargs = {**named, "kv_prepare": 1}
        phases[0].append(request(f"p{i}", context + context[:200], 1, xargs=xargs, at_step=2))
    report = run_engine(
        llama,
        phases,
        settings=SETTINGS,
        max_model_len=720,
        long_prefill_token_threshold=64,  # so that they are read together
        probes=["tests.engine.test_preparation:scores"],
    )
    assert max(report["scored"]) == 2 * 352
    assert [each["trigger"] for each in report["events"]] == ["prompt"] + 3 * ["prepare"]
    assert report["contexts_reused"] == 3
    assert report["skipped"] == {}
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_failed_preparation_ends_with_an_error(llama: str, run_engine: Run, tmp_path: Path) -> None:
    """It has an error although it would have ended with this step; no other request has."""
    context = prompt(failing_policy.NO_PAGES * BLOCK, seed=6)
    xargs = {"kv_context_tokens": len(context)}
    bad = request("bad", context + context, 1, xargs={**xargs, "kv_prepare": 1})
    report = run_engine(
        llama,
        [[bad, request("beside", prompt(300, seed=7), 20)], [request("good", CONTEXT, 4)]],
        settings={**SETTINGS, "policy": "failing"},
        environment={"PYTHONPATH": str(failing_policy.install(tmp_path))},
    )
    assert report["outputs"]["bad"]["finish_reason"] == "error"
    assert report["outputs"]["beside"]["finish_reason"] == "length"
    assert report["skipped"] == {"failing error": 1}
    assert report["free_at_end"] == report["num_blocks"] - 1


def check_of(settings: dict[str, Any]) -> type[RequestCheck]:
    """Returns the class that vLLM loads by the name that `serve` passes."""
    module, _, name = plugin_options(Settings.from_dict(settings))["logits_processors"].partition(
        ":"
    )
    return getattr(import_module(module), name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reuse_contexts": False}, "keeps no contexts"),
        ({"trigger": "decode:16"}, "trigger decode:16 no context is compressed"),
        ({"budget": 1.0}, "budget 1.0 and"),
        ({"policy": "none"}, "policy none,"),
        ({"policy": "momentkv"}, "momentkv merges evicted tokens"),
        ({"policy": "h2o+cam"}, "cam merges evicted tokens"),
    ],
)
def test_servers_that_cannot_prepare_refuse_kv_prepare(
    settings: dict[str, Any], message: str
) -> None:
    check = check_of({**SETTINGS, **settings})
    params = SamplingParams(max_tokens=1, extra_args={**NAMED, "kv_prepare": True})
    with pytest.raises(ValueError, match=message):
        check.validate_params(params)


@pytest.mark.parametrize("asked", [True, 1])
def test_preparation_must_ask_for_one_token(asked: Any) -> None:
    check, xargs = check_of(SETTINGS), {**NAMED, "kv_prepare": asked}
    check.validate_params(SamplingParams(max_tokens=1, extra_args=xargs))
    for max_tokens in (2, None):
        with pytest.raises(ValueError, match=f"expected max_tokens 1, found {max_tokens}"):
            check.validate_params(SamplingParams(max_tokens=max_tokens, extra_args=xargs))


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"kv_prepare": True}, "expected kv_context_tokens beside it, found none"),
        ({**NAMED, "kv_prepare": 2}, "should be a valid boolean, found 2"),
        ({**NAMED, "kv_prepare": 1.0}, "should be a valid boolean, found 1.0"),
        ({**NAMED, "kv_prepare": "yes"}, "should be a valid boolean, found 'yes'"),
    ],
)
def test_invalid_kv_prepare_is_refused(xargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request_options(xargs)


def test_kv_prepare_false_is_accepted_everywhere() -> None:
    assert not request_options({**NAMED, "kv_prepare": False}).prepare
    check_of({**SETTINGS, "policy": "momentkv"}).validate_params(
        SamplingParams(extra_args={**NAMED, "kv_prepare": 0})
    )
