"""Off, or with a budget of 1.0, the engine is stock vLLM, token for token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt


def mixed_batch() -> list[list[dict[str, Any]]]:
    """Short, long, chunked and sharing prefixes; then one of them once more."""
    shared = prompt(200, seed=9)
    first = [
        request("long", prompt(1500, seed=1), 24),
        request("short", prompt(5, seed=2), 24),
        request("medium", prompt(300, seed=3), 24),
        request("shared-1", shared + prompt(150, seed=4), 24, at_step=2),
        request("shared-2", shared + prompt(77, seed=5), 24, at_step=4),
        request("late", prompt(640, seed=6), 24, at_step=6),
    ]
    return [first, [request("again", prompt(1500, seed=1), 24)]]


@pytest.fixture(scope="module")
def stock(llama: str, run_engine: Run) -> dict[str, Any]:
    return run_engine(llama, mixed_batch())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"policy": "none", "budget": 0.25}, id="off"),
        pytest.param({"policy": "adakv+criticalkv", "budget": 1.0}, id="budget-1.0"),
        pytest.param({"policy": "snapkv", "budget": 100_000}, id="budget-above-every-prompt"),
        pytest.param({"policy": "snapkv", "budget": 0.25, "min_tokens": 9999}, id="min-tokens"),
    ],
)
def test_outputs_are_those_of_stock_vllm(
    llama: str, run_engine: Run, stock: dict[str, Any], settings: dict[str, Any]
) -> None:
    report = run_engine(llama, mixed_batch(), settings=settings)
    for name, expected in stock["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name
        assert report["outputs"][name]["cached"] == expected["cached"], name
        first, expected_first = (o["logprobs"][0] for o in (report["outputs"][name], expected))
        assert first == pytest.approx(expected_first, abs=1e-5)


def test_first_bf16_prompt_may_be_short(llama: str, run_engine: Run) -> None:
    """vLLM's bf16 attention ends a process that was not allowed to use AMX, where there is AMX."""
    report = run_engine(
        llama,
        [[request("short", prompt(4, seed=1), 4)]],
        settings={"policy": "snapkv", "budget": 0.25},
        dtype="bfloat16",
    )
    assert len(report["outputs"]["short"]["tokens"]) == 4
