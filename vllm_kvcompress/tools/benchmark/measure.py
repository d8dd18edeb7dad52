"""Stock and compressed engines of one scenario, in turns, and the ratios between them."""

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
# Of each ratio the figure it is of; compressed over stock.
RATIOS = {
    "decode_throughput": "decode_throughput",
    "request_throughput": "request_throughput",
    "output_throughput": "output_throughput",
    "ttft": "ttft",
    "tpot": "tpot",
    "decode_step": "decode_step",
    "decode_attention": "decode_attention",
    "hit_rate": "hit_rate",
}


@dataclass(frozen=True)
class Benchmark:
    """What is to be measured.

    Attributes:
        scenario: its name.
        size: of the load.
        shape: of the model.
        settings: ours; a scenario may change some.
        repeats: measured repetitions; one more warms up.
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
        """Of the scenario, at this size."""
        return SCENARIOS[self.scenario](self.size)

    @property
    def effective_settings(self) -> dict[str, Any]:
        """With what the scenario changes."""
        return {**self.settings, **self.load.settings}


def measure(benchmark: Benchmark, log: Path) -> dict[str, Any]:
    """Runs a scenario.

    Both engines live side by side and take turns, so that a slow minute of the machine hits both.

    Args:
        benchmark: the scenario.
        log: takes what the engines print.

    Returns:
        `medians` by engine, `ratios` of the compressed engine's figures to stock's (medians of
        the repetitions' ratios), `repetitions`, `timelines` of the last one, and `refused`: why
        an engine did not start.

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

    On GPUs two engines share its memory, and graphs are captured as servers do; on CPUs, where that
    takes minutes, they are not.

    Args:
        benchmark: what is measured.
        cpu: whether vLLM's CPU build serves.
    """
    load = benchmark.load
    platform = {} if cpu else {"gpu_memory_utilization": 0.45, "enforce_eager": False}
    own = {"load_format": "dummy", "dtype": benchmark.shape.dtype, **benchmark.engine}
    return {**load.engine_options, **platform, **own}


def summarize(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians and ratios of repetitions; those of one number were taken in one turn."""
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
    for name, figure in RATIOS.items():
        found = [ours[figure] / theirs[figure] for ours, theirs in pairs if theirs[figure]]
        if found:
            ratios[name] = statistics.median(found)
    return {"ratios": ratios, "medians": medians, "repetitions": plain, "timelines": timelines}


def _reason(error: str) -> str:
    """The line of an engine's last words that says why it ended."""
    lines = [line for line in error.splitlines() if "Error" in line]
    return (lines or error.splitlines())[-1].strip()
