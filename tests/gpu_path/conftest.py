"""Runs scenarios of the engine tests on the GPU path."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Files, Run, run_engine  # noqa: F401
from tests.gpu_path.stand_ins import taken_for_cuda
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options

STOCK = {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}
ROOT = Path(__file__).parents[2]


def cuda_options(settings: dict[str, Any]) -> dict[str, Any]:
    """What `serve` passes to vLLM on CUDA for these settings."""
    with taken_for_cuda():
        options: dict[str, Any] = plugin_options(Settings.from_dict(settings))
    return options | {"logits_processors": [options["logits_processors"]]}


@pytest.fixture(scope="session")
def host() -> Iterator[subprocess.Popen[str]]:
    """The process of host.py, started once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu_path.host"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            break
    else:
        pytest.fail(f"the host ended with {process.wait()}")
    yield process
    process.communicate(timeout=300)


@pytest.fixture(scope="session")
def run_gpu_path(host: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a scenario (see tests/engine/engine_process.py); returns its report.

    Args of what it returns:
        model, phases, settings, record_kept: of the scenario.
        asynchronous: schedule the next step while one runs.
        runner: vLLM's model runner, V1 or V2.
        kernels: of vLLM's attention, see host.py.
        environment: further variables.
        probes: functions of probes.py, or of another module that is named: module:function.
        calls: of the scenario.
        engine: keyword arguments of vllm.LLM.
    """

    def run(
        model: str,
        phases: list[list[dict[str, Any]]],
        settings: dict[str, Any] | None = None,
        record_kept: bool = False,
        asynchronous: bool = True,
        runner: str = "V2",
        kernels: str = "torch",
        environment: dict[str, str] | None = None,
        probes: list[str] | None = None,
        calls: list[Any] | None = None,
        **engine: Any,
    ) -> dict[str, Any]:
        files = Files.of(tmp_path_factory.mktemp("scenario"))
        engine = {
            "num_gpu_blocks_override": 400,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            **(STOCK if settings is None else cuda_options(settings)),
            **engine,
        }
        files.write(
            model=model,
            engine=engine,
            settings=settings,
            phases=phases,
            record_kept=record_kept,
            asynchronous=asynchronous,
            probes=[
                name if ":" in name else f"tests.gpu_path.probes:{name}" for name in probes or ()
            ],
            calls=calls or [],
        )
        variables = {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2")),
            **(environment or {}),
        }
        call = [*map(str, files), variables, kernels]
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdin.write(json.dumps(call) + "\n")
        host.stdin.flush()
        return files.read(host.stdout.readline().strip())

    return run
