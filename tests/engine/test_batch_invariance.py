"""The same prompt gives the same tokens, whatever it is batched with and however it is cut."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

PROMPTS = {f"r{i}": prompt(n, seed=i) for i, n in enumerate([1000, 40, 300, 1337, 64, 700])}


def tokens_of(report: dict[str, Any]) -> dict[str, list[int]]:
    return {name: output["tokens"] for name, output in report["outputs"].items()}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"policy": "adakv+criticalkv", "budget": 0.25}, id="prompt"),
        pytest.param({"policy": "snapkv", "budget": 128, "trigger": "chunk:256"}, id="chunk"),
        pytest.param(
            {"policy": "adakv", "budget": 0.5, "trigger": "prompt,decode:16"}, id="decode"
        ),
    ],
)
def test_together_as_alone_and_however_chunked(
    llama: str, run_engine: Run, settings: dict[str, Any]
) -> None:
    """One at a time, all at once, in small chunks that cut windows in two, and from the cache."""
    alone = run_engine(llama, [[request(n, p, 40)] for n, p in PROMPTS.items()], settings=settings)
    together = run_engine(
        llama,
        [
            [request(n, p, 40, at_step=i) for i, (n, p) in enumerate(PROMPTS.items())],
            [request(f"{n}-again", p, 40) for n, p in PROMPTS.items()],
        ],
        settings=settings,
        max_num_batched_tokens=210,
    )
    expected, found = tokens_of(alone), tokens_of(together)
    for name in PROMPTS:
        assert found[name] == expected[name], name
        assert found[f"{name}-again"] == expected[name], name
    assert together["outputs"]["r0-again"]["cached"] > 0
