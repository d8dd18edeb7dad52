"""How a server ends whose engine dies, or that is asked to while it works."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cli.server_process import OUR_SERVE, ROOT, starting, wait_until_healthy

pytestmark = pytest.mark.timeout(1200)  # for a machine that others use
SECONDS = 300  # vLLM looks every five; a slow machine takes longer to end
ARGUMENTS = [
    *("serve", str(ROOT / "models" / "reference"), "--kv-policy", "auto", "--enforce-eager"),
    *("--served-model-name", "reference", "--shutdown-timeout", "100"),
]


def answered(address: str, num_tokens: int) -> tuple[int, int]:
    """Status and tokens of a completion; 503 where nobody listens any more."""
    body = {"model": "reference", "prompt": "a", "max_tokens": num_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return reply.status, json.load(reply)["usage"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        return error.code, 0
    except OSError:
        return 503, 0


def engine_of(server: subprocess.Popen[str]) -> psutil.Process | None:
    """vLLM's engine, once there is one; it takes its name when it has imported vLLM."""
    children = psutil.Process(server.pid).children()
    names = ("EngineCore", "spawn_main")
    return next((c for c in children if any(name in " ".join(c.cmdline()) for name in names)), None)


@contextmanager
def nothing_left_of(server: subprocess.Popen[str]) -> Iterator[None]:
    """All processes that a server has by now are gone soon afterwards."""
    processes = psutil.Process(server.pid).children(recursive=True)
    yield
    _, left = psutil.wait_procs(processes, SECONDS)
    assert left == []


def test_an_engine_that_is_killed_in_a_step(tmp_path: Path) -> None:
    """Clients hear of it, every process ends, and the status is a failure's."""
    log = tmp_path / "log"
    with starting(OUR_SERVE, ARGUMENTS, log) as (server, address):
        wait_until_healthy(address, server, log)
        with nothing_left_of(server):
            asked = threading.Thread(target=answered, args=(address, 4000))
            asked.start()
            time.sleep(1)
            engine = engine_of(server)
            assert engine is not None
            engine.send_signal(signal.SIGKILL)
            assert answered(address, 1)[0] >= 500
            assert server.wait(SECONDS) == 1
            asked.join(SECONDS)
    assert "error: the server ended although nobody had asked it to;" in log.read_text()


def test_an_engine_that_is_killed_at_its_start(tmp_path: Path) -> None:
    with starting(OUR_SERVE, ARGUMENTS, tmp_path / "log") as (server, _):
        end = time.monotonic() + SECONDS
        while (engine := engine_of(server)) is None and time.monotonic() < end:
            time.sleep(0.1)
        assert engine is not None
        with nothing_left_of(server):
            engine.send_signal(signal.SIGKILL)
            assert server.wait(SECONDS) == 1


def test_a_server_that_is_asked_to_end_finishes_its_work(tmp_path: Path) -> None:
    """By Ctrl-C, and once more."""
    log = tmp_path / "log"
    answers: list[tuple[int, int]] = []
    with starting(OUR_SERVE, ARGUMENTS, log) as (server, address):
        wait_until_healthy(address, server, log)
        with nothing_left_of(server):
            asked = threading.Thread(target=lambda: answers.append(answered(address, 300)))
            asked.start()
            time.sleep(1)
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGTERM)
            assert server.wait(SECONDS) == 0
            asked.join(SECONDS)
    assert answers == [(200, 300)]
