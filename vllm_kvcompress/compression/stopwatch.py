"""Times work by the host's clock or by GPU events, for which the host never waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

# Begin and end on a GPU, and the number of stopwatches that share the time.
Span = tuple[torch.cuda.Event, torch.cuda.Event, int]


class Stopwatch:
    """Adds up the time of stretches of work on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._spans: list[Span] = []

    def add(self, seconds: float | Span) -> None:
        """Adds a stretch of work."""
        if isinstance(seconds, float):
            self._seconds += seconds
        else:
            self._spans.append(seconds)

    @property
    def seconds(self) -> float | None:
        """Seconds so far; None while a GPU has work left."""
        if not all(end.query() for _, end, _ in self._spans):
            return None
        on_device = sum(begin.elapsed_time(end) / parts for begin, end, parts in self._spans)
        return float(self._seconds + on_device / 1000)


@contextmanager
def running(stopwatches: Sequence[Stopwatch]) -> Iterator[None]:
    """Times the body of a `with` statement, and divides the time equally."""
    device, parts = stopwatches[0].device, len(stopwatches)
    spent: float | Span
    if device.type != "cuda":
        started = time.perf_counter()
        yield
        spent = (time.perf_counter() - started) / parts
    else:
        stream = torch.cuda.current_stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        spent = (begin, end, parts)
    for stopwatch in stopwatches:
        stopwatch.add(spent)
