"""Hosts that serve a setup's requests: an engine in a process, or a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil

from soak_parts.asks import Batch, Served
from soak_parts.in_process import drive
from soak_parts.models import ROOT, model_of
from soak_parts.over_http import Client, read_metrics
from soak_parts.setups import Setup
from vllm_kvcompress.errors import EngineError
from vllm_kvcompress.tools.engine_process import EngineProcess

_START_SECONDS = 600


class Host(Protocol):
    """Anything that serves batches of requests."""

    def call(self, argument: Batch) -> Served:
        """Serves a batch until all its requests have ended."""


@contextmanager
def in_process_host(setup: Setup, folder: Path) -> Iterator[Host]:
    """Runs the engine in its own process, without a server."""
    settings, log = setup.settings(str(folder)), folder / f"{setup.name}.log"
    model = str(model_of(setup, folder))
    with EngineProcess(model, settings, setup.engine(), log, drive) as engine:
        yield engine


@contextmanager
def server_host(setup: Setup, folder: Path) -> Iterator[Host]:
    """Runs `vllm-kvcompress serve`, and asks it over HTTP."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    options = {name.replace("_", "-"): value for name, value in setup.engine().items()}
    config = folder / f"{setup.name}.yaml"  # JSON is YAML
    config.write_text(json.dumps({**options, "kvcompress": setup.settings(str(folder))}))
    words = ["serve", str(model_of(setup, folder)), "--served-model-name", "soak", "--config"]
    code = "import sys; from vllm_kvcompress.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words, str(config), "--port", str(port)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    log = folder / f"{setup.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        server = _Server(process, f"http://127.0.0.1:{port}", log)
        server.wait_until_healthy()
        yield server
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server with SIGTERM, and kills it after 30 seconds."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Server:
    """A running server process."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self._process, self._address, self._log = process, address, log

    def wait_until_healthy(self) -> None:
        """Returns once it answers."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self._address}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise self._error("it does not start")

    def call(self, argument: Batch) -> Served:
        """Serves a batch over HTTP."""
        before = read_metrics(self._address)
        served = Served()
        served.answers = asyncio.run(Client(self._address).serve(argument))
        if self._process.poll() is not None:
            raise self._error("it has ended")
        served.left_over = self._left_over()
        after = read_metrics(self._address)
        served.counts = {
            name: int(after[key] - before[key])
            for name, key in (
                ("preemptions", "vllm:num_preemptions"),
                ("events", "kvcompress_events"),
                ("contexts reused", "kvcompress_contexts_reused"),
                ("conversations continued", "kvcompress_conversations_continued"),
            )
        }
        tree = [psutil.Process(self._process.pid)]
        tree += tree[0].children(recursive=True)
        served.rss = sum(each.memory_info().rss for each in tree)
        return served

    def _left_over(self) -> str:
        """Waits until the server is idle; returns which requests or blocks are left after 10 s."""
        busy: dict[str, Any] = {}
        for _ in range(40):
            asyncio.run(Client(self._address).touch())  # whose end is in the metrics
            metrics = read_metrics(self._address)
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
            busy = {name: metrics[name] for name in (*names, "vllm:kv_cache_usage_perc")}
            if not any(busy.values()):
                return ""
            time.sleep(0.25)
        return f"left over: {busy}"

    def _error(self, what: str) -> EngineError:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
        status = self._process.poll()
        return EngineError(f"{what}, exit status {status}; the end of {self._log}:\n{tail}")
