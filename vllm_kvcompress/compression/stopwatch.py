"""How long work took: by the host's clock, or by a GPU's own, for which the host never waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time of stretches of work.

    Args:
        device: which does the work. On a GPU the host only queues it, so that the host's clock
            says nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what is done inside."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        stream = torch.cuda.current_stream(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        self._pairs.append((begin, end))

    @property
    def seconds(self) -> float | None:
        """Time so far; None while a GPU has not done all of the work."""
        if not all(end.query() for _, end in self._pairs):
            return None
        on_device: float = sum(begin.elapsed_time(end) for begin, end in self._pairs)
        return self._seconds + on_device / 1000
