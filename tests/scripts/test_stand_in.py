"""scripts/measure/stand_in.py: answers in both modes, settings, its table.

tests/evaluation/test_texts.py compares its text loss with the engine's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

import block_by_block
import memory_figure
import stand_in
from offline.masked import MaskedModel
from tests.cli.server_process import ROOT
from training.tasks import generate_sample
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer

MODEL = str(ROOT / "models" / "reference")


def test_answers_are_found_where_their_tokens_are_kept() -> None:
    """A full cache answers in both modes; the last tokens alone do not."""
    model, tokenizer = MaskedModel(MODEL, torch.float32), load_tokenizer(MODEL)
    sample = generate_sample("single", num_tokens=300, seed=3)
    context, question, answer = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (sample.context, sample.question, " ".join(sample.answers))
    )
    setups = ["full", "streamingllm@1.0", "streamingllm@0.1"]
    layers = model.layers([*context, *question])
    alone = [layer.first(len(context)) for layer in layers]
    unknown = stand_in.answers(model, alone, question, answer, setups)
    known = stand_in.answers(model, layers, [], [*answer, *answer], setups)
    assert unknown == {"full": True, "streamingllm@1.0": True, "streamingllm@0.1": False}
    assert set(known) == set(setups), "said twice: whatever the model makes of that"
    assert known["full"] == known["streamingllm@1.0"]


def test_a_context_s_layers_are_those_of_the_prompt_without_its_question() -> None:
    model, tokens = MaskedModel(MODEL, torch.float32), (torch.arange(150) * 7 % 90 + 5).tolist()
    for layer, alone in zip(model.layers(tokens), model.layers(tokens[:100]), strict=True):
        first = layer.first(100)
        for name in ("keys", "values", "queries"):
            torch.testing.assert_close(
                getattr(first, name), getattr(alone, name), atol=1e-4, rtol=1e-4
            )


def test_items_go_from_kind_to_kind() -> None:
    """A run that is stopped has some of each."""
    options = argparse.Namespace(
        length=128,
        texts=2,
        continuation=16,
        seed=0,
        needles=2,
        tasks=["fwe", "qa_1"],
        kinds=["text"],
    )
    tokenizer = load_tokenizer(MODEL)
    tasks = [item.task for item in stand_in.items_of(options, tokenizer)]
    assert tasks[:6] == tasks[6:]
    assert len(set(tasks)) == 6


def test_reading_a_part_of_the_kept_tokens_changes_the_loss() -> None:
    """Reading all kept tokens gives the loss of not choosing pages."""
    model, tokens = MaskedModel(MODEL, torch.float32), (torch.arange(320) * 7 % 90 + 5).tolist()
    setups = ["full", "snapkv@0.5", "snapkv@0.5 quest:1.0", "snapkv@0.5 quest:0.3", "quest:0.3"]
    losses = stand_in.text_loss(model, (tokens[:300], tokens[300:]), setups)
    kept, all_of_it, part, of_everything = (losses[setup] for setup in setups[1:])
    assert all_of_it == pytest.approx(kept, abs=1e-6)
    assert len({round(nats, 4) for nats in (losses["full"], kept, part, of_everything)}) == 4


def test_setting_names_parameters_and_budget() -> None:
    pipeline, *others = stand_in.pipeline_of("snapkv:window_size=64,pooling=mean@0.25")
    assert (pipeline.params["window_size"], pipeline.params["pooling"]) == (64, "mean")
    assert others == [0.25, None]
    assert stand_in.pipeline_of("snapkv:queries=8@0.5")[1:] == (0.5, 8)
    with pytest.raises(ConfigError, match="windw"):
        stand_in.pipeline_of("snapkv:windw=64@0.25")


def test_queries_limits_what_a_policy_observes() -> None:
    """Fewer queries choose as a smaller window does, and more than the window are not there."""
    model = MaskedModel(MODEL, torch.float32)
    context = model.layers((torch.arange(300) * 7 % 90 + 5).tolist())

    def kept(setup: str) -> list[list[list[bool]]]:
        return [layer.mask.tolist() for layer in stand_in.keeps(setup, context)]

    assert kept("h2o:queries=8@0.25") == kept("h2o:window_size=8@0.25")
    assert kept("h2o:queries=400@0.25") == kept("h2o@0.25") != kept("h2o:queries=8@0.25")


def test_differences_are_paired_and_only_what_the_full_cache_answers_counts(
    tmp_path: Path,
) -> None:
    values = {
        "text": {"full": (2.0, 1.0), "a@0.5": (2.1, 1.3), "b@0.5": (2.2, 1.4)},
        "known": {"full": (True, False), "a@0.5": (True, True), "b@0.5": (False, True)},
        "not known": {"full": (True, True), "a@0.5": (True, True), "b@0.5": (False, True)},
    }
    rows = [
        {
            "item": item + 10 * (mode != "text"),
            "task": task,
            "mode": mode,
            "setup": setup,
            "value": v,
        }
        for mode, setups in values.items()
        for setup, both in setups.items()
        for item, (task, v) in enumerate(zip(("text/prose", "text/source"), both, strict=True))
    ]
    lines = list(stand_in.table(rows, ["a@0.5", "b@0.5"]))
    assert lines[2] == (
        "| `a@0.5` | 0.200 (0.100) | +0.000 (+0.000 to +0.000) | 0.100 | 0.300 | 1 of 1 | 2 of 2 |"
    )
    assert lines[3] == (
        "| `b@0.5` | 0.300 (0.100) | +0.100 (+0.100 to +0.100) | 0.200 | 0.400 | 0 of 1 | 1 of 2 |"
    )
    stand_in.plot(rows, ["a@0.5", "b@0.5"], tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(drawn.count(f"<!-- {name} -->") == 2 for name in ("a@0.5", "b@0.5"))


def test_cost_of_chunk_events_is_paired_with_prompt_events() -> None:
    values = {("none", "prompt", 1.0): (2.0, 1.0), ("tova", "prompt", 0.25): (2.1, 1.1)}
    values |= {("tova", "chunk:128", 0.25): (2.4, 1.4), ("tova", "decode:128", 64): (2.5, 1.5)}
    values |= {("h2o", *key[1:]): (2.3, 1.3) for key in values if key[0] == "tova"}
    names = ("policy", "trigger", "budget")
    rows = [
        {"item": item, "task": "text/prose", "nats": nats, **dict(zip(names, key, strict=True))}
        for key, both in values.items()
        for item, nats in enumerate(both)
    ]
    first, heads, *_, last = block_by_block.table(rows, ["tova"], against="h2o")
    assert first == "2 texts, full cache 1.500 nats"
    assert heads.split(" | ")[1:5] == [
        "`prompt`, 0.25",
        "`chunk:128`, 0.25",
        "`decode:128`, 64",
        "`chunk:128`, 0.25: more than `prompt`",
    ]
    means = [cell.partition(" (")[0] for cell in last.strip("| ").split(" | ")]
    assert means == ["`tova`", "0.100", "0.400", "0.500", "+0.300", "-0.200", "+0.100", "+0.200"]
    assert last.count("(") == 7


def test_points_are_shares_of_bytes_and_losses_beside_the_full_cache() -> None:
    """Heads of 64 take 68 bytes in int8 and 36 in int4, of 128 in 16 bits."""
    setups = {"full": 1.0, "a@0.5": 1.1, "a:b=c@0.5 in int8_per_token_head": 1.3}
    setups["full in int4_per_token_head"] = 1.5
    rows = [
        {"setup": setup, "item": item, "value": value + item * (value - 1.0)}
        for setup, value in setups.items()
        for item in (0, 1)
    ]
    found = memory_figure.points(rows, 64)
    assert found["16 bits"][1.0] == (1.0, 0.0, 0.0)
    share, loss, error = found["16 bits"][0.5]
    assert (share, loss, error) == (0.5, pytest.approx(0.15), pytest.approx(0.05))
    assert found["int8_per_token_head"][0.5][:2] == (0.5 * 68 / 128, pytest.approx(0.45))
    assert found["int4_per_token_head"][1.0][:2] == (36 / 128, pytest.approx(0.75))


def test_losses_in_a_quantized_cache_are_of_its_numbers() -> None:
    """The model reads its own tokens, too, as the cache gives them back."""
    model = stand_in.QuantizedModel(MODEL, torch.float32)
    tokens = generate_sample("single", num_tokens=300, seed=3)
    text = load_tokenizer(MODEL)(tokens.context, add_special_tokens=False)["input_ids"]
    losses = {}
    for model.cache in ("auto", "int8_per_token_head", "int4_per_token_head"):
        found = stand_in.text_loss(model, (text[:150], text[150:180]), ["full", "keydiff@0.5"])
        losses |= {stand_in.in_cache(setup, model.cache): loss for setup, loss in found.items()}
    full = losses["full"]
    eight, four = (losses[f"full in int{bits}_per_token_head"] for bits in (8, 4))
    assert 0 < abs(eight - full) < abs(four - full)
    assert len(set(losses.values())) == 6
