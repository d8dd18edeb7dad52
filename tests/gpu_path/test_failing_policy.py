"""A policy that fails, where the next step has been planned before the scheduler hears of it."""

from __future__ import annotations

from pathlib import Path

from tests import failing_policy
from tests.failing_policy import check, failing, good
from tests.gpu_path.conftest import Run


def test_the_step_after_a_failed_event_changes_no_other_request(
    llama: str, run_gpu_path: Run, tmp_path: Path
) -> None:
    """Asynchronous scheduling: the request is in one more step, and reads what it was left."""
    bad = [failing(failing_policy.NO_SCORE, at_step=1), failing(failing_policy.NO_PAGES, at_step=2)]
    report = run_gpu_path(
        llama,
        [good("alone"), [*good("beside"), *bad]],
        settings={"policy": "failing", "budget": 0.25},
        environment={"PYTHONPATH": str(failing_policy.install(tmp_path))},
    )
    check(report, bad)
