"""Attention sinks as parameters (gpt-oss): stock at budget 1.0, and dense attention compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

BLOCK, FULL_LAYERS = 32, (1, 3)
LONG, SHORT = prompt(700, seed=1), prompt(50, seed=2)
SETTINGS = {"policy": "snapkv", "budget": 0.25}
CHOICES = {"min_request_budget": 0.25, "max_request_budget": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.build("gpt_oss", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def report(model: str, run_engine: Run) -> dict[str, Any]:
    whole = [request("whole", LONG, 24, salt="whole", xargs={"kv_budget": 1.0})]
    both = [request("long", LONG, 24), request("short", SHORT, 24)]
    again = [request("again", LONG, 24), request("chunk", LONG[:300], 24, at_step=3)]
    settings = {**SETTINGS, **CHOICES}
    return run_engine(model, [both, whole, again], settings=settings, record_kept=True)


def test_budget_one_gives_the_tokens_of_stock(
    model: str, report: dict[str, Any], run_engine: Run
) -> None:
    stock = run_engine(model, [[request("long", LONG, 24), request("short", SHORT, 24)]])
    outputs = report["outputs"]
    assert outputs["whole"]["tokens"] == stock["outputs"]["long"]["tokens"]
    assert outputs["short"]["tokens"] == stock["outputs"]["short"]["tokens"]
    assert outputs["long"]["tokens"] != stock["outputs"]["long"]["tokens"]
    assert outputs["again"]["tokens"] == outputs["long"]["tokens"]


def dense_logits(
    model: str, tokens: list[int], num_prompt: int, kept: dict[int, list[list[int]]]
) -> Tensor:
    """Returns the logits of all tokens where those after the prompt see the kept ones alone.

    Hugging Face's model, whose attention adds a mask by query head: what its heads have evicted
    is hidden from every token behind the prompt.
    """
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    config, num_full = reference.config, num_prompt // BLOCK * BLOCK
    group = config.num_attention_heads // config.num_key_value_heads
    for layer, heads in kept.items():
        hidden = torch.zeros(config.num_attention_heads, len(tokens), len(tokens))
        for head, positions in enumerate(heads):
            for token in set(range(num_full)) - set(positions):
                for member in range(group):
                    hidden[head * group + member, num_prompt:, token] = -torch.inf

        def hide(module: Any, args: Any, kwargs: Any, hidden: Tensor = hidden) -> Any:
            return args, {**kwargs, "attention_mask": kwargs["attention_mask"] + hidden}

        attention = reference.model.layers[layer].self_attn
        attention.register_forward_pre_hook(hide, with_kwargs=True)
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]


def kept_positions(records: list[dict[str, Any]]) -> dict[int, list[list[int]]]:
    """Returns the kept positions by layer of the model and head."""
    kept = {}
    for layer, record in zip(FULL_LAYERS, records, strict=True):
        ends = [sum(record["counts"][: head + 1]) * BLOCK for head in range(len(record["counts"]))]
        starts = [0, *ends[:-1]]
        kept[layer] = [record["kept"][a:b] for a, b in zip(starts, ends, strict=True)]
    return kept


def test_decoding_matches_dense_attention_with_sinks_over_the_kept_tokens(
    model: str, report: dict[str, Any]
) -> None:
    output, kept = report["outputs"]["long"], kept_positions(report["kept"][:2])
    tokens = [*LONG, *output["tokens"]]
    logits = dense_logits(model, tokens, len(LONG), kept)
    logprobs = torch.log_softmax(logits[len(LONG) - 1 :], dim=-1)
    for number, found in enumerate(output["logprobs"]):
        for token, value in found.items():
            assert value == pytest.approx(float(logprobs[number, int(token)]), abs=2e-3), number


def test_snapkv_ranks_by_the_attention_that_sinks_leave(model: str, report: dict[str, Any]) -> None:
    """What sinks take differs by query, so that ignoring them would keep other tokens."""
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        attentions = reference(torch.tensor([LONG]), output_attentions=True).attentions
    for layer, heads in kept_positions(report["kept"][:2]).items():
        for head, kept in enumerate(heads):
            scores = scores_of(attentions[layer][0], head)
            best = sorted(scores, reverse=True)[: len(kept)]
            assert sorted((scores[token] for token in kept), reverse=True) == pytest.approx(best)


def scores_of(attention: Tensor, head: int) -> list[float]:
    """Returns SnapKV's scores by plain loops over [query heads, queries, tokens] attention.

    Several tokens have the score of one peak, so which of them stay is not fixed.
    """
    num_tokens, group, window, half = attention.shape[1], 2, 32, 3
    rows = attention[head * group : (head + 1) * group, num_tokens - window :].double()
    mass, last = rows.mean(dim=(0, 1)).tolist(), num_tokens - window
    scores = [max(mass[max(0, at - half) : min(last, at + half + 1)]) for at in range(last)]
    num_full = num_tokens // BLOCK * BLOCK
    return [*scores, *(1.0 for _ in range(last, num_full))][:num_full]  # the window stays
