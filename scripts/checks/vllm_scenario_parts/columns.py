"""The table's columns: stock vLLM, and this package without compression, with budget 1 and 0.5."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import EngineError
from vllm_kvcompress.tools.engine_process import EngineProcess
from vllm_scenario_parts import chats, completions, pages, prefix_cache, scheduling, structured
from vllm_scenario_parts.engine import OPTIONS, Engine
from vllm_scenario_parts.scenario import MODEL, Scenario, Server

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 600
SERVED = [
    *(completions.SERVED + chats.SERVED + structured.SERVED),
    *pages.SERVED,
]
IN_ENGINE = [*scheduling.IN_ENGINE, *prefix_cache.IN_ENGINE]
_OURS = "import sys; from vllm_kvcompress.cli.main import main; sys.exit(main())"
_STOCK = (
    "import runpy; runpy.run_module('vllm_kvcompress.cli.stock_vllm', run_name='__main__', "
    "alter_sys=True)"
)


@dataclass(frozen=True)
class Column:
    """One configuration that answers the scenarios.

    Attributes:
        name: in the table.
        settings: ours; None for stock vLLM.
        is_exact: whether it has to say what stock vLLM says.
    """

    name: str
    settings: dict[str, Any] | None
    is_exact: bool = True

    def options(self) -> list[str]:
        """Returns the flags of `serve` for the settings."""
        names = {"request_policies": "allow-request-policies"}
        words = []
        for name, value in (self.settings or {}).items():
            text = ",".join(value) if isinstance(value, list) else str(value)
            words += [f"--kv-{names.get(name, name).replace('_', '-')}", text]
        return words


COLUMNS = (
    Column("stock", None),
    Column("off", {"policy": "none", "request_policies": ["keydiff"], "min_tokens": 64}),
    Column("all", {"policy": "adakv+criticalkv", "budget": 1.0, "min_tokens": 64}),
    Column("half", {"policy": "adakv+criticalkv", "budget": 0.5, "min_tokens": 64}, False),
)


@dataclass
class Result:
    """Results of the scenarios in one column.

    Attributes:
        said: what those said that passed, by name.
        failed: why the others did not.
    """

    said: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, scenario: Scenario, subject: Any) -> None:
        """Runs a scenario, and notes what it said or why it failed."""
        if scenario.name in self.said or scenario.name in self.failed:
            return  # it follows several files of vLLM's
        try:
            self.said[scenario.name] = scenario.run(subject)
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            line = trace.tb_lineno if trace is not None else 0
            reason = f"{type(error).__name__} at line {line}: {error}"
            self.failed[scenario.name] = reason[:1000]


def in_engine(column: Column, model: Path, log: Path) -> Result:
    """Runs the scenarios that drive an engine."""
    with EngineProcess(str(model), column.settings, OPTIONS, log, run_in_engine) as engine:
        result: Result = engine.call("all")
        return result


def run_in_engine(llm: Any, _: str) -> Result:
    """Called in the engine's process."""
    engine, result = Engine(llm), Result()
    for scenario in IN_ENGINE:
        result.add(scenario, engine)
    return result


def served(column: Column, model: Path, log: Path) -> Result:
    """Runs the scenarios that ask a server."""
    result = Result()
    with serving(column, model, log) as address:
        server = Server(address)
        for scenario in SERVED:
            result.add(scenario, server)
    return result


def server_arguments(column: Column, model: Path) -> list[str]:
    """Returns the command line of `serve`."""
    return [
        *("serve", str(model), "--served-model-name", MODEL, *column.options()),
        *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
        *("--max-model-len", "1024", "--num-gpu-blocks-override", "400"),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]


@contextmanager
def serving(column: Column, model: Path, log: Path) -> Iterator[str]:
    """Starts a server, yields its address, and ends it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    code = _STOCK if column.settings is None else _OURS
    arguments = [*server_arguments(column, model), "--host", "127.0.0.1", "--port", str(port)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=environment, stdout=output, stderr=output
        )
    try:
        _wait(process, address, log)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.3)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    raise EngineError(f"no server, exit status {process.poll()}; the end of {log}:\n{tail}")
