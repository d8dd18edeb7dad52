"""Merging and moments in the real engine: what replaces evicted tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests.engine.conftest import Run, check_as_alone, each_alone, request
from tests.engine.oracle import KeptTokensDecoder, follow, kept_positions
from tests.tiny_models import prompt

BLOCK, HEADS, LAYERS = 32, 2, 3
CONTEXT, QUESTION = 700, 20
# Per head n_e, a unit and two means in fp32 and cross moments in 16 bits, in fp32 pages of K and V.
HEAD_SIZE = 32
NUMBERS = HEADS * (2 + 2 * HEAD_SIZE + HEAD_SIZE**2 // 2)
STATE_PAGES = -(-NUMBERS // (2 * BLOCK * HEAD_SIZE))


@pytest.mark.parametrize("policy", ["momentkv", "pyramidkv+adakv+momentfix"])
def test_every_query_after_an_event_is_corrected(llama: str, run_engine: Run, policy: str) -> None:
    """The question's queries, in chunks behind a compressed context, and generated tokens'."""
    tokens = prompt(CONTEXT + QUESTION, seed=1)
    report = run_engine(
        llama,
        [[request("a", tokens, 16, xargs={"kv_context_tokens": CONTEXT})]],
        settings={"policy": policy, "budget": 0.5},
        record_kept=True,
        max_num_batched_tokens=300,
    )
    kept = kept_positions(report["kept"], LAYERS)
    decoder = KeptTokensDecoder(
        llama, tokens[:CONTEXT], kept, CONTEXT // BLOCK * BLOCK, corrects=True
    )
    for token in tokens[CONTEXT:]:
        logits = decoder.step(token)
    output = report["outputs"]["a"]
    for token, logprobs in zip(output["tokens"], output["logprobs"], strict=True):
        expected = torch.log_softmax(logits, 0)
        for candidate, logprob in logprobs.items():
            assert float(expected[int(candidate)]) == pytest.approx(logprob, abs=2e-3)
        logits = decoder.step(token)


def test_later_events_correct_by_all_tokens_that_are_gone(llama: str, run_engine: Run) -> None:
    """Block by block in the prompt, and while generating: dense attention over what is left, and
    estimates from every token that any event has evicted."""
    tokens, stops = prompt(640, seed=1), [256, 512, 640, 704, 768]
    report = run_engine(
        llama,
        [[request("a", tokens, 150)]],
        settings={"policy": "momentkv", "budget": 0.5, "trigger": "chunk:256,decode:64"},
        record_kept=True,
    )
    records, output = report["kept"], report["outputs"]["a"]
    assert len(records) == LAYERS * (len(stops) - 1), "nothing is freed at 256"
    kept = [kept_positions(records[i:], LAYERS) for i in range(0, len(records), LAYERS)]
    events = dict(zip(stops[1:], kept, strict=True))
    first = stops[1]
    decoder = KeptTokensDecoder(llama, tokens[:first], events.pop(first), first, corrects=True)
    for token in tokens[first:]:
        decoder.first_logits = decoder.step(token)
    decoder.forget(events.pop(len(tokens)))
    follow(decoder, output, events)
    assert min(map(len, decoder.gone_keys[0])) > first // 2


@pytest.mark.parametrize(
    ("trigger", "room"), [("prompt,decode:64", "within"), ("chunk:256", "on_top")]
)
def test_moments_add_up_from_event_to_event(
    llama: str, run_engine: Run, trigger: str, room: str
) -> None:
    """Each head's count is what it has evicted so far; the state's pages count in the budget, or
    take another block."""
    report = run_engine(
        llama,
        [[request("a", prompt(1000, seed=1), 140)]],
        settings={
            "policy": "snapkv+momentfix",
            "budget": 0.25,
            "trigger": trigger,
            "params": {"state_room": room},
        },
        record_kept=True,
    )
    events = [report["kept"][i : i + LAYERS] for i in range(0, len(report["kept"]), LAYERS)]
    assert len(events) >= 3
    evicted = [[0] * HEADS for _ in range(LAYERS)]
    for event in events:
        for layer, record in enumerate(event):
            for head, (count, source) in enumerate(
                zip(record["counts"], record["source"], strict=True)
            ):
                evicted[layer][head] += source - count * BLOCK
            assert record["state"] == evicted[layer]
            # A quarter of the prompt's 31 blocks while it is read, then of all there are.
            blocks = (sum(record["counts"]) + STATE_PAGES) / HEADS
            assert blocks - (room == "on_top") in (8, 9)


@pytest.mark.parametrize(
    ("policy", "trigger"),
    [("momentkv", "chunk:256"), ("d2o", "prompt,decode:32"), ("h2o+cam", "prompt,decode:32")],
)
def test_batched_requests_have_the_outputs_that_they_have_alone(
    llama: str, run_engine: Run, policy: str, trigger: str
) -> None:
    """An uncompressed request is among them."""
    settings = {"policy": policy, "budget": 0.5, "trigger": trigger, "min_tokens": 200}
    requests = [
        request(f"r{size}", prompt(size, seed=size), 48, at_step=2 * i)
        for i, size in enumerate((1000, 90, 640, 700))
    ]
    phases = [*each_alone(requests), requests]
    report = run_engine(llama, phases, settings=settings, max_num_batched_tokens=256)
    check_as_alone(report["outputs"], [one["id"] for one in requests])


def test_merging_changes_the_logprobs_of_plain_eviction(llama: str, run_engine: Run) -> None:
    """h2o+cam keeps the entries of h2o; what it merges shows in the logprobs."""
    policies = ("h2o", "h2o+cam")
    requests = [request(p, prompt(1000, seed=1), 2, xargs={"kv_policy": p}) for p in policies]
    settings = {"policy": policies[0], "budget": 0.25, "request_policies": policies[1:]}
    outputs = run_engine(llama, [[one] for one in requests], settings=settings)["outputs"]
    plain, merged = (outputs[policy]["logprobs"][1] for policy in policies)
    assert any(abs(merged.get(token, 0.0) - value) > 1e-4 for token, value in plain.items())


@pytest.mark.parametrize(
    ("policy", "trigger"),
    [
        ("kvmerger", "prompt,decode:32"),
        ("asymkv", "chunk:256"),
        ("kvslimmer", "prompt,decode:32"),
        ("momentkv", "chunk:256"),
    ],
)
def test_merging_equal_keys_loses_nothing(
    equal_keys: str, run_engine: Run, policy: str, trigger: str
) -> None:
    """With equal keys, a quarter of the cache has the outputs of the full cache."""
    tokens = prompt(700, seed=1)
    outputs = run_engine(
        equal_keys,
        [[request("a", tokens, 80)], [request("whole", tokens, 80, xargs={"kv_policy": "none"})]],
        settings={
            **{"policy": policy, "budget": 0.25, "trigger": trigger},
            "request_policies": ["none"],
        },
    )["outputs"]
    compressed, full = outputs["a"], outputs["whole"]
    assert compressed["tokens"] == full["tokens"]
    for expected, logprobs in zip(full["logprobs"], compressed["logprobs"], strict=True):
        for token, logprob in logprobs.items():
            assert expected.get(token, logprob) == pytest.approx(logprob, abs=1e-3)


def test_merged_keys_of_equal_unrotated_keys_are_that_key(
    model_directory: Path, run_engine: Run
) -> None:
    """On a model whose keys differ by rotation alone, merged keys rotated back are that key.

    Every head's entries together stand for all tokens of the full blocks so far.
    """
    biases = []

    def change(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.data.zero_()
            layer.self_attn.k_proj.bias.data.normal_()
            biases.append(layer.self_attn.k_proj.bias.data.view(HEADS, HEAD_SIZE))

    report = run_engine(
        str(tiny_models.build("qwen2", model_directory / "one-key", change=change)),
        [[request("a", prompt(700, seed=1), 80)]],
        settings={"policy": "asymkv", "budget": 0.25, "trigger": "chunk:256,decode:32"},
        record_kept=True,
    )
    assert len(report["kept"]) >= 4 * LAYERS
    for record in report["kept"]:
        head = torch.arange(HEADS).repeat_interleave(torch.tensor(record["counts"]) * BLOCK)
        expected = biases[record["layer"]][head]
        assert torch.allclose(torch.tensor(record["unrotated"]), expected, atol=2e-3)
    positions = [256, 512, 700, 732, 764]
    for event, position in enumerate(positions):
        for record in report["kept"][event * LAYERS : (event + 1) * LAYERS]:
            for tokens in record["tokens"]:
                assert sum(tokens) == pytest.approx(position // BLOCK * BLOCK, abs=0.1)


def test_budget_without_room_for_the_policy_state_is_refused(llama: str, run_engine: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="tokens per head; expected at least 32 tokens"):
        run_engine(
            llama,
            [[request("a", prompt(300, seed=1), 2)]],
            settings={"policy": "snapkv+momentfix", "budget": 32, "params": {"window_size": 8}},
        )


def test_policy_state_is_never_read_as_values_of_another_request(
    llama: str, run_engine: Run
) -> None:
    """Half of an fp32 number may be NaN as bfloat16, and vLLM's kernels multiply it by 0.

    Others get the blocks in which moments lay, and fill them only in part.
    """
    first = [request(f"r{i}", prompt(400 + 7 * i, seed=i), 40) for i in range(2)]
    others = [request(f"s{i}", prompt(5 + 7 * i, seed=i), 4) for i in range(12)]
    report = run_engine(
        llama,
        [first, others],
        settings={"policy": "momentkv", "budget": 0.5, "trigger": "prompt,decode:32"},
        num_gpu_blocks_override=60,
        max_model_len=512,
        dtype="bfloat16",
        environment={"VLLM_RAISE_ON_LOGIT_NANS": "1"},
    )
    assert len(report["outputs"]) == len(first) + len(others)
