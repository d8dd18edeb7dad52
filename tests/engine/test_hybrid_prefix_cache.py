"""Prefix caching of models that have other attention beside the layers that are compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

PROMPT = prompt(1000, seed=1)
EVERY_BLOCK = 32  # of sliding-window layers is cached; vLLM's default is the prompt's end alone


def test_windows_computed_after_an_event_are_not_shared(
    model_directory: Path, run_engine: Run
) -> None:
    """A conversation goes on: its second turn must not read what the first computed compressed.

    The second turn puts the full-attention blocks behind the first one's event into the prefix
    cache, computed from uncompressed attention, so that the third request finds blocks of every
    group there. Those of the sliding-window layers have to be the second's too.
    """
    model = str(tiny_models.build("gemma3", model_directory))
    options: dict[str, Any] = {
        "settings": {"policy": "keydiff", "budget": 0.25},
        "prefix_cache_retention_interval": EVERY_BLOCK,
    }
    first = request("first", PROMPT, 200)
    answer = run_engine(model, [[first]], **options)["outputs"]["first"]["tokens"]
    turn = [*PROMPT, *answer, *prompt(30, seed=2)]
    phases = [[first], [request("second", turn, 8)], [request("third", turn, 8)]]
    outputs = run_engine(model, phases, **options)["outputs"]
    assert outputs["second"]["cached"] == 992, "all that the first computed before its event"
    assert outputs["third"]["cached"] == 1216
    for found, expected in zip(
        outputs["third"]["logprobs"], outputs["second"]["logprobs"], strict=True
    ):
        assert found == pytest.approx(expected, abs=1e-4)
