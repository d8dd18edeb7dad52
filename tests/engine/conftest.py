"""Fixtures of the engine tests: tiny models, and a way to run scenarios."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models

ROOT = Path(__file__).parents[2]

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama(model_directory: Path) -> str:
    return str(tiny_models.build("llama", model_directory))


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a scenario (see engine_process.py) in a process of its own; returns its report."""

    def run(
        model: str,
        phases: list[list[dict[str, Any]]],
        settings: dict[str, Any] | None = None,
        record_kept: bool = False,
        environment: dict[str, str] | None = None,
        **engine: Any,
    ) -> dict[str, Any]:
        directory = tmp_path_factory.mktemp("scenario")
        scenario, report = directory / "scenario.json", directory / "report.json"
        engine = {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 512, **engine}
        scenario.write_text(
            json.dumps(
                {
                    "model": model,
                    "engine": engine,
                    "settings": settings,
                    "phases": phases,
                    "record_kept": record_kept,
                }
            )
        )
        result = subprocess.run(
            [sys.executable, "-m", "tests.engine.engine_process", str(scenario), str(report)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=240,
        )
        if not report.exists():
            pytest.fail(f"the engine ended with {result.returncode}:\n{result.stderr[-6000:]}")
        return json.loads(report.read_text())

    return run


def request(
    name: str, prompt_tokens: list[int], max_tokens: int = 16, **more: Any
) -> dict[str, Any]:
    """A request of a scenario."""
    return {"id": name, "prompt": prompt_tokens, "max_tokens": max_tokens, **more}
