"""scripts/measure/loss_predictors.py: numbers of a prompt, predicted losses, promises by them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import loss_predictors
import stand_in
from offline.masked import MaskedModel
from tests.cli.server_process import ROOT

MODEL = str(ROOT / "models" / "reference")
TOKENS = (torch.arange(300) * 7 % 90 + 5).tolist()


@pytest.fixture(scope="module")
def text() -> loss_predictors.Text:
    model = MaskedModel(MODEL, torch.float32)
    return loss_predictors.Text(model, (TOKENS[:260], TOKENS[260:]), torch.tensor([[1.0]]))


def test_nothing_changes_where_everything_is_kept(text: loss_predictors.Text) -> None:
    figures = text.figures("adakv@1.0")
    own = figures.pop("loss of the prompt itself")
    assert own > 0
    assert figures.pop("kept") == 1.0
    assert all(abs(value) < 1e-4 for value in figures.values())


def test_losses_are_those_of_the_stand_in(text: loss_predictors.Text) -> None:
    """What is held out is the text loss of a shorter prompt."""
    figures, setup = text.figures("adakv@0.25"), "adakv@0.25"
    shorter = 260 - loss_predictors.NUM_HELD_OUT
    for name, begin, end in (("loss", 260, 300), ("held out", shorter, 260)):
        tokens = TOKENS[:begin], TOKENS[begin:end]
        losses = stand_in.text_loss(text._model, tokens, ["full", setup])
        assert figures[name] == pytest.approx(losses[setup] - losses["full"], abs=1e-4)
        assert abs(figures[name]) > 1e-3
    halves = figures["first half"] * 19 + figures["second half"] * 20
    assert halves / 39 == pytest.approx(figures["loss"], abs=1e-4)


def test_attention_change_is_that_of_a_loop_over_queries_and_tokens() -> None:
    layer = MaskedModel(MODEL, torch.float32).layers(TOKENS[:100])[1]
    mask = torch.rand(layer.keys.shape[:2], generator=torch.Generator().manual_seed(0)) < 0.3
    mask[:, 0] = True
    evicted, change = loss_predictors.attention_change(layer, mask)
    group, head = layer.queries.shape[1] // len(layer.keys), layer.queries.shape[1] - 1
    keys, values, held = (each[head // group] for each in (layer.keys, layer.values, mask))
    lost, changes = [], []
    for token in range(100 - loss_predictors.NUM_LAST, 100):
        logits = [
            layer.scale * float(layer.queries[token, head] @ keys[at]) for at in range(token + 1)
        ]
        weights = [np.exp(logit - max(logits)) for logit in logits]
        kept = [weight if held[at] else 0.0 for at, weight in enumerate(weights)]
        full, left = (
            sum(weight / sum(some) * values[at] for at, weight in enumerate(some))
            for some in (weights, kept)
        )
        lost.append(1 - sum(kept) / sum(weights))
        changes.append(float((left - full).norm() / full.norm()))
    assert float(evicted[head]) == pytest.approx(np.mean(lost), rel=1e-3)
    assert float(change[head]) == pytest.approx(np.mean(changes), rel=1e-3)


def test_left_out_fit_is_that_of_all_other_texts() -> None:
    rng = np.random.default_rng(0)
    x, losses = rng.random(12), rng.random(12)
    predicted = loss_predictors.left_out_fit(x[:, None], losses)
    for text in range(12):
        others = np.arange(12) != text
        slope, level = np.polyfit(x[others], losses[others], 1)
        assert predicted[text] == pytest.approx(level + slope * x[text])


def rows(num_texts: int) -> list[loss_predictors.Row]:
    """A tenth of the texts loses 0.3 at each budget, the others nothing, and `held out` knows."""
    rng, made = np.random.default_rng(3), []
    for _ in range(num_texts):
        loses = float(rng.random() < 0.1)
        row = {name: rng.random(3).tolist() for name in loss_predictors.PREDICTORS}
        row |= {name: [0.3 * loses] * 3 for name in ("loss", "first half", "second half")}
        made.append({**row, "held out": [loses] * 3, "kept": [0.5, 0.25, 0.125]})
    return made


def test_a_predictor_that_knows_saves_memory_and_one_that_does_not_saves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_predictors, "NUM_HALVES", 2)
    monkeypatch.setattr(loss_predictors, "NUM_RESAMPLES", 20)
    figures = loss_predictors.evaluated(rows(240))
    correlations = {name: each["0.25"]["rho"] for name, each in figures["spearman"].items()}
    assert correlations["held out"] == pytest.approx(1)
    assert abs(correlations["evicted attention"]) < 0.2
    promises = {name: each["0.02"] for name, each in figures["promises"].items()}
    assert promises[loss_predictors.ONE_FOR_ALL]["kept"] == 1
    assert promises["evicted attention"]["kept"] > 0.95
    for name in ("held out", loss_predictors.ALL, loss_predictors.ITSELF):
        assert promises[name]["kept"] < 0.25
        assert promises[name]["held"] == 1
    assert len(list(loss_predictors.table(figures))) == 29


def test_choices_by_threshold_stop_at_the_first_budget_that_is_predicted_to_lose_more() -> None:
    choices = list(loss_predictors.by_threshold(np.array([[0.0, 0.9, 0.0], [0.0, 0.0, 0.1]])))
    assert choices[0].tolist() == [1, 2]
    assert choices[-1].tolist() == [1, 3]


def test_at_random_takes_every_budget_in_turn() -> None:
    choices = list(loss_predictors.at_random(50))
    assert not choices[0].any()
    assert (choices[-1] == 3).all()
    assert all((after >= before).all() for before, after in pairwise(choices))
