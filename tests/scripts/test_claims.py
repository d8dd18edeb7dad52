"""scripts/claims.py: caches as the model has them, and its figures on numbers made by hand."""

from __future__ import annotations

import math

import pytest
import torch

import claims
from tests.cli.server_process import ROOT
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.tools.evaluation.attention_parts import attend_in_parts, projected_error
from vllm_kvcompress.tools.evaluation.dense import BLOCK_SIZE, DenseLayer, DenseModel, compress

NUM_TOKENS, CONTEXT = 300, 256


@pytest.fixture(scope="module")
def model() -> DenseModel:
    return DenseModel(str(ROOT / "models" / "reference"))


@pytest.fixture(scope="module")
def layers(model: DenseModel) -> list[DenseLayer]:
    numbers = torch.arange(NUM_TOKENS)
    return model.layers((5 + numbers * 37 % 90).tolist())


def test_layers_are_the_model_s(model: DenseModel, layers: list[DenseLayer]) -> None:
    """Attention over what was captured, behind W_O, is what the model's own module gives."""
    given = []
    handle = model.model.model.layers[1].self_attn.register_forward_hook(
        lambda module, args, output: given.append(output[0][0].float())
    )
    again = model.layers((5 + torch.arange(NUM_TOKENS) * 37 % 90).tolist())
    handle.remove()
    layer = again[1]
    assert torch.equal(layer.keys, layers[1].keys)
    everything = torch.ones(layer.keys.shape[:2], dtype=torch.bool)
    queries, positions = layer.queries * layer.scale, torch.arange(NUM_TOKENS)
    parts = attend_in_parts(queries, positions, layer.keys, layer.values, everything)
    outputs = torch.einsum("mhd,hdo->mo", parts.whole, layer.output_weight)
    assert (outputs - given[0]).norm() < 0.02 * given[0].norm(), "bfloat16"


def test_a_policy_keeps_whole_blocks_of_a_layer(layers: list[DenseLayer]) -> None:
    kept = compress(resolve("snapkv"), layers[2], CONTEXT, 0.3)
    blocks = math.ceil(0.3 * CONTEXT / BLOCK_SIZE)
    assert kept.mask.sum(dim=1).tolist() == [blocks * BLOCK_SIZE] * len(kept.mask)
    assert kept.mask[:, -BLOCK_SIZE:].all(), "snapkv keeps its window"


def test_nothing_is_lost_where_everything_is_kept(layers: list[DenseLayer]) -> None:
    """And the less is kept, the more is lost."""
    look = claims.Look(layers[2], CONTEXT)
    lost = []
    for budget in (1.0, 0.5, 0.125):
        outputs, parts = look.outputs(look.kept("snapkv", budget))
        lost.append(float(projected_error(outputs, parts, layers[2].output_weight).mean()))
    assert lost[0] < 1e-4 < lost[1] < lost[2]


def test_every_claim_has_figures_of_every_head(layers: list[DenseLayer]) -> None:
    """Finite ones; shares and cosines lie where such numbers lie."""
    look = claims.Look(layers[3], CONTEXT)
    for claim in claims.CLAIMS.values():
        found = dict(claim(look))
        assert found
        for name, figure in found.items():
            assert figure.shape in {(4,), (8,)}, name
            assert figure.isfinite().all(), name
            kind = name.partition("/")[0]
            if kind in ("gap", "estimate", "correlation", "neighbours"):
                assert figure.abs().max() <= 1.001, name
            shares = ("sigma-later", "evicted-mass", "mass", "better", "expansion-of-bound")
            if kind in shares:
                assert 0 <= figure.min() <= figure.max() <= 1.001, name


def test_rank_correlation() -> None:
    one = torch.tensor([3.0, 1.0, 2.0, 9.0])
    assert float(claims.rank_correlation(one, one.exp())) == pytest.approx(1)
    assert float(claims.rank_correlation(one, -one)) == pytest.approx(-1)
    # 1 - 6 * (1 + 1 + 0 + 0) / (4 * 15)
    other = torch.tensor([2.0, 1.0, 3.0, 9.0])
    assert float(claims.rank_correlation(one, other)) == pytest.approx(0.8)


def test_heads_that_gain_are_counted_text_by_text() -> None:
    """Two texts of one layer with four heads: 3 and 1 of 4 gain, 2 in the mean."""
    base = torch.ones(1, 4)
    with_it = [torch.tensor([[0.5, 0.5, 0.5, 2.0]]), torch.tensor([[0.5, 3.0, 1.2, 2.0]])]
    texts = [{"l1/snapkv@1": base, "l1/snapkv+criticalkv@1": gained} for gained in with_it]
    row = claims.summary(texts, [])["l1/snapkv+criticalkv@1"]
    assert row["lower than"] == "l1/snapkv@1"
    assert row["heads lower by text"] == [0.75, 0.25]
    assert row["heads lower"] == 0.5
    assert row["ratio"] == pytest.approx((3.5 + 6.7) / 8)
