"""scripts/measure/where_it_loses.py: parts of the heads, attention to a context, losses."""

from __future__ import annotations

import argparse

import pytest
import torch

import stand_in
import where_it_loses
from offline.masked import MaskedModel
from tests.cli.server_process import ROOT

MODEL = str(ROOT / "models" / "reference")
SETUP = "adakv@0.25"
TOKENS = (torch.arange(330) * 7 % 90 + 5).tolist()


def test_bands_and_shares_hold_every_head_once_and_all_loses_what_the_setting_does() -> None:
    model = MaskedModel(MODEL, torch.float32)
    options = argparse.Namespace(setups=[SETUP], bands=2)
    rows = list(where_it_loses.rows_of(model, (TOKENS[:300], TOKENS[300:]), options))
    everything, *parts = rows
    for word in ("layers", "heads"):
        members = [row["heads"] for row in parts if row["part"].startswith(word)]
        assert sum(members) == everything["heads"]
    losses = stand_in.text_loss(model, (TOKENS[:300], TOKENS[300:]), ["full", SETUP])
    assert everything["loss"] == pytest.approx(losses[SETUP] - losses["full"], abs=1e-6)
    assert len({round(row["loss"], 5) for row in parts}) > 1
    assert "heads" in next(where_it_loses.table(rows))


def test_heads_outside_of_a_part_keep_everything() -> None:
    model = MaskedModel(MODEL, torch.float32)
    kept = stand_in.keeps(SETUP, model.layers(TOKENS))
    part = torch.zeros(len(kept), len(kept[0].mask), dtype=torch.bool)
    part[1, 0] = True
    masks = [layer.mask for layer in where_it_loses.only(kept, part)]
    assert masks[0].all()
    assert masks[1][1:].all()
    assert torch.equal(masks[1][0], kept[1].mask[0])
    assert not masks[1][0].all()


def test_attention_is_the_mean_over_tokens_and_query_heads() -> None:
    """Against a loop over layers, heads, tokens and keys."""
    model = MaskedModel(MODEL, torch.float32)
    context = model.layers(TOKENS[:40])
    whole = model.layers(TOKENS[:50])
    model.logits(context, None, torch.tensor(TOKENS[40:50]))
    weights = where_it_loses.attention(model, context)
    layer, head = whole[1], 0
    group = layer.queries.shape[1] // len(layer.keys)
    sums = torch.zeros(40)
    for member in range(group):
        for token in range(40, 50):
            query = layer.queries[token, head * group + member]
            logits = [layer.scale * float(query @ layer.keys[head, at]) for at in range(token + 1)]
            sums += torch.tensor(logits).softmax(dim=0)[:40]
    torch.testing.assert_close(weights[1, head], sums / (10 * group), atol=1e-4, rtol=1e-3)
