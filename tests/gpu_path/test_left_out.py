"""On either model runner, an engine that lacks one of our classes does not start."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import request
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt

SETTINGS = {"policy": "adakv", "budget": 0.25}
STOCK_WORKER = "vllm.v1.worker.gpu_worker.Worker"
STOCK_SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        # Nobody has registered the backend that would be asked for.
        ({"worker_cls": STOCK_WORKER, "attention_backend": None}, "--worker-cls"),
        ({"scheduler_cls": STOCK_SCHEDULER}, "--scheduler-cls"),
    ],
    ids=["worker", "scheduler"],
)
def test_a_class_that_was_left_out_is_named(
    llama: str, run_gpu_path: Run, runner: str, given: dict[str, Any], named: str
) -> None:
    """By the scheduler, or by the worker, whichever is ours."""
    phases = [[request("a", prompt(200, seed=1), 2)]]
    with pytest.raises(pytest.fail.Exception) as caught:
        run_gpu_path(llama, phases, settings=SETTINGS, runner=runner, **given)
    assert f"{named} is vllm.v1." in str(caught.value)
    assert "so nothing would be compressed" in str(caught.value)
