"""Ends vLLM's engines with the server that they belong to, even if it is killed.

vLLM's workers end with their engine. An engine whose API server was killed (SIGKILL, out of
memory) would wait for requests for ever and hold the model's memory.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import cache

_VARIABLE = "KVCOMPRESS_SERVER"
_MAX_PID_DIGITS = 7


def announce() -> None:
    """Has processes that this one starts from now on end with it."""
    os.environ[_VARIABLE] = str(os.getpid())


def follow() -> None:
    """Ends this process as soon as the server that started it, if any, is gone; repeatable."""
    server = os.environ.get(_VARIABLE, "")
    if server.isdecimal() and len(server) <= _MAX_PID_DIGITS and int(server) != os.getpid():
        _follow(int(server), os.getpid())


def end_with(process: int) -> None:
    """Ends this process as soon as another one is gone."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:  # a kernel before 5.3, or a sandbox: as in stock vLLM
        return
    threading.Thread(target=_wait_for, args=(descriptor,), daemon=True).start()


@cache  # by process: a forked one has no threads of its parent's
def _follow(server: int, _own: int) -> None:
    end_with(server)


def _wait_for(descriptor: int) -> None:
    """Kills this process at once when the other ends, even during a step or start-up."""
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
