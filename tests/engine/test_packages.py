"""A policy of another package compresses in the engine."""

from __future__ import annotations

from pathlib import Path

from tests import foreign_policy
from tests.engine.conftest import Run, request
from tests.engine.oracle import check_decoding
from tests.tiny_models import prompt


def test_policy_of_another_package_compresses_and_decodes(
    llama: str, run_engine: Run, tmp_path: Path
) -> None:
    """The installed policy is found, takes parameters, and its kept tokens are attended to."""
    tokens = prompt(640, seed=3)
    report = run_engine(
        llama,
        [[request("a", tokens, 12)]],
        settings={"policy": "fading", "budget": 0.25, "params": {"num_sinks": 20, "half_life": 64}},
        record_kept=True,
        environment={"PYTHONPATH": str(foreign_policy.install(tmp_path))},
    )
    assert len(report["kept"]) == 3
    for record in report["kept"]:
        assert record["counts"] == [5, 5]
        assert record["kept"][:20] == list(range(20))
        assert record["kept"][144:160] == list(range(624, 640))
        assert record["kept"] != [*range(20), *range(500, 640)] * 2
    check_decoding(llama, tokens, report["kept"], report["outputs"]["a"])
