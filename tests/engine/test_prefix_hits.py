"""Turns behind a cached history: what is computed again, and which queries choose what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.conftest import Run, request
from tests.engine.oracle import KeptTokensDecoder, follow, kept_positions
from tests.tiny_models import prompt

BLOCK, LAYERS, QUERY_HEADS, NEEDED = 32, 3, 4, 32
FIRST = 400  # tokens of the first prompt, of which 384 are cached in full blocks
WINDOW = 64
SNAPKV = {"policy": "snapkv", "budget": 0.25, "params": {"window_size": WINDOW, "kernel_size": 1}}


def turns(new: int) -> list[list[dict[str, Any]]]:
    """Returns a first turn and a second one; of the `new` tokens two are the first reply."""
    first = request(f"{new} first", prompt(FIRST, seed=new), 2)
    second = request(f"{new}", prompt(new - 2, seed=1000 + new), 12, follows=first["id"])
    return [[first], [second]]


def scores_by_hand(model: str, tokens: list[int], queries: range) -> list[list[list[float]]]:
    """Returns the attention that every layer, head and token receives from some queries."""
    stock = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        attentions = stock(torch.tensor([tokens]), output_attentions=True).attentions
    group = stock.config.num_attention_heads // stock.config.num_key_value_heads
    scores = []
    for weights in attentions:
        layer = []
        for head in range(stock.config.num_key_value_heads):
            received = [0.0] * len(tokens)
            for query in queries:
                for member in range(head * group, (head + 1) * group):
                    for position, weight in enumerate(weights[0, member, query].tolist()):
                        received[position] += weight
            layer.append(received)
        scores.append(layer)
    return scores


def chosen_by(scores: list[float], kept: list[int], num_recent: int, num_full: int) -> bool:
    """Whether `kept` are the recent tokens, and of the others those of the highest scores."""
    recent = set(range(num_full - num_recent, num_full))
    others = [position for position in kept if position not in recent]
    left_out = set(range(num_full)) - set(kept)
    lowest, highest = (min(scores[p] for p in others), max(scores[p] for p in left_out))
    return recent <= set(kept) and lowest >= highest * (1 - 1e-5)


def test_second_turn_computes_its_new_tokens_and_is_compressed_by_their_queries(
    llama: str, run_engine: Run
) -> None:
    stock = run_engine(llama, turns(40))
    report = run_engine(llama, turns(40), settings=SNAPKV, record_kept=True)
    output, tokens = report["outputs"]["40"], report["prompts"]["40"]
    assert output["cached"] == stock["outputs"]["40"]["cached"] == FIRST // BLOCK * BLOCK
    assert len(tokens) == FIRST + 40
    records = report["kept"][-LAYERS:]
    num_new, num_full = len(tokens) - output["cached"], len(tokens) // BLOCK * BLOCK
    assert {record["num_queries"] for record in records} == {num_new}
    assert num_new < WINDOW
    kept = kept_positions(records, LAYERS)
    by_new, by_window = (
        scores_by_hand(llama, tokens, range(len(tokens) - number, len(tokens)))
        for number in (num_new, WINDOW)
    )
    num_recent = WINDOW - (len(tokens) - num_full)
    for layer, heads in enumerate(kept):
        for head, positions in enumerate(heads):
            assert chosen_by(by_new[layer][head], positions, num_recent, num_full), (layer, head)
            assert not chosen_by(by_window[layer][head], positions, num_recent, num_full)
    follow(KeptTokensDecoder(llama, tokens, kept, num_full), output)


@pytest.fixture
def measured_heads(tmp_path: Path) -> dict[str, Any]:
    """A budget divided by measured heads, and the file with them."""
    heads = {f"{i}-{h}": [1.0 + i + h] for i in range(LAYERS) for h in range(QUERY_HEADS)}
    file = tmp_path / "heads.json"
    file.write_text(json.dumps(heads))
    return {"budget": 0.25, "profile": str(file), "reuse_conversations": "off"}


@pytest.mark.parametrize("policy", ["snapkv", "attention+headkv", "keyspans+headkv", "spans"])
def test_hit_is_cut_only_for_turns_that_are_too_short(
    llama: str, run_engine: Run, measured_heads: dict[str, Any], policy: str
) -> None:
    """`spans` without measured heads needs its whole window."""
    news = [10, 20, 40, 150, 300]
    settings, window, needed = {
        "snapkv": (SNAPKV, WINDOW, NEEDED),
        "attention+headkv": ({"policy": policy, **measured_heads}, NEEDED, NEEDED),
        "keyspans+headkv": ({"policy": policy, **measured_heads}, 256, NEEDED),
        "spans": ({"policy": "spans", "budget": 0.25}, 256, 256),
    }[policy]
    phases = [phase for new in news for phase in turns(new)]
    report = run_engine(llama, phases, settings=settings, record_kept=True)
    for number, new in enumerate(news):
        output, num_tokens = report["outputs"][f"{new}"], FIRST + new
        assert output["cached"] == min(FIRST, num_tokens - needed) // BLOCK * BLOCK, new
        first = (2 * number + 1) * LAYERS
        observed = {record["num_queries"] for record in report["kept"][first : first + LAYERS]}
        assert observed == {min(window, num_tokens - output["cached"])}, new


def test_kept_state_is_continued_from_its_last_token_where_enough_tokens_are_new(
    llama: str, run_engine: Run
) -> None:
    """Where a turn is short, what the state's event saw is taken completely."""
    reply, cases = 20, {10: FIRST, 40: FIRST + 19}
    phases = [phase for new in cases for phase in turns(new)]
    for first, *_ in phases[::2]:
        first["max_tokens"] = reply
    settings = {**SNAPKV, "budget": 128, "reuse_conversations": "reuse"}
    report = run_engine(llama, phases, settings=settings, record_kept=True)
    assert report["conversations_continued"] == len(cases)
    for number, (new, cached) in enumerate(cases.items()):
        num_tokens = FIRST + reply + new - 2
        assert report["outputs"][f"{new}"]["cached"] == cached, new
        first = (2 * number + 1) * LAYERS
        observed = {record["num_queries"] for record in report["kept"][first : first + LAYERS]}
        assert observed == {num_tokens - cached}, new
