"""scripts/measure/claims.py: the model's own caches, and its figures on hand-made numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import claims
from attention_parts import attend_in_parts, projected_error
from claim_parts import criticalkv, momentkv
from claim_parts.bounds import expansion_remainders
from offline.dense import BLOCK_SIZE, DenseLayer, DenseModel, compress
from offline.gathered_kv import GatheredKV
from offline.masked import MaskedModel
from tests.cli.server_process import ROOT
from vllm_kvcompress.kernels.merging.moments import (
    add_to_moments,
    corrected,
    moment_size,
)
from vllm_kvcompress.policies import resolve

NUM_TOKENS, CONTEXT = 300, 256


@pytest.fixture(scope="module")
def model() -> MaskedModel:
    return MaskedModel(str(ROOT / "models" / "reference"))


@pytest.fixture(scope="module")
def layers(model: DenseModel) -> list[DenseLayer]:
    numbers = torch.arange(NUM_TOKENS)
    return model.layers((5 + numbers * 37 % 90).tolist())


def test_captured_layers_reproduce_the_models_attention(
    model: DenseModel, layers: list[DenseLayer]
) -> None:
    """Attention over captured keys and values, projected, equals the module's output."""
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
    outputs = torch.einsum("mhd,hdo->mo", parts.full, layer.output_weight)
    assert (outputs - given[0]).norm() < 0.02 * given[0].norm(), "bfloat16"


def test_policies_keep_full_blocks_of_a_layer(layers: list[DenseLayer]) -> None:
    kept = compress(resolve("snapkv"), layers[2], CONTEXT, 0.3)
    blocks = math.ceil(0.3 * CONTEXT / BLOCK_SIZE)
    assert kept.mask.sum(dim=1).tolist() == [blocks * BLOCK_SIZE] * len(kept.mask)
    assert kept.mask[:, -BLOCK_SIZE:].all(), "snapkv keeps its window"


def test_nothing_is_lost_where_everything_is_kept(layers: list[DenseLayer]) -> None:
    """The smaller the budget, the larger the loss."""
    look = claims.Look(layers[2], CONTEXT)
    lost = []
    for budget in (1.0, 0.5, 0.125):
        outputs, parts = look.outputs(look.kept("snapkv", budget))
        lost.append(float(projected_error(outputs, parts, layers[2].output_weight).mean()))
    assert lost[0] < 1e-4 < lost[1] < lost[2]


def test_every_claim_has_figures_of_every_head(layers: list[DenseLayer]) -> None:
    """Figures are finite; shares and cosines are within their bounds."""
    look = claims.Look(layers[3], CONTEXT)
    for claim in claims.CLAIMS.values():
        figures = dict(claim(look))
        assert figures
        for name, figure in figures.items():
            assert figure.shape in {(4,), (8,)}, name
            assert figure.isfinite().all(), name
            kind = name.partition("/")[0]
            if kind in ("gap", "estimate", "correlation", "neighbours"):
                assert figure.abs().max() <= 1.001, name
            shares = (
                "sigma-later",
                "evicted-mass",
                "mass",
                "better",
                "expansion-of-bound",
                "remainder-output-of-bound",
            )
            if kind in shares:
                assert 0 <= figure.min() <= figure.max() <= 1.001, name


def test_bounds_of_table_9_are_in_order(layers: list[DenseLayer]) -> None:
    """Neither is below what is lost, and without the second stage's values it is the larger one
    where the first stage has more than half of the attention."""
    compared = 0
    for layer in layers:
        look = claims.Look(layer, CONTEXT)
        figures = dict(criticalkv.table9(look))
        for budget in ("0.2", "0.4"):
            sigma, actual, bound, relaxed = (
                figures[f"table9-{kind}/snapkv+criticalkv@{budget}"]
                for kind in ("sigma", "actual", "bound", "relaxed")
            )
            mask = criticalkv.kept_mask(look, "snapkv+criticalkv", float(budget))
            assert torch.allclose(actual, criticalkv.lost(look, mask))
            assert (actual <= bound * 1.001).all()
            assert (bound <= relaxed * 1.001)[sigma > 0.9].all()
            compared += int((bound < relaxed * 0.999)[sigma > 0.9].sum())
    assert compared


def test_equations_of_momentkv_say_what_is_there(layers: list[DenseLayer]) -> None:
    """Eq. 29 bounds the error; Eq. 31: evicted tokens have more mass than is taken; the end of
    Eq. 35, corrected, is exact, and as printed it is smaller."""
    figures = {
        name.partition("/")[0]: figure
        for name, figure in momentkv.equations(claims.Look(layers[2], CONTEXT))
    }
    assert (figures["eq29-error-of-bound"] <= 1).all()
    assert (figures["eq32-normaliser"] >= 1).all()
    assert (figures["eq35-overweight"] > 0).all()
    assert torch.allclose(figures["eq35-corrected-of-true"], torch.ones(8), atol=1e-3)
    assert (figures["eq35-printed-of-true"] < 1).all()


def test_rank_correlation_is_spearmans() -> None:
    one = torch.tensor([3.0, 1.0, 2.0, 9.0])
    assert float(claims.rank_correlation(one, one.exp())) == pytest.approx(1)
    assert float(claims.rank_correlation(one, -one)) == pytest.approx(-1)
    # 1 - 6 * (1 + 1 + 0 + 0) / (4 * 15)
    other = torch.tensor([2.0, 1.0, 3.0, 9.0])
    assert float(claims.rank_correlation(one, other)) == pytest.approx(0.8)


def test_heads_that_gain_are_counted_text_by_text() -> None:
    """Two texts of one layer with four heads: 3 and 1 of 4 gain, 2 on average."""
    base = torch.ones(1, 4)
    with_it = [torch.tensor([[0.5, 0.5, 0.5, 2.0]]), torch.tensor([[0.5, 3.0, 1.2, 2.0]])]
    texts = [{"l1/snapkv@1": base, "l1/snapkv+criticalkv@1": gained} for gained in with_it]
    row = claims.summary(texts, [])["l1/snapkv+criticalkv@1"]
    assert row["lower than"] == "l1/snapkv@1"
    assert row["heads lower by text"] == [0.75, 0.25]
    assert row["heads lower"] == 0.5
    assert row["ratio"] == pytest.approx((3.5 + 6.7) / 8)


def losing_head(seed: int) -> tuple[claims.Look, Tensor]:
    """Returns a layer of random heads with widely spread logits, and a random choice of tokens."""
    torch.manual_seed(seed)
    spread = (0.3, 1.0, 3.0)[seed % 3]
    layer = DenseLayer(
        index=0,
        num_layers=1,
        keys=spread * torch.randn(2, 70, 8),
        values=torch.randn(2, 70, 8) + torch.randn(2, 1, 8),
        queries=spread * torch.randn(70, 6, 8),
        output_weight=torch.randn(6, 8, 24),
        scale=8**-0.5,
        rotary=None,
    )
    kept = torch.rand(2, 64) < torch.rand(())
    kept[:, seed % 64] = False  # something is evicted
    return claims.Look(layer, 64), kept


@pytest.mark.parametrize("seed", range(12))
def test_no_head_loses_more_than_theta(seed: int) -> None:
    """Theorem 3.3's bound by loops; more than half of the attention may be evicted."""
    look, kept = losing_head(seed)
    bound, layer = criticalkv.theta(look, kept), look.layer
    expected = torch.zeros(2, 6)  # bounds and losses
    for head in range(6):
        for query in look.positions().tolist():
            keys, values = layer.keys[head // 3, : query + 1], layer.values[head // 3, : query + 1]
            weights = (keys @ layer.queries[query, head] * layer.scale).softmax(dim=0)
            projected = values @ layer.output_weight[head]
            stays = [j >= 64 or bool(kept[head // 3, j]) for j in range(query + 1)]
            sigma = sum(float(w) for w, stay in zip(weights, stays, strict=True) if stay)
            sizes = [float(w * v.abs().sum()) for w, v in zip(weights, projected, strict=True)]
            on_kept = sum(size for size, stay in zip(sizes, stays, strict=True) if stay)
            left = sum(weights[j] / sigma * projected[j] for j in range(query + 1) if stays[j])
            lost = (weights @ projected - left).abs().sum()
            expected[:, head] += torch.tensor([sum(sizes) - (2 - 1 / sigma) * on_kept, float(lost)])
    expected /= len(look.positions())
    assert torch.allclose(bound, expected[0], rtol=1e-4, atol=1e-3)
    assert torch.allclose(criticalkv.lost(look, kept), expected[1], rtol=1e-4, atol=1e-3)
    assert (bound >= expected[1] - 1e-3).all()


@pytest.mark.parametrize("seed", range(12))
def test_moment_expansion_stays_within_its_bounds(seed: int) -> None:
    """Numerator, normaliser and output of MomentKV's first order; the kernel gives the output."""
    look, kept = losing_head(seed)
    rows = (look.layer.keys[:, :64], look.layer.values[:, :64])
    parts = look.parts(kept)
    remainders = expansion_remainders(look.queries(), *rows, ~kept, parts)
    for kind in ("numerator", "normaliser", "output"):
        error, bound = getattr(remainders, kind), getattr(remainders, f"{kind}_bound")
        assert (error <= bound * (1 + 1e-4) + 1e-5).all(), kind
        assert (error >= 0).all()
    view = GatheredKV.of(*rows)
    moments = add_to_moments(view, torch.zeros(2, moment_size(8)), ~kept)
    by_head = [
        part.transpose(0, 1).unflatten(0, (2, 3))
        for part in (parts.kept, parts.lse, look.queries())
    ]
    outputs = corrected(*by_head, moments, 1.0)
    full = parts.full.transpose(0, 1).unflatten(0, (2, 3))
    error = (outputs - full).norm(dim=3).double()
    assert torch.allclose(error, remainders.output, rtol=1e-3, atol=1e-5)


def test_hidden_states_differ_the_more_the_less_is_kept(model: MaskedModel) -> None:
    tokens = (5 + torch.arange(NUM_TOKENS) * 37 % 90).tolist()
    rest = torch.tensor(tokens[CONTEXT:])
    figures = dict(criticalkv.hidden(model, model.layers(tokens), CONTEXT, rest))
    errors = [float(figures[f"hidden/snapkv@{budget:g}"]) for budget in (0.4, 0.1)]
    assert 0 < errors[0] < errors[1]
    assert len(figures) == 2 * len(criticalkv.BUDGETS)
