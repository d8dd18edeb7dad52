"""The papers' own protocols in the real engine, with the settings that `serve` passes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt
from vllm_kvcompress.cli.serve import parse_request
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.rounding import ceil_div

BLOCK, HEADS, LAYERS, BUDGET = 32, 2, 3, 128


def served(policy: str) -> Settings:
    """What `serve` makes of one word."""
    flags = ["--kv-policy", policy, "--kv-trigger", "paper", "--kv-budget", str(BUDGET)]
    settings = parse_request(["model", *flags]).settings
    assert settings is not None
    return settings


def expected_events(stops: list[int]) -> list[tuple[int, int]]:
    """Entries of full blocks that heads have before events and after, where any block is freed."""
    held, position, events = 0, 0, []
    for stop in stops:
        held, position = held + stop - position, stop
        full, kept = held // BLOCK * BLOCK, ceil_div(BUDGET, BLOCK) * BLOCK
        if full > kept:
            events.append((full, kept))
            held -= full - kept
    return events


def events_of(llama: str, run_engine: Run, policy: str, size: int, generated: int) -> list[Any]:
    """The layers' records of each event of one request."""
    report = run_engine(
        llama,
        [[request("a", prompt(size, seed=1), generated)]],
        settings=served(policy).to_dict(),
        record_kept=True,
    )
    return [report["kept"][i : i + LAYERS] for i in range(0, len(report["kept"]), LAYERS)]


def test_keydiff_compresses_every_128_tokens_and_while_it_generates(
    llama: str, run_engine: Run
) -> None:
    """Every 16 generated tokens, where a block is full."""
    events = events_of(llama, run_engine, "keydiff", 300, 70)
    expected = expected_events([128, 256, 300, 316, 332, 348, 364])
    assert len(events) == len(expected)
    for event, (full, kept) in zip(events, expected, strict=True):
        for record in event:
            assert record["source"] == [full] * HEADS
            assert [count * BLOCK for count in record["counts"]] == [kept] * HEADS


def test_kvslimmer_merges_every_512_tokens(llama: str, run_engine: Run) -> None:
    """And at the prompt's end; what is left stands for every token of the full blocks so far."""
    stops = [512, 1024, 1300]
    for event, stop in zip(events_of(llama, run_engine, "kvslimmer", 1300, 4), stops, strict=True):
        for record in event:
            assert sum(record["counts"]) * BLOCK <= HEADS * BUDGET  # and the policy state beside
            for tokens in record["tokens"]:
                assert sum(tokens) == pytest.approx(stop // BLOCK * BLOCK, abs=0.1)
