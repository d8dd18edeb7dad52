"""Fixtures of the engine tests: a way to run scenarios, and requests for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from tests import tiny_models
from tests.engine import engine_process
from tests.forked import forked

TIMEOUT = 240  # seconds for a scenario

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def equal_keys(model_directory: Path) -> str:
    """A model whose key projections are zero: attention is the mean of all values."""

    def change(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.data.zero_()

    return str(tiny_models.build("llama", model_directory / "equal-keys", change=change))


class Files(NamedTuple):
    """Paths of a scenario, its report and its log."""

    scenario: Path
    report: Path
    log: Path

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Returns the paths in a directory."""
        return cls(*(directory / name for name in cls._fields))

    def write(self, **scenario: Any) -> None:
        """Writes the scenario that engine_process.py runs."""
        self.scenario.write_text(json.dumps(scenario))

    def read(self, code: object) -> dict[str, Any]:
        """Reads the report; without one the test fails with the end of the log."""
        if not self.report.exists():
            end = self.log.read_text(errors="replace")[-6000:]
            pytest.fail(f"the engine ended with {code}:\n{end}")
        return json.loads(self.report.read_text())


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a scenario (see engine_process.py) in a process of its own; returns its report."""

    def run(
        model: str,
        phases: list[list[dict[str, Any]]],
        settings: dict[str, Any] | None = None,
        record_kept: bool = False,
        environment: dict[str, str] | None = None,
        calls: list[Any] | None = None,
        probes: list[str] | None = None,
        afterwards: list[str] | None = None,
        asynchronous: bool = False,
        **engine: Any,
    ) -> dict[str, Any]:
        files = Files.of(tmp_path_factory.mktemp("scenario"))
        files.write(
            model=model,
            engine={"num_gpu_blocks_override": 400, "max_num_batched_tokens": 512, **engine},
            settings=settings,
            phases=phases,
            record_kept=record_kept,
            calls=calls or [],
            probes=probes or [],
            asynchronous=asynchronous,
            **({} if afterwards is None else {"afterwards": afterwards}),
        )
        process = forked(engine_process.run, *map(str, files), environment or {})
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        return files.read(process.exitcode)

    return run


def request(
    name: str, prompt_tokens: list[int], max_tokens: int = 16, **more: Any
) -> dict[str, Any]:
    """Makes a request of a scenario."""
    return {"id": name, "prompt": prompt_tokens, "max_tokens": max_tokens, **more}


def alone(one: dict[str, Any]) -> dict[str, Any]:
    """Copies a request with a salt of its own, so that it hits no cache."""
    return {**one, "id": f"alone {one['id']}", "salt": one["id"], "at_step": 0}


def each_alone(requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Makes a phase of each request."""
    return [[alone(one)] for one in requests]


def check_as_alone(outputs: dict[str, Any], names: Iterable[str]) -> None:
    """Asserts that these requests have the outputs that they have alone."""
    for name in names:
        expected = outputs[f"alone {name}"]
        assert expected["cached"] == 0, name
        assert outputs[name]["tokens"] == expected["tokens"], name
