"""Engines of `eval`, `bench` and other commands end with the command, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "reference"
SECONDS = 60  # for an end that takes a tenth of one where the machine is idle
# The engine is in its start, and would be in it or serve for a minute.
STARTS_ONE = """
import sys, time
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from vllm_kvcompress.tools.engine_process import EngineProcess

def never_called(llm, argument): ...

if __name__ == "__main__":
    engine = EngineProcess(sys.argv[1], None, {}, Path(sys.argv[2]), never_called)
    print(engine._process.pid, _forkserver._preload_modules[0], flush=True)
    with engine:
        time.sleep(600)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts an engine."""
    script = tmp_path / "starts_one.py"
    script.write_text(STARTS_ONE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script), str(MODEL), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        process.kill()


def test_an_engine_ends_with_its_command(command: subprocess.Popen[str], tmp_path: Path) -> None:
    """That is killed; Ctrl-C is in `cli/test_interrupts.py`."""
    assert command.stdout is not None
    number_of_it, first = command.stdout.readline().split()
    engine = int(number_of_it)
    assert first == "vllm_kvcompress.tools.ends_at_once"
    _wait_for(lambda: (tmp_path / "log").exists(), 300)  # its first act, behind the lifeline's
    assert _lives(engine)
    command.kill()
    _wait_for(lambda: not _lives(engine), SECONDS)


def test_a_fork_server_ends_without_taking_its_modules_apart() -> None:
    """What its modules registered is done; what they hold is left to the system."""
    code = """
import vllm_kvcompress.tools.ends_at_once
import atexit
class Held:
    def __del__(self):
        print("taken apart", flush=True)
atexit.register(print, "registered", flush=True)
held = Held()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "registered\n")


def _wait_for(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.05)


def _lives(process: int) -> bool:
    """Whether it runs; who ended and was not waited for yet does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
