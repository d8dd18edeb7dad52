"""Attention over compressed pages equals dense attention over the kept tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.engine.oracle import check_decoding
from tests.tiny_models import prompt

BLOCK, LAYERS = 32, 3
MAX_TOKENS = 40
POLICIES = ("adakv+criticalkv", "adakv", "pyramidkv", "keydiff")
CASES = [(policy, num_tokens) for policy in POLICIES for num_tokens in (640, 1000)]


@pytest.fixture(scope="module")
def report(llama: str, run_engine: Run) -> dict[str, Any]:
    """Report of one request per case, one after the other."""
    phases = [
        [request(f"{policy} {size}", prompt(size, 1), MAX_TOKENS, xargs={"kv_policy": policy})]
        for policy, size in CASES
    ]
    first, *others = POLICIES
    settings = {"policy": first, "budget": 0.25, "request_policies": others}
    return run_engine(llama, phases, settings=settings, record_kept=True)


def kept_by(report: dict[str, Any], policy: str, num_tokens: int) -> list[dict[str, Any]]:
    """Returns the records of a case's event, layer by layer."""
    assert [event["policy"] for event in report["events"]] == [policy for policy, _ in CASES]
    first = LAYERS * CASES.index((policy, num_tokens))
    return report["kept"][first : first + LAYERS]


@pytest.mark.parametrize(("policy", "num_tokens"), CASES)
def test_decoding_matches_dense_attention_over_the_kept_tokens(
    llama: str, report: dict[str, Any], policy: str, num_tokens: int
) -> None:
    """Every generated token, past block boundaries, with logprobs to 2e-3."""
    output = report["outputs"][f"{policy} {num_tokens}"]
    assert len(output["tokens"]) == MAX_TOKENS
    check_decoding(llama, prompt(num_tokens, 1), kept_by(report, policy, num_tokens), output)


def test_layers_of_an_event_run_in_one_batch(report: dict[str, Any]) -> None:
    """The oracle has checked batched events, which serving uses."""
    assert report["at_once"] == LAYERS


def test_ragged_policies_keep_different_counts_per_head(report: dict[str, Any]) -> None:
    """adakv gives heads different numbers of pages, with the exact total, in every layer."""
    counts = [record["counts"] for record in kept_by(report, "adakv", 1000)]
    assert all(sum(heads) == 8 * 2 for heads in counts)
    assert any(len(set(heads)) > 1 for heads in counts)
