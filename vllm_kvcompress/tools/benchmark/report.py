"""Writes a scenario's figures as JSON, as a Markdown table, and as a plot."""

from __future__ import annotations

import io
import json
import os
import platform
import re
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.benchmark.measure import COMPRESSED, STOCK, Benchmark
from vllm_kvcompress.tools.files import make_folder, read_within, write_whole

# Rows of the table: figure, name, factor from the figure's unit to the table's, digits.
_ROWS = (
    ("decode_throughput", "tokens/s while decoding", 1, 0),
    ("request_throughput", "requests/s", 1, 3),
    ("output_throughput", "generated tokens/s", 1, 1),
    ("ttft", "time to first token, ms", 1e3, 0),
    ("tpot", "time per output token, ms", 1e3, 1),
    ("decode_step", "decode step, ms", 1e3, 1),
    ("decode_attention", "of it attention, ms", 1e3, 1),
    ("hit_rate", "prefix-cache hit rate", 1, 3),
    ("peak_running", "most requests in a step", 1, 0),
    ("peak_usage", "peak usage of the pool", 1, 2),
    ("preemptions", "preemptions", 1, 0),
    ("events", "compression events", 1, 0),
    ("shadows", "answers sent to be scored again", 1, 0),
    ("scheduler_per_request", "scheduler per request and step, us", 1e6, 1),
)


def write(benchmark: Benchmark, result: dict[str, Any], directory: Path) -> list[Path]:
    """Writes SCENARIO.json, SCENARIO.md and, with matplotlib, SCENARIO.svg; returns the paths."""
    make_folder(directory)
    name = benchmark.scenario
    measured = {key: value for key, value in result.items() if key != "timelines"}
    figures = {**_measures(benchmark), **measured}
    written = [directory / f"{name}.json", directory / f"{name}.md"]
    write_whole(written[0], json.dumps(figures, indent=2) + "\n")
    write_whole(written[1], table(benchmark, result))
    picture = directory / f"{name}.svg"
    try:
        write_whole(picture, plot(result["timelines"]))
    except ModuleNotFoundError:  # matplotlib comes with the extra [report]
        return written
    return [*written, picture]


def former(benchmark: Benchmark, directory: Path) -> Path | None:
    """The table of an earlier run of the same benchmark on such a machine, or None."""
    former_table = directory / f"{benchmark.scenario}.md"
    try:
        figures = json.loads(read_within(former_table.with_suffix(".json")))
    except (OSError, ValueError, ConfigError):
        return None
    asked = json.loads(json.dumps(_measures(benchmark)))
    same = isinstance(figures, dict) and asked.items() <= figures.items()
    return former_table if same and former_table.exists() else None


def _measures(benchmark: Benchmark) -> dict[str, Any]:
    """What is measured, and where, as JSON."""
    return {
        "scenario": benchmark.scenario,
        "machine": machine(),
        "size": asdict(benchmark.size),
        "shape": asdict(benchmark.shape),
        "settings": benchmark.effective_settings,
        "pool_tokens": benchmark.load.pool_tokens,
        "repeats": benchmark.repeats,
        "engine": benchmark.engine,
    }


def table(benchmark: Benchmark, result: dict[str, Any]) -> str:
    """The figures of both engines side by side, in Markdown."""
    load, settings = benchmark.load, benchmark.effective_settings
    by_name = result["medians"]
    lines = [
        f"## {benchmark.scenario}",
        "",
        f"{benchmark.size.requests} requests, prompts of {benchmark.size.prompt} tokens, "
        f"{benchmark.size.output} generated; a pool of {load.pool_tokens} tokens "
        f"({load.pool_tokens * benchmark.shape.bytes_per_token / 2**20:.0f} MiB); "
        + ", ".join(f"{key} {_short(value)}" for key, value in settings.items())
        + f"; medians of {benchmark.repeats}.",
        "",
        f"| | {STOCK} | {COMPRESSED} | ratio |",
        "|---|---|---|---|",
    ]
    for key, name, factor, digits in _ROWS:
        cells = [_cell(by_name.get(engine), key, factor, digits) for engine in (STOCK, COMPRESSED)]
        ratio = result["ratios"].get(key)
        if any(cell not in ("", f"{0:.{digits}f}") for cell in cells) or key == "preemptions":
            cells.append("" if ratio is None else f"{ratio:.2f}x")
            lines.append(f"| {name} | {' | '.join(cells)} |")
    for engine, reason in result["refused"].items():
        lines += ["", f"{engine} does not start: {reason}"]
    return "\n".join(lines) + "\n"


def plot(timelines: dict[str, Any]) -> str:
    """Requests in a step, and the pool's usage, over the last repetition, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for name, line in timelines.items():
        upper.plot(line["seconds"], line["running"], label=name, drawstyle="steps-pre")
        lower.plot(line["seconds"], [100 * usage for usage in line["usage"]], label=name)
    upper.set(ylabel="requests in a step")
    upper.legend()
    lower.set(ylabel="pool in use, %", xlabel="seconds", ylim=(0, 103))
    for axis in (upper, lower):
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def machine() -> dict[str, Any]:
    """The machine that the figures come from."""
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.*)", cpu)
    return {
        "cpu": model.group(1) if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "amx": "amx_bf16" in cpu,
        "torch": version("torch"),
    }


def _cell(figures: dict[str, float] | None, key: str, factor: float, digits: int) -> str:
    return "" if figures is None else f"{factor * figures[key]:.{digits}f}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
