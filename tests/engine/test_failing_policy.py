"""A policy that fails at an event: its request ends with an error, and nothing else changes.

One that fails on the second of two ranks alone is in test_families.py.
"""

from __future__ import annotations

from pathlib import Path

from tests import failing_policy
from tests.engine.conftest import Run
from tests.failing_policy import check, failing, good


def test_failing_policy_ends_only_its_own_request(
    llama: str, run_engine: Run, tmp_path: Path
) -> None:
    """Errors, lack of memory and wrong divisions; requests that had ended are unaffected."""
    bad = [
        failing(failing_policy.NO_SCORE),
        failing(failing_policy.NO_SCORE, output=1, at_step=1),
        failing(failing_policy.NO_MEMORY, at_step=1),
        failing(failing_policy.NO_PAGES, at_step=2),
    ]
    report = run_engine(
        llama,
        [good("alone"), [*good("beside"), *bad]],
        settings={"policy": "failing", "budget": 0.25},
        environment={"PYTHONPATH": str(failing_policy.install(tmp_path))},
    )
    check(report, bad)


def test_moments_of_a_failed_event_are_zeros(llama: str, run_engine: Run, tmp_path: Path) -> None:
    """For policies whose state attention reads."""
    bad = [failing(failing_policy.NO_SCORE, at_step=1)]
    report = run_engine(
        llama,
        [good("alone"), [*good("beside"), *bad]],
        settings={"policy": "failing_moments", "budget": 0.5},
        environment={"PYTHONPATH": str(failing_policy.install(tmp_path))},
    )
    check(report, bad)
