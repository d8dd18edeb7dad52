"""Servers whose engine dies, or that are asked to end while they work."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests import failing_policy, tiny_models
from tests.cli.server_process import (
    OUR_SERVE,
    ROOT,
    ServerProcess,
    starting,
    wait_until_healthy,
)

SECONDS = 300
ARGUMENTS = [
    *("serve", str(ROOT / "models" / "reference"), "--kv-policy", "auto", "--enforce-eager"),
    *("--served-model-name", "reference", "--shutdown-timeout", "100"),
]


def answered(address: str, num_tokens: int) -> tuple[int, int]:
    """Returns status and tokens of a completion; 503 if the connection fails."""
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


def engine_of(server: ServerProcess) -> psutil.Process | None:
    """Returns vLLM's engine process, which may be renamed after it has imported vLLM."""
    names = ("EngineCore", "spawn_main", "forkserver")
    for child in psutil.Process(server.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie
            if any(name in " ".join(child.cmdline()) for name in names):
                return child
    return None


@contextmanager
def nothing_left_of(server: ServerProcess) -> Iterator[None]:
    """Asserts that all child processes that a server has now end soon afterwards."""
    processes = psutil.Process(server.pid).children(recursive=True)
    yield
    end = time.monotonic() + SECONDS
    while left := [process for process in processes if lives(process)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def lives(process: psutil.Process) -> bool:
    """Returns whether a process runs; zombies do not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_server_ends_with_status_1_when_its_engine_is_killed_in_a_step(tmp_path: Path) -> None:
    """Clients get an error, and every process ends."""
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


def test_server_ends_with_status_1_when_its_engine_is_killed_at_start(tmp_path: Path) -> None:
    with starting(OUR_SERVE, ARGUMENTS, tmp_path / "log") as (server, _):
        end = time.monotonic() + SECONDS
        while (engine := engine_of(server)) is None and time.monotonic() < end:
            time.sleep(0.1)
        assert engine is not None
        with nothing_left_of(server):
            engine.send_signal(signal.SIGKILL)
            assert server.wait(SECONDS) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_server_that_is_asked_to_end_while_it_starts_ends(
    tmp_path: Path, number: int, status: int
) -> None:
    """Its engine has been started and is waited for."""
    log = tmp_path / "log"
    with starting(OUR_SERVE, ARGUMENTS, log) as (server, _):
        end = time.monotonic() + SECONDS
        while "EngineCore pid" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.02)
        with nothing_left_of(server):
            server.send_signal(number)
            assert server.wait(SECONDS) == status
    assert "while the server started" in log.read_text()
    assert "Application startup complete" not in log.read_text()


@contextmanager
def failing_server(
    folder: Path, options: Sequence[str] = (), fresh: bool = False
) -> Iterator[tuple[ServerProcess, str]]:
    """Runs a server whose policy fails, or kills its process, at prompts of certain lengths."""
    arguments = ["serve", str(tiny_models.build("llama", folder)), "--kv-policy", "failing"]
    arguments += ["--kv-budget", "0.25", "--enforce-eager", "--max-model-len", "2048"]
    arguments += ["--served-model-name", "reference", "--dtype", "float32", *options]
    log, packages = folder / "log", failing_policy.install(folder)
    with starting(OUR_SERVE, arguments, log, packages, fresh) as (server, address):
        wait_until_healthy(address, server, log)
        yield server, address


def asked(address: str, num_blocks: int, **more: object) -> tuple[int, str]:
    """Returns status and text of a completion of a prompt of `num_blocks`; 503 without one."""
    prompt = tiny_models.prompt(num_blocks * failing_policy.BLOCK + 5, seed=num_blocks)
    body = {"model": "reference", "prompt": prompt, "max_tokens": 40, "temperature": 0, **more}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 503, repr(error)


def test_server_ends_when_one_of_two_workers_is_killed_in_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients get an error, and every process ends. Engine and workers are spawned."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = ["--tensor-parallel-size", "2"]
    with (
        failing_server(tmp_path, options, fresh=True) as (server, address),
        nothing_left_of(server),
    ):
        status, text = asked(address, failing_policy.KILLS_ITS_PROCESS)
        assert status == 500
        assert json.loads(text)["error"]["message"]
        assert asked(address, 5)[0] >= 500
        assert server.wait(SECONDS) == 1


def test_engine_and_workers_end_when_the_api_process_is_killed(tmp_path: Path) -> None:
    """Before that, a request whose event fails gets a 500, and others are unaffected."""
    with failing_server(tmp_path) as (server, address):
        expected = answer_of(asked(address, 15))
        others: list[str] = []
        other = threading.Thread(target=lambda: others.append(answer_of(asked(address, 15))))
        other.start()
        status, text = asked(address, failing_policy.NO_SCORE)
        assert (status, json.loads(text)["error"]["code"]) == (500, 500)
        _, streamed = asked(address, failing_policy.NO_SCORE, stream=True)
        last = streamed.strip().split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500
        other.join(SECONDS)
        assert others == [expected] == [answer_of(asked(address, 15))]
        with nothing_left_of(server):
            server.kill()
            server.wait(SECONDS)


def answer_of(asked: tuple[int, str]) -> str:
    """Returns the text of a successful completion."""
    assert asked[0] == 200, asked
    return str(json.loads(asked[1])["choices"][0]["text"])


def holders_of_port(server: ServerProcess, port: int) -> list[int]:
    """Returns which of a server's processes have a socket at its port."""
    main = psutil.Process(server.pid)
    return [
        process.pid
        for process in (main, *main.children(recursive=True))
        if any(each.laddr.port == port for each in process.net_connections("tcp") if each.laddr)
    ]


def test_interrupted_server_finishes_its_requests(tmp_path: Path) -> None:
    """Interrupted by SIGINT, and then SIGTERM. No process that it forked holds its port."""
    log = tmp_path / "log"
    answers: list[tuple[int, int]] = []
    with starting(OUR_SERVE, ARGUMENTS, log) as (server, address):
        wait_until_healthy(address, server, log)
        assert holders_of_port(server, int(address.rsplit(":", 1)[1])) == [server.pid]
        with nothing_left_of(server):
            asked = threading.Thread(target=lambda: answers.append(answered(address, 300)))
            asked.start()
            time.sleep(1)
            server.send_signal(signal.SIGINT)
            server.send_signal(signal.SIGTERM)
            assert server.wait(SECONDS) == 0
            asked.join(SECONDS)
    assert answers == [(200, 300)]
