"""Every file of configs/ starts an engine on a CPU and fires its trigger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt
from vllm_kvcompress.cli.main import main

CONFIGS = Path(__file__).parents[2] / "configs"
LONG, SHORTER = [request("a", prompt(5000, seed=1), 4)], [request("a", prompt(900, seed=1), 4)]
SHORT = [request(name, prompt(600, seed), 90) for seed, name in enumerate("abcd")]
DOCUMENT = {"kv_context_tokens": 640}
QUESTIONS = [
    [request(f"q{seed}", prompt(640, 1) + prompt(30, seed), 4, xargs=DOCUMENT)] for seed in (2, 3)
]
# What is asked, the trigger of the events that follow, and how the engine differs from the file.
CASES: dict[str, tuple[list[Any], str, dict[str, int]]] = {
    "cpu": ([SHORTER], "prompt", {}),
    "single-gpu": ([SHORTER], "prompt", {}),
    "long-context-chunk": ([LONG], "chunk", {"max_model_len": 8192}),
    "paper": ([LONG], "chunk", {"max_model_len": 8192}),
    "many-users": ([SHORT], "pressure", {"num_gpu_blocks_override": 70, "max_model_len": 1024}),
    "shared-documents": (QUESTIONS, "prompt", {}),
}
WITH_TWO_RANKS = ["tensor-parallel"]  # test_families.py starts it


def test_every_configuration_file_is_tested() -> None:
    assert sorted([*CASES, *WITH_TWO_RANKS]) == sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("name", CASES)
def test_configuration_serves_with_its_trigger(
    name: str, llama: str, run_engine: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", llama, "--config", str(CONFIGS / f"{name}.yaml"), "--dtype", "float32"]
    assert main([*arguments, "--print-vllm-command=ray"]) == 0
    engine = yaml.safe_load(capsys.readouterr().out)["engine_kwargs"]
    phases, trigger, smaller = CASES[name]
    report = run_engine(llama, phases, **{**engine, "max_model_len": 2048, **smaller})
    assert {event["trigger"] for event in report["events"]} == {trigger}
    assert report["contexts_reused"] == (1 if name == "shared-documents" else 0)
