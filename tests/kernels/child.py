"""Processes of their own for Triton without a GPU: one that interprets, one that only compiles.

Whether Triton interprets is settled when it is imported, and this process may have imported it
already (vLLM does). So calls go to a child by pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import pkgutil
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any


def serve(pipe: Connection) -> None:
    """Answers calls until the other end closes."""
    import torch

    torch.set_num_threads(1)
    if os.environ["TRITON_INTERPRET"] == "1":
        from tests import interpreter

        interpreter.speed_up()
    while True:
        try:
            name, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer: Any = pkgutil.resolve_name(name)(*args, **kwargs)
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
        pipe.send_bytes(pickle.dumps(answer))


class Child:
    """Calls functions in a child process; tensors travel by value.

    Args:
        interprets: whether Triton interprets in it.
    """

    def __init__(self, interprets: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = str(int(interprets))
        try:
            self._process = context.Process(target=serve, args=(far,), daemon=True)
            self._process.start()
        finally:
            del os.environ["TRITON_INTERPRET"]
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before
        far.close()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What the function of that dotted name returns; raises what it raises."""
        self._pipe.send_bytes(pickle.dumps((name, args, kwargs)))
        answer = pickle.loads(self._pipe.recv_bytes())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the child process."""
        self._pipe.close()
        self._process.join()


def at_once(children: Sequence[Child], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What every call returns: each made in a child that has nothing to do.

    Args:
        children: take one call at a time.
        calls: a function's dotted name and its arguments.
    """
    idle: SimpleQueue[Child] = SimpleQueue()
    for child in children:
        idle.put(child)

    def make(call: tuple[Any, ...]) -> Any:
        child = idle.get()
        try:
            return child.call(*call)
        finally:
            idle.put(child)

    with ThreadPoolExecutor(len(children)) as threads:
        return list(threads.map(make, calls))
