"""Whole decode steps as CUDA graphs replay them, which run no Python of a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import request
from tests.gpu_path.conftest import Run
from tests.gpu_path.graphs import SIZES
from tests.tiny_models import prompt

LAYERS = 3  # of the model, each of which launches what is left without Python
OWN = {"attention": "own", "budget": 0.3}
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0}}
POLICIES = {
    "decode": {**OWN, "policy": "snapkv", "trigger": "prompt,decode:8"},
    "pressure": {**OWN, "policy": "snapkv", "trigger": "pressure:0.5"},
}
FEW_BLOCKS = {"pressure": {"num_gpu_blocks_override": 60, "max_model_len": 700}}


def requests() -> list[list[dict[str, Any]]]:
    """They join and leave, up to more than are captured; some stay uncompressed."""
    return [
        [
            request("long", prompt(500, seed=1), 40),
            request("short", prompt(5, seed=2), 30),
            request("late", prompt(300, seed=3), 20, at_step=8),
            request("later", prompt(200, seed=4), 12, at_step=16),
            request("last", prompt(40, seed=5), 6, at_step=18),
        ]
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_replays_are_the_steps_that_they_stand_for(
    llama: str, run_gpu_path: Run, name: str
) -> None:
    settings, how = POLICIES[name], FEW_BLOCKS.get(name, {})

    def run(probe: str, **more: Any) -> dict[str, Any]:
        probes = [f"tests.gpu_path.graphs:{probe}"]
        return run_gpu_path(
            llama, requests(), settings, record_kept=True, probes=probes, **how, **more
        )

    expected, report = run("count_steps"), run("captured", **GRAPHS)
    for request_id, output in expected["outputs"].items():
        assert report["outputs"][request_id]["tokens"] == output["tokens"], request_id
    assert [event["kept"] for event in report["kept"]] == [e["kept"] for e in expected["kept"]]
    steps, ran = dict(report["steps"]), expected["steps"]
    replays = sum(report["replays"].values())
    assert {int(size) for size in report["replays"]} == set(SIZES)
    assert replays == steps["decodes"] - steps.pop("in Python") >= 20
    assert steps["decodes"] == ran.pop("in Python")
    assert steps == ran
    assert min(steps.values()) > 0
    assert report["launches"] == dict.fromkeys(report["launches"], LAYERS)
    assert len(report["launches"]) == 3
    assert report["free_at_end"] == report["num_blocks"] - 1
