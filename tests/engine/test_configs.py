"""Every file of configs/ starts the engine, as far as a CPU can, and does what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt
from vllm_kvcompress.cli.main import main

CONFIGS = Path(__file__).parents[2] / "configs"
SMALLER = ["--max-model-len", "8192", "--dtype", "float32"]  # for a tiny model
LONG = [request("long", prompt(5000, seed=1), 4)]
SHORT = [request(name, prompt(600, seed), 90) for seed, name in enumerate("abcd")]
DOCUMENT = {"kv_context_tokens": 640}
QUESTIONS = [
    [request(f"q{seed}", prompt(640, 1) + prompt(30, seed), 4, xargs=DOCUMENT)] for seed in (2, 3)
]
# What is asked, what it shows, and what else the engine is told.
CASES: dict[str, tuple[list[Any], dict[str, int], dict[str, Any]]] = {
    "cpu": ([LONG], {"prompt": 1}, {}),
    "single-gpu": ([LONG], {"prompt": 1}, {}),
    "tensor-parallel": ([LONG], {"prompt": 1}, {"distributed_executor_backend": "mp"}),
    # 160 blocks do not hold its 5,000 tokens while they are read.
    "long-context-chunk": ([LONG], {"chunk": 1}, {"num_gpu_blocks_override": 400}),
    "many-users": ([SHORT], {"pressure": 1}, {"num_gpu_blocks_override": 70}),
    "shared-documents": (QUESTIONS, {"prompt": 1}, {}),
}


def test_every_file_is_tried() -> None:
    assert sorted(CASES) == sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_serves(
    name: str, llama: str, run_engine: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", llama, "--config", str(CONFIGS / f"{name}.yaml"), *SMALLER]
    assert main([*arguments, "--print-vllm-command=ray"]) == 0
    engine = yaml.safe_load(capsys.readouterr().out)["engine_kwargs"]
    phases, expected, more = CASES[name]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "parallel" in name else {}
    report = run_engine(llama, phases, environment=environment, **engine, **more)
    triggers = {event["trigger"] for event in report["events"]}
    assert triggers == set(expected)
    assert report["contexts_reused"] == (1 if name == "shared-documents" else 0)
