"""scripts/measure/reconstruction.py: KVzip's scores against plain loops, and its budgets."""

from __future__ import annotations

import math

import pytest
import torch

import reconstruction
from offline.dense import DenseLayer
from tests.cli.server_process import ROOT
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer

HEADS, GROUP, SIZE = 2, 3, 4


@pytest.fixture(scope="module")
def layer() -> DenseLayer:
    """A layer with 20 tokens of a context, and 9 of its repetition."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, HEADS, 29, SIZE)
    queries = torch.randn(29, HEADS * GROUP, SIZE)
    return DenseLayer(0, 1, keys, values, queries, torch.empty(0), 0.5, None)


@pytest.mark.parametrize(("start", "end"), [(0, 20), (3, 12)])
def test_score_is_the_highest_attention_of_the_repetition(
    layer: DenseLayer, start: int, end: int
) -> None:
    """Attention to a chunk, the first tokens before it, and the repetition so far."""
    scores = reconstruction.chunk_scores(layer, 20, start, end)
    for head in range(HEADS):
        best = [0.0] * (end - start)
        for member in range(GROUP):
            for at in range(20, 29):
                query = layer.queries[at, head * GROUP + member]
                seen = [*range(min(reconstruction.NUM_SINKS, start)), *range(start, end)]
                seen += range(20, at + 1)
                weights = [math.exp(0.5 * float(query @ layer.keys[head, j])) for j in seen]
                for j, weight in zip(seen, weights, strict=True):
                    if start <= j < end:
                        best[j - start] = max(best[j - start], weight / sum(weights))
        assert scores[head].tolist() == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize(
    ("shared", "dims"), [("uniform", (2,)), ("layer", (1, 2)), ("model", None)]
)
def test_budgets_are_shared_by_head_layer_or_model(
    shared: str, dims: tuple[int, ...] | None
) -> None:
    """The total is the same; the highest scores of a head, a layer or all layers stay."""
    torch.manual_seed(1)
    scores = torch.rand(3, 2, 40) * torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    masks = torch.stack([kept.mask for kept in reconstruction.choose(scores, 10, shared)])
    assert int(masks.sum()) == 3 * 2 * 10
    if dims is not None:
        assert masks.sum(dim=dims).unique().tolist() == [10 * (1 if shared == "uniform" else 2)]
        return
    assert masks.sum(dim=(1, 2)).unique().numel() > 1
    assert scores[masks].min() >= scores[~masks].max()


def test_a_long_context_is_repeated_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later chunks begin with the last tokens of the previous one, without the template."""
    monkeypatch.setattr(reconstruction, "CHUNK", 30)
    monkeypatch.setattr(reconstruction, "before_and_after", lambda tokenizer: (2, [7, 8]))
    tokenizer = load_tokenizer(str(ROOT / "models" / "reference"))
    context = list(range(100, 172))
    parts = list(reconstruction.repetitions(tokenizer, context))
    assert [start for start, _, _ in parts] == [2, 32, 62]
    assert [token for _, _, chunk in parts for token in chunk] == context[2:]
    assert all(asked[-2:] == [7, 8] for _, asked, _ in parts)
    assert parts[1][1][-10:-2] == context[24:32]


def test_needle_tokens_are_located_in_the_context() -> None:
    assert reconstruction.place([5, 1, 2, 3, 9], [1, 2, 3]) == slice(1, 4)
    assert reconstruction.place([5, 1, 2, 3, 9], [8, 2, 3]) == slice(2, 4), "behind another token"
    with pytest.raises(ValueError, match="does not hold"):
        reconstruction.place([5, 1], [2, 3])
