"""Processes forked from one that has imported vLLM, which saves most of an engine's start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
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
