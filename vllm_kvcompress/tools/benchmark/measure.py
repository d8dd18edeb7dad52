"""Runs stock and compressed engines of one scenario in turns, and takes the ratios between them."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_kvcompress.errors import EngineError
from vllm_kvcompress.tools.benchmark.drive import drive
from vllm_kvcompress.tools.benchmark.scenarios import SCENARIOS, Load, Size
from vllm_kvcompress.tools.benchmark.shapes import ModelShape
from vllm_kvcompress.tools.dtypes import on_cpu
from vllm_kvcompress.tools.engine_process import EngineProcess

STOCK, COMPRESSED = "stock", "compressed"
# Figures whose ratio, compressed over stock, is reported.
RATIOS = (
    *("decode_throughput", "request_throughput", "output_throughput", "ttft", "tpot"),
    *("decode_step", "decode_attention", "hit_rate"),
)


@dataclass(frozen=True)
class Benchmark:
    """What is to be measured.

    Attributes:
        scenario: a name in SCENARIOS.
        size: of the load.
        shape: of the model.
        settings: compression settings, of which a scenario may change some.
        repeats: measured repetitions, after one that warms up.
        engine: further options of both engines.
    """

    scenario: str
    size: Size
    shape: ModelShape
    settings: dict[str, Any]
    repeats: int
    engine: dict[str, Any]

    @property
    def load(self) -> Load:
        """The scenario's load at this size."""
        return SCENARIOS[self.scenario](self.size)

    @property
    def effective_settings(self) -> dict[str, Any]:
        """The settings with the scenario's changes."""
        return {**self.settings, **self.load.settings}


def measure(benchmark: Benchmark, log: Path) -> dict[str, Any]:
    """Runs a scenario; `log` takes the engines' output.

    Both engines live side by side and take turns, so that a slow minute of the machine hits both.

    Returns:
        `medians` by engine, `ratios` of the compressed engine's figures to stock's (medians of the
        repetitions' ratios), `repetitions`, `timelines` of the last one, and `refused`: why an
        engine did not start.

    Raises:
        EngineError: the compressed engine did not start, or one ended while it served.
    """
    load = benchmark.load
    refused: dict[str, str] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        benchmark.shape.write(Path(directory), load.max_model_len)
        engines: dict[str, EngineProcess] = {}
        for name in tqdm((STOCK, COMPRESSED), desc=f"{benchmark.scenario}: engines"):
            process = EngineProcess(
                directory,
                None if name == STOCK else benchmark.effective_settings,
                engine_options(benchmark, on_cpu()),
                log,
                drive,
            )
            try:
                engines[name] = stack.enter_context(process)
            except EngineError as error:
                if name == COMPRESSED:
                    raise
                refused[name] = _reason(str(error))
            runs[name] = []
        for repeat in tqdm(range(benchmark.repeats + 1), desc=f"{benchmark.scenario}: runs"):
            for name, engine in engines.items():
                figures = engine.call((benchmark.scenario, benchmark.size, repeat))
                if repeat:
                    runs[name].append(figures)
    return {**summarize(runs), "refused": refused}


def engine_options(benchmark: Benchmark, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, for both engines.

    On GPUs two engines share the memory, and graphs are captured as in servers; on CPUs, where that
    takes minutes, they are not.
    """
    load = benchmark.load
    platform = {} if cpu else {"gpu_memory_utilization": 0.45, "enforce_eager": False}
    model = {"load_format": "dummy", "dtype": benchmark.shape.dtype}
    return {**load.engine_options, **platform, **model, **benchmark.engine}


def summarize(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians and ratios of the repetitions, by engine; a ratio is taken within one repetition."""
    timelines = {name: figures[-1]["timeline"] for name, figures in runs.items() if figures}
    plain = {
        name: [{k: v for k, v in run.items() if k != "timeline"} for run in figures]
        for name, figures in runs.items()
    }
    medians = {
        name: {key: statistics.median(run[key] for run in figures) for key in figures[0]}
        for name, figures in plain.items()
        if figures
    }
    ratios: dict[str, float] = {}
    pairs = list(zip(plain[COMPRESSED], plain[STOCK], strict=False))
    for name in RATIOS:
        of_pairs = [ours[name] / theirs[name] for ours, theirs in pairs if theirs[name]]
        if of_pairs:
            ratios[name] = statistics.median(of_pairs)
    return {"ratios": ratios, "medians": medians, "repetitions": plain, "timelines": timelines}


def _reason(error: str) -> str:
    """The line in an engine's last output that says why it ended."""
    lines = [line for line in error.splitlines() if "Error" in line]
    return (lines or error.splitlines())[-1].strip()
