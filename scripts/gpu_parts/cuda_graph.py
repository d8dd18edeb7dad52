"""Capture of device work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture_graph(work: Callable[[], Any]) -> Callable[[], None]:
    """Captures `work` after it ran twice beside the current stream; returns the replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
