"""Named contexts are compressed before the rest of the prompt is read."""

from __future__ import annotations

import pytest
import torch

from tests.engine.conftest import Run, check_as_alone, each_alone, request
from tests.engine.oracle import KeptTokensDecoder, kept_positions
from tests.tiny_models import prompt
from vllm_kvcompress.vllm_plugin.request_options import RequestOptions, request_options

CONTEXT, QUESTION, WINDOW = 700, 45, 32
SETTINGS = {"policy": "adakv+criticalkv", "budget": 0.25}


def test_question_attends_to_the_compressed_context(llama: str, run_engine: Run) -> None:
    """Logprobs of every token equal those of a model that kept only those tokens.

    The same prompt was served before without a named context, so that the prefix cache holds
    blocks behind the context. They must not be used; those before the context's last queries are.
    """
    tokens = prompt(CONTEXT + QUESTION, seed=1)
    named = {"kv_context_tokens": CONTEXT}
    report = run_engine(
        llama,
        [[request("plain", tokens, 4)], [request("named", tokens, 40, xargs=named)]],
        settings=SETTINGS,
        record_kept=True,
        max_num_batched_tokens=300,
    )
    kept = kept_positions(report["kept"][3:], num_layers=3)
    assert sum(map(len, kept[0])) == 2 * 32 * 6, "a quarter of the context's 21 blocks"
    decoder = KeptTokensDecoder(llama, tokens[:CONTEXT], kept, CONTEXT // 32 * 32)
    for token in tokens[CONTEXT:]:
        logits = decoder.step(token)
    output = report["outputs"]["named"]
    assert output["cached"] == (CONTEXT - WINDOW) // 32 * 32 == 640
    for token, logprobs in zip(output["tokens"], output["logprobs"], strict=True):
        expected = torch.log_softmax(logits, 0)
        for candidate, logprob in logprobs.items():
            assert float(expected[int(candidate)]) == pytest.approx(logprob, abs=2e-3)
        logits = decoder.step(token)


@pytest.mark.parametrize("trigger", ["prompt", "chunk:256", "prompt,decode:16"])
def test_batched_named_contexts_have_the_outputs_that_they_have_alone(
    llama: str, run_engine: Run, trigger: str
) -> None:
    """Beside ordinary requests; the whole prompt as context changes nothing."""
    settings = {**SETTINGS, "trigger": trigger}
    tokens = prompt(1000, seed=2)
    named = [
        request(f"n{end}", tokens, 40, xargs={"kv_context_tokens": end}, at_step=i)
        for i, end in enumerate((300, 960, 1000, 5000))
    ]
    requests = [request("plain", tokens, 40), *named]
    phases = [*each_alone(requests), requests]
    outputs = run_engine(llama, phases, settings=settings, max_num_batched_tokens=210)["outputs"]
    check_as_alone(outputs, [one["id"] for one in requests])
    plain = outputs["plain"]["tokens"]
    assert outputs["n1000"]["tokens"] == outputs["n5000"]["tokens"] == plain


def test_invalid_unchecked_value_is_ignored(llama: str, run_engine: Run) -> None:
    """Without RequestCheck, which is not loaded here, the value is ignored."""
    tokens = prompt(300, seed=3)
    requests = [
        request("plain", tokens, 8),
        request("wrong", tokens, 8, xargs={"kv_context_tokens": -1}),
    ]
    outputs = run_engine(llama, [requests], settings=SETTINGS)["outputs"]
    assert outputs["wrong"]["tokens"] == outputs["plain"]["tokens"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kv_context_tokens": 0}, "should be greater than or equal to 1, found 0"),
        ({"kv_context_tokens": 2.5}, "should be a valid integer, found 2.5; give for example"),
        ({"kv_context_tokens": "10"}, "should be a valid integer, found '10'"),
        (
            {"kv_contextt": 10},
            "kv_contextt is not known; valid are kv_budget, kv_ceiling, kv_context_tokens, ",
        ),
    ],
)
def test_invalid_request_options_are_refused(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", "[(]")):
        request_options(extra)


def test_options_of_others_are_ignored() -> None:
    assert request_options(None) == RequestOptions()
    assert request_options({"theirs": "x", "kv_transfer_params": {}}) == RequestOptions()
    assert request_options({"kv_context_tokens": 10.0}).context_tokens == 10
