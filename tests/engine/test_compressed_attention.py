"""What the engine computes over compressed pages is attention over the kept tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.conftest import Run, request
from tests.engine.oracle import KeptTokensDecoder
from tests.tiny_models import prompt

BLOCK = 32
MAX_TOKENS = 40


def kept_positions(records: list[dict[str, Any]], num_layers: int) -> list[list[list[int]]]:
    """kept[layer][head] of one event, from the flat records."""
    kept: list[list[list[int]]] = []
    for record in records[:num_layers]:
        heads, start = [], 0
        for count in record["counts"]:
            heads.append(record["kept"][start : start + count * BLOCK])
            start += count * BLOCK
        kept.append(heads)
    return kept


@pytest.mark.parametrize("policy", ["adakv+criticalkv", "pyramidkv", "keydiff"])
@pytest.mark.parametrize("num_tokens", [640, 1000])
def test_decoding_matches_dense_attention_over_the_kept_tokens(
    llama: str, run_engine: Run, policy: str, num_tokens: int
) -> None:
    """Every generated token, past block boundaries, with logprobs to 2e-3."""
    tokens = prompt(num_tokens, seed=1)
    report = run_engine(
        llama,
        [[request("a", tokens, MAX_TOKENS)]],
        settings={"policy": policy, "budget": 0.25},
        record_kept=True,
    )
    kept = kept_positions(report["kept"], num_layers=3)
    num_full = num_tokens // BLOCK * BLOCK
    decoder = KeptTokensDecoder(llama, tokens, kept, num_full)
    logits = decoder.first_logits
    output = report["outputs"]["a"]
    assert len(output["tokens"]) == MAX_TOKENS
    for token, logprobs in zip(output["tokens"], output["logprobs"], strict=True):
        expected = torch.log_softmax(logits, 0)
        for candidate, logprob in logprobs.items():
            assert float(expected[int(candidate)]) == pytest.approx(logprob, abs=2e-3)
        logits = decoder.step(token)


def test_ragged_heads_really_differ(llama: str, run_engine: Run) -> None:
    """adakv gives heads different numbers of pages, with the exact total, in every layer."""
    report = run_engine(
        llama,
        [[request("a", prompt(1000, seed=1), 4)]],
        settings={"policy": "adakv", "budget": 0.25},
        record_kept=True,
    )
    counts = [record["counts"] for record in report["kept"]]
    assert len(counts) == 3
    assert all(sum(heads) == 8 * 2 for heads in counts)
    assert any(len(set(heads)) > 1 for heads in counts)
