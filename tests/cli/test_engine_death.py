"""A server whose engine is killed says so, and ends with a status that supervisors restart on."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from tests.cli.server_process import OUR_SERVE, ROOT, serving

SECONDS = 60  # vLLM looks every five; a slow machine takes longer to end


def test_a_killed_engine_ends_the_server_with_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    model = str(ROOT / "models" / "reference")
    arguments = ["serve", model, "--kv-policy", "auto", "--enforce-eager"]
    arguments += ["--served-model-name", "reference"]
    with serving(OUR_SERVE, arguments, log) as address:
        server = next(
            child
            for child in psutil.Process().children()
            if address.rpartition(":")[2] in child.cmdline()
        )
        processes = server.children(recursive=True)
        engine = next(each for each in processes if "EngineCore" in each.name() or _is_core(each))
        os.kill(engine.pid, signal.SIGKILL)
        assert _status_of_a_question(address) >= 500
        assert server.wait(SECONDS) == 1
    assert "an engine process ended by itself, with status -9" in log.read_text()
    end = time.monotonic() + SECONDS
    while any(each.is_running() and each.status() != "zombie" for each in processes):
        assert time.monotonic() < end
        time.sleep(0.1)


def _is_core(process: psutil.Process) -> bool:
    return any("EngineCore" in word for word in process.cmdline())


def _status_of_a_question(address: str) -> int:
    """Of a completion's answer; 503 where nobody listens any more."""
    body = json.dumps({"model": "reference", "prompt": "a", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 503
