"""What the engine computes over compressed pages is attention over the kept tokens."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Run, request
from tests.engine.oracle import check_decoding
from tests.tiny_models import prompt

BLOCK = 32
MAX_TOKENS = 40


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
    assert len(report["outputs"]["a"]["tokens"]) == MAX_TOKENS
    check_decoding(llama, tokens, report["kept"], report["outputs"]["a"])


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
