"""Ends vLLM's engines with the server that they belong to, also where that is killed.

vLLM's workers end with their engine. An engine whose API server was killed (SIGKILL, or for want
of memory) waits for requests for ever, and holds the model's memory.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import cache

_VARIABLE = "KVCOMPRESS_SERVER"


def announce() -> None:
    """Makes this process the one that those which it starts from now on end with."""
    os.environ[_VARIABLE] = str(os.getpid())


def follow() -> None:
    """Ends this process, if a server has started it, as soon as that one is gone; repeatable."""
    server = os.environ.get(_VARIABLE, "")
    if server.isdecimal() and int(server) != os.getpid():
        _follow(int(server), os.getpid())


@cache  # by process: a forked one has no threads of its parent's
def _follow(server: int, _own: int) -> None:
    try:
        descriptor = os.pidfd_open(server)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:  # a kernel before 5.3, or a sandbox: as in stock vLLM
        return
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()


def _end_with(descriptor: int) -> None:
    """Waits without looking up; the engine may be in the middle of a step or of its start."""
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
