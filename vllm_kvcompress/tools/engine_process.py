"""Runs a vLLM engine in a child process, which carries out calls one at a time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running as start_fork_server
from multiprocessing.resource_tracker import ensure_running as start_resource_tracker
from pathlib import Path
from typing import Any, Self

from vllm_kvcompress.errors import EngineError
from vllm_kvcompress.tools.files import append
from vllm_kvcompress.vllm_plugin.compat.engine import ENGINE_MODULES, build_engine, refuses_request

_ENDS_AT_ONCE = "vllm_kvcompress.tools.ends_at_once"


class EngineProcess:
    """Starts a vLLM engine in a child process; a context manager.

    The child is a separate process because a model's memory comes back only with its end. It is
    forked from a process that has imported vLLM, which halves the start of every engine. It ends
    with this process, however that ends, and at once if the context is left by an exception.

    Args:
        model: name or directory.
        settings: compression settings, or None for stock vLLM.
        options: further keyword arguments of `vllm.LLM`.
        log: takes the engine's output.
        handle: a module's function, called in the child with `vllm.LLM` and the argument of `call`;
            its `ValueError`, and vLLM's refusal of a request, is raised in `call` as EngineError;
            any other exception ends the engine.
    """

    def __init__(
        self,
        model: str,
        settings: dict[str, Any] | None,
        options: dict[str, Any],
        log: Path,
        handle: Callable[[Any, Any], Any],
    ) -> None:
        append(log, "")  # raises here if the child could not write
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_ENDS_AT_ONCE, *ENGINE_MODULES])
        _start_fork_server()
        self._log = log
        self._pipe, child_pipe = context.Pipe()
        self._lifeline, child_lifeline = context.Pipe()
        self._process = context.Process(
            target=_serve_calls,
            args=(child_pipe, child_lifeline, model, settings, options, str(log), handle),
        )
        self._process.start()
        child_pipe.close()
        child_lifeline.close()

    def __enter__(self) -> Self:
        try:
            self._receive()
        except BaseException:
            self._lifeline.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._pipe.close()
            self._process.join(timeout=30)
        self._lifeline.close()  # ends a child that is still there
        self._process.join()

    def call(self, argument: Any) -> Any:
        """Returns what `handle` returns for an argument, which must not be None.

        Raises:
            EngineError: the engine refused it, or ended.
        """
        return self._receive(argument)

    def _receive(self, argument: Any = None) -> Any:
        """Sends an argument, if there is one, and waits for the child's reply."""
        try:
            if argument is not None:
                self._pipe.send(argument)
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(timeout=30)  # its last words are written while it ends
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise EngineError(f"the engine ended; the end of {self._log}:\n{tail}") from None
        if kind == "error":
            raise EngineError(value)
        return value


def _start_fork_server() -> None:
    """Starts the fork server unless it runs, with SIGINT blocked: it ends with its command.

    Python's own ignores Ctrl-C only once it has imported everything.
    """
    start_resource_tracker()  # would undo the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        start_fork_server()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve_calls(
    pipe: Connection,
    lifeline: Connection,
    model: str,
    settings: dict[str, Any] | None,
    options: dict[str, Any],
    log: str,
    handle: Callable[[Any, Any], Any],
) -> None:
    """Main function of the child: builds the engine, then answers until the pipe is closed."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    _redirect_output(log)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this is a process of its own already
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    gc.freeze()  # keeps vLLM's imports out of the collections during its start
    llm = build_engine(model, settings, options)
    pipe.send(("ready", None))
    while True:
        try:
            argument = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("reply", handle(llm, argument)))
        except Exception as error:
            if not refuses_request(error):
                raise
            pipe.send(("error", str(error)))


def _end_with(lifeline: Connection) -> None:
    """Kills this process when its owner closes the other end of the lifeline, or ends.

    The engine may be in the middle of a step or of its start, and would not notice for minutes.
    """
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGKILL)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
