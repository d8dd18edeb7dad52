"""Processes that end with the server which started them, also where that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.test_engine_death import lives

SECONDS = 60  # it takes a hundredth of one where the machine is idle
CHILD = """
import sys, time
from vllm_kvcompress.vllm_plugin.startup import lifeline
for _ in range(2):
    lifeline.follow()
print("follows", flush=True)
time.sleep(600)
"""
SERVER = """
import os, subprocess, sys
from vllm_kvcompress.vllm_plugin.startup import lifeline
{before}
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.mark.parametrize("announced", [True, False])
def test_a_child_ends_with_its_server(announced: bool) -> None:
    """If the server has announced itself; other processes that load the plugin stay."""
    code = SERVER.format(before="lifeline.announce()" if announced else "", child=CHILD)
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert server.stdout is not None
    child = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.wait()
    end = time.monotonic() + (SECONDS if announced else 0.5)
    while lives(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert lives(child) is not announced
    if not announced:
        child.kill()


def test_a_child_that_outlived_its_server_ends_at_once() -> None:
    """A process that loads the plugin when its server is gone already."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**ENVIRONMENT, "KVCOMPRESS_SERVER": str(gone.pid)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, timeout=SECONDS, check=False
    )
    assert done.returncode < 0
