"""Speculative decoding with model runner V2, whose drafts come from a kernel of vLLM's."""

from __future__ import annotations

from typing import Any

from tests.engine.conftest import request
from tests.engine.test_speculation import CHECKED, NGRAM, NOTED
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt


def test_outputs_are_those_without_drafts(llama: str, run_gpu_path: Run) -> None:
    requests = [request("a", prompt(170, seed=1), 36)]
    given: dict[str, Any] = {
        "settings": {"policy": "adakv", "budget": 0.25, "trigger": "chunk:64,decode:12"},
        "asynchronous": False,  # as vLLM decides by itself
        "probes": [NOTED],
        "environment": CHECKED,
    }
    plain = run_gpu_path(llama, [requests], **given)
    report = run_gpu_path(llama, [requests], speculative_config=NGRAM, **given)
    assert 0 < report["drafts"][1] < report["drafts"][0]
    assert sorted(report["positions"]) == sorted(plain["positions"])
    for name, expected in plain["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name
