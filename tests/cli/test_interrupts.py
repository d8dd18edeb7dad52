"""Ctrl-C in a terminal, which signals every process of a command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cli.server_process import OUR_SERVE, ROOT
from tests.cli.test_engine_death import SECONDS, nothing_left_of

MODEL = str(ROOT / "models" / "reference")
EVAL = ("eval", MODEL, "--tasks", "ruler/vt", "--samples", "1")
BENCH = ("bench", "--scenario", "off", "--shape", "layers=1,hidden=64,heads=2,kv_heads=2")
PROFILE = ("profile", MODEL, "--kind", "headkv", "--length", "2048", "--samples", "1000")


Command = subprocess.Popen[str]


def fork_servers(command: Command) -> list[psutil.Process]:
    """Returns a command's fork server, and the processes forked from it."""
    servers = []
    for child in psutil.Process(command.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "forkserver" in " ".join(child.cmdline()):
                servers.append(child)
    return servers


def imports(command: Command, said: Path) -> bool:
    """Returns whether the fork server imports vLLM."""
    return len(fork_servers(command)) == 1


def starts(command: Command, said: Path) -> bool:
    """Returns whether an engine has been forked."""
    return len(fork_servers(command)) == 2


def measures(command: Command, said: Path) -> bool:
    """Returns whether the command itself measures."""
    return "Measuring" in said.read_text()


@pytest.mark.parametrize(
    ("arguments", "moment"), [(EVAL, imports), (BENCH, starts), (PROFILE, measures)]
)
def test_ctrl_c_ends_every_process_with_one_line(
    arguments: tuple[str, ...],
    moment: Callable[[Command, Path], bool],
    tmp_path: Path,
) -> None:
    """Interrupts commands while they import, start an engine, or measure."""
    said = tmp_path / "said"
    command_line = [sys.executable, "-c", OUR_SERVE, *arguments, "--out", str(tmp_path / "out")]
    with (
        said.open("w") as output,
        subprocess.Popen(
            # A suite in the background ignores SIGINT, and so would what it starts.
            ["env", "--default-signal=INT", *command_line],
            env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        ) as command,
    ):
        end = time.monotonic() + SECONDS
        while not moment(command, said):
            assert command.poll() is None, said.read_text()
            assert time.monotonic() < end, said.read_text()
            time.sleep(0.05)
        with nothing_left_of(command):
            os.killpg(command.pid, signal.SIGINT)
            status = command.wait(SECONDS)
    words = said.read_text()
    assert status == 130, words
    assert words.endswith("\nvllm-kvcompress: interrupted\n"), words
    assert "Traceback" not in words
