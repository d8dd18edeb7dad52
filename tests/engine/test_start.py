"""An engine that was told to compress does not start without our worker and scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.engine.test_refusals import SETTINGS, engine_config
from tests.tiny_models import prompt
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.api_server.stat_logger import CompressionStatLogger
from vllm_kvcompress.vllm_plugin.scheduler_side.scheduler import CompressionScheduler
from vllm_kvcompress.vllm_plugin.startup.refusals import check_engine
from vllm_kvcompress.vllm_plugin.worker_side.cpu_worker import CompressionCPUWorker

PLUGIN = "vllm_kvcompress.vllm_plugin"


class OperatorsScheduler(CompressionScheduler):
    """A scheduler that an operator derives from ours."""


class OperatorsWorker(CompressionCPUWorker):
    """A worker that an operator derives from ours."""


LEFT_OUT = [
    pytest.param(
        {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
        "--worker-cls is vllm.v1.worker.cpu_worker.CPUWorker, so nothing would be compressed; add "
        f"--worker-cls {PLUGIN}.worker_side.cpu_worker.CompressionCPUWorker",
        id="worker",
    ),
    pytest.param(
        {"scheduler_cls": None},
        "--scheduler-cls is not given, so nothing would be compressed; add "
        f"--scheduler-cls {PLUGIN}.scheduler_side.scheduler.CompressionScheduler",
        id="scheduler",
    ),
]
BOTH_LEFT_OUT = pytest.param(
    {"worker_cls": "auto", "scheduler_cls": None}, "--scheduler-cls is not given", id="both"
)
PHASES = [[request("a", prompt(200, seed=1), 2)]]


@pytest.mark.parametrize(("classes", "reason"), LEFT_OUT)
def test_engine_without_our_worker_or_scheduler_does_not_start(
    llama: str, run_engine: Run, classes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        run_engine(llama, PHASES, settings=SETTINGS, **classes)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("classes", "reason"), [*LEFT_OUT, BOTH_LEFT_OUT])
def test_stat_logger_refuses_a_missing_worker_or_scheduler(
    llama: str, classes: dict[str, Any], reason: str
) -> None:
    """In the API process: plain `vllm serve` with settings alone would compress nothing."""
    with pytest.raises(UnsupportedError) as caught:
        CompressionStatLogger(engine_config(llama, SETTINGS, **classes), [0])
    assert reason in str(caught.value)


def test_class_path_that_cannot_be_imported_is_refused(llama: str) -> None:
    config = engine_config(llama, SETTINGS, worker_cls="nowhere.Worker")
    with pytest.raises(UnsupportedError, match=r"nowhere\.Worker cannot be imported.*such as"):
        check_engine(config)


def test_without_compression_no_class_is_required(llama: str) -> None:
    for settings in (None, {"policy": "none"}, {"policy": "adakv", "budget": 1.0}):
        check_engine(engine_config(llama, settings, scheduler_cls=None))


def test_subclasses_of_our_classes_serve(llama: str, run_engine: Run) -> None:
    report = run_engine(
        llama,
        PHASES,
        settings=SETTINGS,
        scheduler_cls=f"{__name__}.OperatorsScheduler",
        worker_cls=f"{__name__}.OperatorsWorker",
    )
    assert len(report["events"]) == 1
