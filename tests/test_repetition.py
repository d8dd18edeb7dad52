"""Profiles by repetition: scores against plain loops, shares of heads, files that fit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.test_profiler import make_model, make_tokenizer, run_command
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.tools import repetition
from vllm_kvcompress.tools.evaluation.dense import DenseLayer, DenseModel
from vllm_kvcompress.tools.profiler import ProfileSettings

HEADS, GROUP, SIZE = 2, 3, 4


@pytest.fixture(scope="module")
def layer() -> DenseLayer:
    """20 tokens of a context, and 9 of its repetition."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, HEADS, 29, SIZE)
    queries = torch.randn(29, HEADS * GROUP, SIZE)
    return DenseLayer(0, 1, keys, values, queries, torch.empty(0), 0.5, None)


@pytest.mark.parametrize(("start", "end"), [(0, 20), (3, 12)])
def test_a_score_is_the_highest_attention_of_the_repetition(
    layer: DenseLayer, start: int, end: int
) -> None:
    """To a chunk, the first tokens before it, and what of the repetition a query may see."""
    found = repetition.chunk_scores(layer, 20, start, end)
    for head in range(HEADS):
        best = [0.0] * (end - start)
        for member in range(GROUP):
            for at in range(20, 29):
                query = layer.queries[at, head * GROUP + member]
                seen = [*range(min(repetition.NUM_SINKS, start)), *range(start, end)]
                seen += range(20, at + 1)
                weights = [math.exp(0.5 * float(query @ layer.keys[head, j])) for j in seen]
                for j, weight in zip(seen, weights, strict=True):
                    if start <= j < end:
                        best[j - start] = max(best[j - start], weight / sum(weights))
        assert found[head].tolist() == pytest.approx(best, rel=1e-4)


def test_shares_are_those_of_the_best_half() -> None:
    """Of eight scores four count: both of the first head, one of the second and of the last."""
    scores = torch.tensor([[[0.9, 0.8], [0.7, 0.1]], [[0.2, 0.3], [0.0, 0.6]]])
    assert repetition.best_shares(scores).tolist() == [[1.0, 0.5], [0.0, 0.5]]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def test_heads_are_scored_by_what_the_model_repeats(saved_model: Path) -> None:
    """The text stands twice; query heads have their KV head's share, by text, of the best half."""
    model, settings = DenseModel(str(saved_model), torch.float32), ProfileSettings(2, 24)
    tokenizer = make_tokenizer()
    scores = repetition.measure_heads(model, tokenizer, settings)
    for number in range(2):
        text = repetition.text_tokens(tokenizer, settings, number)
        before, reply = repetition.template(tokenizer)
        asked = tokenizer(repetition.REQUEST, add_special_tokens=False)["input_ids"]
        layers = model.layers([*before, *text, *asked, *reply, *text])
        begin, end = len(before), len(before) + len(text)
        rows = [
            repetition.chunk_scores(layer, end, begin, end)[head].tolist()
            for layer in layers
            for head in range(2)
        ]
        limit = sorted((x for row in rows for x in row), reverse=True)[2 * len(text) - 1]
        expected = [sum(x >= limit for x in row) / len(row) for row in rows]
        found = [scores[layer][head][number] for layer in range(2) for head in (0, 2)]
        assert found == pytest.approx(expected, abs=1.1 / len(text))
        assert all(scores[layer][0] == scores[layer][1] for layer in range(2))


def test_what_is_written_serves_auto(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "heads.json"
    arguments = ["--kind", "headkv", "--out", str(out), "--length", "48", "--samples", "2"]
    assert run_command(str(saved_model), *arguments) == 0
    assert f"--kv-policy auto --kv-profile {out}" in capsys.readouterr().out
    assert all(len(scores) == 2 for scores in json.loads(out.read_text()).values())
    resolve("spans+headkv", {}, out).bind(2, 2, 4, 16)


def test_texts_that_do_not_fit_twice_are_refused(saved_model: Path, tmp_path: Path) -> None:
    arguments = ["--kind", "headkv", "--out", str(tmp_path / "x"), "--length", "300"]
    with pytest.raises(ConfigError, match="--length 300: expected texts that fit twice into"):
        run_command(str(saved_model), *arguments)
