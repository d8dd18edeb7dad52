"""Processes forked from one that has imported vLLM, which saves most of an engine's start."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess, ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from vllm_kvcompress.vllm_plugin.compat.engine import ENGINE_MODULES

PRELOADED = (  # what engines import at their start
    "compressed_tensors",
    "vllm_kvcompress.vllm_plugin.scheduler_side.scheduler",
    "vllm_kvcompress.vllm_plugin.worker_side.cpu_worker",
    "tests.engine.engine_process",
    "tests.preloaded",
)


def forked(target: Callable[..., None], *args: object) -> ForkServerProcess:
    """Forks a process that calls a function."""
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*ENGINE_MODULES, *PRELOADED])
    process = context.Process(target=target, args=args)
    process.start()
    return process


class Done(NamedTuple):
    """Result of a command that has ended."""

    returncode: int | None
    stdout: str
    stderr: str


def command(folder: Path, *arguments: str, timeout: float = 600) -> Done:
    """Runs `vllm-kvcompress` with arguments; its output goes through files in a folder."""
    files = [folder / name for name in ("stdout", "stderr")]
    process = forked(_run, [str(path) for path in files], arguments)
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    return Done(process.exitcode, *(path.read_text() for path in files))


def _run(files: list[str], arguments: tuple[str, ...]) -> None:
    """Runs the function in the forked process."""
    for path, stream in zip(files, (sys.stdout, sys.stderr), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), stream.fileno())
    from vllm_kvcompress.cli.main import main

    sys.exit(main(list(arguments)))


class ForkedServer:
    """A server that is forked, and forks its engine, with the methods of `subprocess.Popen`.

    Args:
        code: Python that starts it.
        arguments: of the command.
        log: a file that exists, for its output.
        folder: where it works.
        environment: all of its variables.
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str],
        log: Path,
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._process = forked(_serve, code, [*arguments], str(log), str(folder), {**environment})
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end, and returns the exit status."""
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("the server", timeout or 0)
        return status

    def send_signal(self, sig: int) -> None:
        """Sends a signal unless it has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Sends SIGKILL unless it has ended."""
        self._process.kill()


def _serve(
    code: str, arguments: list[str], log: str, folder: str, environment: dict[str, str]
) -> None:
    """Runs a server in the forked process as a new interpreter would."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["-c", *arguments]
    gc.freeze()  # vLLM collects garbage again and again, and all that it has imported is none
    context = multiprocessing.get_context("fork")
    vars(context)["Process"] = _AsSpawned
    vars(multiprocessing)["get_context"] = lambda method=None: context
    exec(code, {"__name__": "__main__"})


class _AsSpawned(ForkProcess):
    """A process that a forked server forks, and that begins like a spawned one.

    It loads its plugins, and shares metrics if the server has just begun to.
    """

    def run(self) -> None:
        """Runs the target in the forked process."""
        from prometheus_client import values
        from vllm import plugins

        plugins.plugins_loaded = False
        values.ValueClass = values.get_value_class()
        super().run()
