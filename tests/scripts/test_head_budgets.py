"""scripts/measure/head_budgets.py and head_prompts.py: equal memory, lost attention, prompts."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

import head_budgets
import head_prompts
from offline.dense import BLOCK_SIZE
from offline.masked import MaskedModel
from tests.cli.server_process import ROOT
from vllm_kvcompress.compression.needles import NEEDLE_WORDS
from vllm_kvcompress.policies.headkv import headkv_text

MODEL = str(ROOT / "models" / "reference")
TOKENS = (torch.arange(330) * 7 % 90 + 5).tolist()


def test_every_way_keeps_as_many_tokens_and_whole_blocks(tmp_path) -> None:
    layers = MaskedModel(MODEL, torch.float32).layers(TOKENS)
    config = len(layers), layers[0].queries.shape[1]
    scores = [[[float(1 + la + 2 * head)] for head in range(config[1])] for la in range(config[0])]
    profile = tmp_path / "heads.json"
    profile.write_text(headkv_text(scores))
    options = argparse.Namespace(profile=profile, threshold={0.3: 0.002})
    repeated = torch.rand(len(layers), len(layers[0].keys), len(TOKENS))
    found = {way: kept for way, kept, _ in head_budgets.ways(layers, repeated, 0.3, options)}
    num_blocks, num_tail = len(TOKENS) // BLOCK_SIZE, len(TOKENS) % BLOCK_SIZE
    mean = math.ceil(0.3 * num_blocks) * BLOCK_SIZE + num_tail
    counts = {way: [each.mask.sum(dim=1) for each in kept] for way, kept in found.items()}
    threshold = counts.pop("threshold")
    for way, by_layer in counts.items():
        assert int(torch.cat(by_layer).sum()) == mean * len(torch.cat(by_layer)), way
    del counts["kvzip"]  # has no blocks
    for by_layer in [*counts.values(), threshold]:
        assert all(int(count) % BLOCK_SIZE == num_tail for row in by_layer for count in row)
    assert torch.cat(counts["same"]).unique().tolist() == [mean]
    assert len(torch.cat(counts["measured"]).unique()) > 1


def test_lost_attention_is_that_of_the_later_half_to_what_is_not_kept() -> None:
    """Against a loop over heads, queries and keys."""
    layers = MaskedModel(MODEL, torch.float32).layers(TOKENS[:80])
    masks = [torch.rand(len(layer.keys), 80) < 0.5 for layer in layers]
    kept = [head_budgets.Kept(mask, head_budgets.Merged()) for mask in masks]
    lost = head_budgets.lost_mass(layers, kept)
    layer, head = layers[1], 1
    group = layer.queries.shape[1] // len(layer.keys)
    sums = []
    for token in range(40, 80, head_budgets.QUERY_STRIDE):
        for member in range(group):
            query = layer.queries[token, head * group + member]
            logits = [layer.scale * float(query @ layer.keys[head, at]) for at in range(token + 1)]
            weights = torch.tensor(logits).softmax(dim=0).tolist()
            sums.append(sum(w for at, w in enumerate(weights) if not masks[1][head, at]))
    assert float(lost[1, head]) == pytest.approx(sum(sums) / len(sums), abs=1e-5)


def test_a_prompt_of_a_text_repeats_words_of_another_place() -> None:
    text = list(range(1000, 3000))
    prompt = head_prompts.text_prompt(text, [7], 200, seed=3)
    needle = prompt.tokens[prompt.needle : prompt.needle + NEEDLE_WORDS]
    assert len(prompt.tokens) == 200
    assert prompt.tokens[0] == 7
    assert prompt.tokens[-NEEDLE_WORDS:] == needle
    noise = prompt.tokens[1 : prompt.needle] + prompt.tokens[prompt.needle + NEEDLE_WORDS :]
    assert not set(needle) & set(noise[:-NEEDLE_WORDS])
    assert head_prompts.moved([4, 4], [6, 2]) == 0.25
