"""Batch invariance: a prompt's output depends neither on its batch nor on its chunks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, check_as_alone, each_alone, request
from tests.tiny_models import prompt

PROMPTS = {f"r{i}": prompt(n, seed=i) for i, n in enumerate([1000, 40, 300, 1337, 64, 700])}


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
def test_output_is_the_same_alone_batched_chunked_and_from_the_prefix_cache(
    llama: str, run_engine: Run, settings: dict[str, Any]
) -> None:
    """Chunks are so small that they cut observation windows in two."""
    together = [request(n, p, 40, at_step=i) for i, (n, p) in enumerate(PROMPTS.items())]
    again = [request(f"{n}-again", p, 40) for n, p in PROMPTS.items()]
    report = run_engine(
        llama,
        [*each_alone(together), together, again],
        settings=settings,
        max_num_batched_tokens=210,
    )
    outputs = report["outputs"]
    check_as_alone(outputs, PROMPTS)
    for name in PROMPTS:
        assert outputs[f"{name}-again"]["tokens"] == outputs[name]["tokens"], name
    assert outputs["r0-again"]["cached"] > 0
