"""GPU workers measure heads as CPU workers do, behind the capture of CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny_models
from tests.engine.conftest import request
from tests.engine.test_measured_heads import kept_file, plain_scores
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt


@pytest.mark.parametrize(
    ("family", "runner"), [("llama", "V2"), ("llama", "V1"), ("deepseek_v2", "V2")]
)
def test_heads_are_measured_on_the_gpu_path(
    llama: str, run_gpu_path: Run, tmp_path: Path, family: str, runner: str
) -> None:
    """With asynchronous scheduling, and by the attention of plain transformers."""
    model = llama if family == "llama" else str(tiny_models.build(family, tmp_path))
    report = run_gpu_path(
        model,
        [[request("a", prompt(600, seed=1), 8)]],
        settings={"policy": "auto", "budget": 0.25, "min_answer_tokens": 0},
        runner=runner,
        asynchronous=runner == "V2",
        environment={"VLLM_CACHE_ROOT": str(tmp_path)},
    )
    scores = json.loads(kept_file(tmp_path).read_text())
    for name, values in plain_scores(model, 257, 2).items():
        assert scores[name][:2] == pytest.approx(values, abs=1e-4)
    assert report["outputs"]["a"]["cached"] == 0
    assert len(report["outputs"]["a"]["tokens"]) == 8
    assert len(report["events"]) == 1
