"""Times are known at once on the host, and once a device has done the work."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from vllm_kvcompress.compression.stopwatch import Stopwatch, running


def test_host_times_are_known_at_once() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    assert stopwatch.seconds == 0
    for _ in range(2):
        with running([stopwatch]):
            time.sleep(0.01)
        time.sleep(0.02)
    spent = stopwatch.seconds
    assert spent is not None
    assert spent >= 0.02
    assert stopwatch.seconds == spent


@dataclass
class Mark:
    """A stand-in for CUDA events: work n takes n milliseconds and is done on request."""

    enable_timing: bool
    place: int = 0

    done = 0
    recorded = 0

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        Mark.recorded += 1
        self.place = Mark.recorded

    def query(self) -> bool:
        return self.place <= Mark.done

    def elapsed_time(self, end: Mark) -> float:
        assert self.enable_timing
        assert end.query(), "would wait"
        return float(self.place + end.place)


def test_device_times_are_known_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    stopwatch = Stopwatch(torch.device("cuda:1"))
    for _ in range(2):
        with running([stopwatch]):
            pass
    for done in range(4):
        monkeypatch.setattr(Mark, "done", done)
        assert stopwatch.seconds is None
    monkeypatch.setattr(Mark, "done", 4)
    assert stopwatch.seconds == pytest.approx((1 + 2 + 3 + 4) / 1000)
