"""scripts/measure/true_gradients.py: gradients of the loss, and keys merged by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import true_gradients
from offline.gradients import GradientModel, merge_pairs, pair_cosines
from tests.cli.server_process import ROOT
from vllm_kvcompress.kernels.common.rotary import Rotary

MODEL = str(ROOT / "models" / "reference")
TOKENS = (torch.arange(330) * 7 % 90 + 5).tolist()
NUM_TOKENS, CHUNK = 300, 40


def loss(model: GradientModel, layers: list) -> float:
    """Loss of the chunk's tokens behind a cache of the others."""
    begin = NUM_TOKENS - CHUNK
    before = [
        replace(each, keys=each.keys[:, :begin], values=each.values[:, :begin]) for each in layers
    ]
    logits = model.logits(before, None, torch.tensor(TOKENS[begin:NUM_TOKENS]))
    said = torch.tensor(TOKENS[begin + 1 : NUM_TOKENS])
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), said, reduction="sum"))


@pytest.mark.parametrize("layer", [0, 2])
def test_gradients_are_how_the_loss_changes_with_a_cached_key(layer: int) -> None:
    model = GradientModel(MODEL, torch.float32)
    layers = model.layers(TOKENS[:NUM_TOKENS])
    gradients, slopes = model.gradients(layers, TOKENS[:NUM_TOKENS], CHUNK)
    assert slopes[layer].shape == (CHUNK, *layers[layer].queries.shape[1:])
    keys = layers[layer].keys
    assert gradients[layer].shape == keys.shape
    step = torch.zeros_like(keys)
    generator = torch.Generator().manual_seed(layer)
    step[:, : NUM_TOKENS - CHUNK] = torch.randn(step[:, :-CHUNK].shape, generator=generator)
    losses = []
    for sign in (-1e-2, 1e-2):
        moved = list(layers)
        moved[layer] = replace(layers[layer], keys=keys + sign * step)
        losses.append(loss(model, moved))
    slope = (losses[1] - losses[0]) / 2e-2
    expected = float((gradients[layer] * step).sum())
    assert abs(expected) > 1e-2
    assert slope == pytest.approx(expected, rel=0.02)
    assert gradients[layer][:, -CHUNK:].abs().sum() > 0


def test_merged_keys_are_weighted_by_squared_gradients_before_rotation() -> None:
    """0 and 1 merge, then 2 joins them; 4, of which nothing is known, and 3 are averaged."""
    generator = torch.Generator().manual_seed(1)
    frequencies, size = [1.0, 0.2], 4
    rotary = Rotary(torch.tensor(frequencies))
    keys, slopes = torch.randn(2, 1, 5, size, generator=generator)
    slopes[0, 3:] = 0
    joined = torch.tensor([[0, 1, 2, 0, 1]])
    merged = merge_pairs(keys, slopes, joined, rotary)[0]

    def unrotated(row: torch.Tensor, position: int) -> list[float]:
        result = [0.0] * size
        for pair, frequency in enumerate(frequencies):
            turn = torch.polar(torch.tensor(1.0), torch.tensor(-frequency * position))
            number = torch.complex(row[pair], row[pair + 2]) * turn
            result[pair], result[pair + 2] = float(number.real), float(number.imag)
        return result

    plain = [unrotated(row, j) for j, row in enumerate(keys[0])]
    slope = [unrotated(row, j) for j, row in enumerate(slopes[0])]
    for d in range(size):
        weights = [slope[0][d] ** 2, slope[1][d] ** 2]
        first = (weights[0] * plain[0][d] + weights[1] * plain[1][d]) / sum(weights)
        weights = [(slope[0][d] + slope[1][d]) ** 2, slope[2][d] ** 2]
        both = (weights[0] * first + weights[1] * plain[2][d]) / sum(weights)
        assert float(merged[0, d]) == pytest.approx(both, abs=1e-4)
        assert float(merged[3, d]) == pytest.approx((plain[3][d] + plain[4][d]) / 2, abs=1e-5)


def test_cosines_are_those_of_the_loop() -> None:
    model = GradientModel(MODEL, torch.float32)
    layer = model.layers(TOKENS[:NUM_TOKENS])[1]
    slopes = torch.randn(
        CHUNK, *layer.queries.shape[1:], generator=torch.Generator().manual_seed(1)
    )
    own, both = pair_cosines(layer, slopes, stride=20)
    group, begin = slopes.shape[1] // len(layer.keys), NUM_TOKENS - CHUNK
    for head, at, entry in ((0, 0, 7), (3, 20, 100)):
        end = begin + at + 1
        keys, values = layer.keys[head // group, :end], layer.values[head // group, :end]
        weights = torch.softmax(keys @ layer.queries[begin + at, head] * layer.scale, dim=0)
        rest = values - weights @ values
        slope, pair = slopes[at, head], -(rest[entry] + rest[entry + 1])
        for actual, term in ((own, rest[entry]), (both, pair)):
            cosine = torch.nn.functional.cosine_similarity(slope, term, dim=0)
            assert float(actual[head, at // 20, entry]) == pytest.approx(float(cosine), abs=1e-3)


def test_a_text_is_measured_with_all_three_weights(capsys: pytest.CaptureFixture[str]) -> None:
    model = GradientModel(MODEL, torch.float32)
    row = true_gradients.measure(model, TOKENS[:NUM_TOKENS], TOKENS[NUM_TOKENS:], [0.3])
    names = [f"{name}@0.3" for name in (true_gradients.TRUE, *true_gradients.POLICIES)]
    assert len({round(row[name], 6) for name in names}) == 3
    assert row["bytes"] > 0
    true_gradients.print_table([row, row], [0.3])
    said = capsys.readouterr().out
    assert "kept for the way back" in said
    assert said.count("\n| ") == len(names)
