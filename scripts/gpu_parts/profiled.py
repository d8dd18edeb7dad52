"""Where a device's time goes while an engine serves: its kernels, by the time that they took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
MOST_KERNELS = 60  # of an engine, which are written
NAME_CHARACTERS = 100


def profile(serve: Callable[[], Figures], trace: Path | None = None) -> Figures:
    """Serves under torch's profiler.

    Where there is no GPU, operators of the CPU are measured in the place of kernels.

    Args:
        serve: what is measured; returns `seconds`, how long requests took.
        trace: takes the timeline, for chrome://tracing; None: none is written.

    Returns:
        `seconds` of serving, with the profiler's own; `device_seconds`, the sum over kernels;
        `launches`, their number; and `kernels`: name, calls and seconds of those that took most.
    """
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with torch.profiler.profile(activities=kinds) as profiler:
        served = serve()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    rows = [row for row in map(_row, profiler.key_averages()) if row["on_gpu"] == on_gpu]
    rows.sort(key=lambda row: -row["seconds"])
    return {
        "seconds": served["seconds"],
        "device_seconds": sum(row["seconds"] for row in rows),
        "launches": sum(row["calls"] for row in rows),
        "kernels": [
            {name: row[name] for name in ("name", "calls", "seconds")}
            for row in rows[:MOST_KERNELS]
            if row["seconds"]
        ],
    }


def _row(average: Any) -> Figures:
    from torch.autograd import DeviceType

    on_gpu = average.device_type == DeviceType.CUDA
    micros = average.self_device_time_total if on_gpu else average.self_cpu_time_total
    return {
        "name": average.key[:NAME_CHARACTERS],
        "calls": average.count,
        "seconds": micros / 1e6,
        "on_gpu": on_gpu,
    }
