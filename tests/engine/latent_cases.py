"""Requests to an MLA model, and what must hold of their outputs on CPUs and on the GPU path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.conftest import request
from tests.engine.latent_oracle import (
    BLOCK,
    LatentDecoder,
    check_decoding,
    check_logits,
    records,
)
from tests.tiny_models import prompt

LONG, SHORT, MIDDLE = prompt(700, seed=1), prompt(50, seed=2), prompt(300, seed=3)
CONTEXT = 640  # tokens of the long prompt that a request names as its context
TOGETHER = [request("long", LONG), request("short", SHORT, at_step=2), request("mid", MIDDLE)]
WHOLE = [{**one, "id": f"whole {one['id']}", "xargs": {"kv_budget": 1.0}} for one in TOGETHER]
NAMED = request("named", LONG, xargs={"kv_context_tokens": CONTEXT})


def settings_for(policies: Sequence[str]) -> dict[str, Any]:
    """Settings under which requests choose one of the policies, or a budget."""
    return {
        "policy": "snapkv",
        "budget": 0.25,
        "trigger": ["prompt", "decode:32"],
        "request_policies": policies,
        "min_request_budget": 0.25,
        "max_request_budget": 1.0,
    }


def check_stock(output: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that tokens and log-probabilities are those of stock."""
    assert output["tokens"] == expected["tokens"]
    for ours, theirs in zip(output["logprobs"], expected["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def check_quarter(report: dict[str, Any], stock: dict[str, Any], num_alone: int) -> None:
    """Asserts that a quarter stays behind stock's first token, beside others and alone.

    Args:
        report: of `TOGETHER` behind the long prompt alone, `num_alone` times by policy.
        stock: outputs of stock vLLM.
        num_alone: policies.
    """
    output = report["outputs"]["long"]
    assert output["tokens"][0] == stock["long"]["tokens"][0]
    assert output["tokens"] != stock["long"]["tokens"]
    assert report["outputs"]["short"]["tokens"] == stock["short"]["tokens"]
    assert output["tokens"] == report["outputs"]["snapkv"]["tokens"], "together = alone"
    for event in report["events"][:num_alone]:
        assert (event["blocks_freed"], event["blocks_written"]) == (43, 11)
    assert report["free_at_end"] == report["num_blocks"] - 1


def check_kept_rows(model: str, report: dict[str, Any], policy: str, number: int) -> None:
    """Asserts that the policy's request, whose event has this number, reads what that kept."""
    kept, output = records(report, number), report["outputs"][policy]
    assert all(9 * BLOCK <= len(set(rows)) == len(rows) <= 11 * BLOCK for rows in kept)  # + state
    decoder = LatentDecoder(model, LONG, kept, len(LONG) // BLOCK * BLOCK)
    check_logits(decoder.first_logits, output["logprobs"][0], 0)
    check_decoding(decoder, report, policy, {})


def check_named_context(model: str, report: dict[str, Any], first: int) -> None:
    """Asserts that the rest of a prompt reads the kept rows of the context that it names.

    The rest has an event, too, so that its chunks are behind two contexts; `first` is the number
    of the context's event.
    """
    decoder = LatentDecoder(model, LONG[:CONTEXT], records(report, first), CONTEXT)
    events = {CONTEXT + 32 * n: records(report, first + n) for n in (1, 2)}
    check_decoding(decoder, report, "named", events)
