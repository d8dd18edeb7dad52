"""Real servers, each in processes of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
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
from typing import Protocol

from tests.forked import ForkedServer

ROOT = Path(__file__).parents[2]
OUR_SERVE = "import sys; from vllm_kvcompress.cli.main import main; sys.exit(main())"
# vLLM's own command, as the image's `vllm` and scripts/vllm.sh start it.
PLAIN_VLLM = (
    "import runpy; runpy.run_module('vllm_kvcompress.cli.stock_vllm', run_name='__main__', "
    "alter_sys=True)"
)


class ServerProcess(Protocol):
    """What tests ask of a server's process, as of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


def free_port() -> int:
    """Returns a free port below those that the system gives to outgoing connections.

    One of those could be taken again before the server, which takes a while to start, listens.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("expected a free port among 100 from 20000 to 32000, found none")


def plain_arguments(printed: str) -> list[str]:
    """Returns the arguments of `vllm` in a printed command without its variables."""
    words = shlex.split(printed)
    return words[words.index("vllm") + 1 :]


@contextmanager
def serving(
    code: str,
    arguments: list[str],
    log: Path,
    timeout: float = 600,
    packages: Path | None = None,
    fresh: bool = False,
) -> Iterator[str]:
    """Runs a server; yields its address once it is healthy; asserts that it ends well.

    Args:
        code: Python that starts it.
        arguments: what comes after the program's name, without the port.
        log: where its output goes; its end is part of the error if it does not start.
        timeout: seconds to wait for it.
        packages: where other packages are installed.
        fresh: starts new interpreters, as users do, which import vLLM twice: 13 s of CPU time.
            Else the server is forked from a process that has imported vLLM, and forks its engine,
            as vLLM does on GPUs.
    """
    with starting(code, arguments, log, packages, fresh) as (server, address):
        wait_until_healthy(address, server, log, timeout)
        yield address
        lives = server.poll() is None
    if code == OUR_SERVE and lives:
        assert server.returncode == 0, "what is asked to end has not failed:\n" + _tail(log)


@contextmanager
def starting(
    code: str,
    arguments: list[str],
    log: Path,
    packages: Path | None = None,
    fresh: bool = False,
) -> Iterator[tuple[ServerProcess, str]]:
    """Starts a server, and yields it and its address at once; arguments as for `serving`."""
    port = free_port()
    arguments = [*arguments, "--port", str(port), "--host", "127.0.0.1"]
    path = os.pathsep.join(str(folder) for folder in (packages, ROOT) if folder is not None)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "PYTHONPATH": path}
    server: ServerProcess
    if fresh:
        command = [sys.executable, "-c", code, *arguments]
        with log.open("w") as output:
            server = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, text=True
            )
    else:
        log.write_text("")
        server = ForkedServer(code, arguments, log, ROOT, environment)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(120)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_healthy(
    address: str, server: ServerProcess, log: Path, timeout: float = 600
) -> None:
    """Waits for a server; fails with the end of the log if it does not start."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"no server at {address}, exit status {server.poll()}:\n" + _tail(log))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-40:])
