"""Scenarios of vLLM's tests on stock and compressed engines, and a choice on a server."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

from soak_parts import models
from tests.forked import ForkedServer
from vllm_scenario_parts import chats, columns, completions, pages, structured
from vllm_scenario_parts.columns import COLUMNS, IN_ENGINE, Column, Result, in_engine, serving
from vllm_scenario_parts.scenario import Server, difference
from vllm_scenarios import judged, table

STOCK, OFF, ALL, HALF = COLUMNS
SERVED = (
    *(completions.prompt_logprobs, completions.several_choices, completions.usage_of_streams),
    *(completions.stops, chats.streamed_chat, structured.json_schema, structured.regex),
    *(structured.forms_that_are_none, structured.tools, pages.counts, pages.clients_that_leave),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenarios")
    models.prepare(path)
    return path


@pytest.fixture(scope="module")
def stock(folder: Path) -> Result:
    return in_engine(STOCK, folder / "llama", folder / "stock.log")


@pytest.mark.parametrize("column", [OFF, ALL, HALF], ids=lambda column: column.name)
def test_engine_passes_the_scenarios_of_stock_vllm(
    folder: Path, stock: Result, column: Column
) -> None:
    """Scheduler and prefix cache step by step; compressed engines pass what the tests ask."""
    result = in_engine(column, folder / "llama", folder / f"{column.name}.log")
    assert judged(column, result, stock) == stock.failed == {}
    assert result.said.keys() == {scenario.name for scenario in IN_ENGINE}


def test_compressed_server_passes_vllms_scenarios(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice of scenarios; scripts/checks/vllm_scenarios.py runs all, beside stock vLLM."""

    def forking(
        command: list[str], env: dict[str, str], stdout: TextIO, stderr: TextIO
    ) -> ForkedServer:
        assert stdout is stderr
        return ForkedServer(command[2], command[3:], Path(stdout.name), folder, env)

    replaced = SimpleNamespace(Popen=forking, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(columns, "subprocess", replaced)
    with serving(HALF, folder / "llama", folder / "server.log") as address:
        server = Server(address)
        for scenario in SERVED:
            scenario(server)


def test_differing_answers_fail_with_their_place(folder: Path) -> None:
    """Numbers within 0.001 count as equal."""
    assert difference([1.0, {"a": "b"}], [1.0004, {"a": "b"}]) == ""
    assert difference([1.0, {"a": "b"}], [1.0, {"a": "c"}]) == "[1].a: 'b' and 'c'"
    assert difference([1], [1, 2])
    failed = judged(ALL, Result({"hits": [1]}, {"evicted": "why"}), Result({"hits": [2]}))
    assert failed == {"evicted": "why", "hits": "stock vLLM says otherwise[0]: 2 and 1"}
    assert judged(HALF, Result({"hits": [1]}), Result({"hits": [2]})) == {}
    last = table(IN_ENGINE, {"stock": {}, "all": failed}).splitlines()[-1]
    assert last == f"| all | {len(IN_NAMES)} | {len(IN_NAMES)} | {len(IN_NAMES) - 2} |"


IN_NAMES = {scenario.name for scenario in IN_ENGINE}
