"""Prefix caching of models that have other attention beside the layers that are compressed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.scheduler_side.scheduler import CompressionMixin

PROMPT = prompt(1000, seed=1)
# Tokens between which every block of the sliding windows is cached; vLLM's default is 0, for the
# prompt's last ones alone. Of attention within chunks all blocks are.
EVERY_BLOCK = {"gemma3": 32, "llama4": 0}


@pytest.mark.parametrize("family", ["gemma3", "llama4"])
def test_blocks_computed_after_an_event_are_not_shared(
    model_directory: Path, run_engine: Run, family: str
) -> None:
    """A second turn must not hit blocks that the first computed after its event.

    The second turn puts the full-attention blocks behind the first one's event into the prefix
    cache, computed from uncompressed attention, so that the third request finds blocks of every
    group there. Those of the sliding windows, or of chunks, have to be the second's too.
    """
    model = str(tiny_models.build(family, model_directory))
    options: dict[str, Any] = {
        "settings": {"policy": "keydiff", "budget": 0.25},
        "prefix_cache_retention_interval": EVERY_BLOCK[family],
    }
    turn = [request(name, prompt(10, seed=2), 8, follows="first") for name in ("second", "third")]
    phases = [[request("first", PROMPT, 200)], *([each] for each in turn)]
    outputs = run_engine(model, phases, **options)["outputs"]
    assert outputs["second"]["cached"] == 992, "all that the first computed before its event"
    assert outputs["third"]["cached"] == 1184, "a part of it the first had computed too"
    for logprobs, expected in zip(
        outputs["third"]["logprobs"], outputs["second"]["logprobs"], strict=True
    ):
        assert logprobs == pytest.approx(expected, abs=1e-4)


class Managers(CompressionMixin):
    """A scheduler reduced to its look at block managers."""

    def __init__(self) -> None:
        self.table = None


def test_groups_whose_prefix_hits_cannot_be_limited_are_refused() -> None:
    managers = Managers()
    other = SimpleNamespace(enable_caching=True, kv_cache_spec=SimpleNamespace())
    with pytest.raises(UnsupportedError, match="add --no-enable-prefix-caching"):
        managers._share_table(other)
    other.enable_caching = False
    managers._share_table(other)
