"""`vllm-kvcompress bench`: compares stock vLLM with compressed serving, as ratios."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from vllm_kvcompress.cli.eval import add_engine_option
from vllm_kvcompress.cli.loss_budget import resolve_budget
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.config.texts import start_lines
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import add_flags
from vllm_kvcompress.tools.benchmark import report
from vllm_kvcompress.tools.benchmark.measure import Benchmark, measure
from vllm_kvcompress.tools.benchmark.scenarios import SCENARIOS, SIZES, Size
from vllm_kvcompress.tools.benchmark.shapes import ModelShape
from vllm_kvcompress.tools.dtypes import dtype_text
from vllm_kvcompress.tools.files import make_folder

_SETTINGS = (
    *("policy", "budget", "calibration", "trigger", "reuse_conversations", "spill", "read"),
    *("draft", "params", "shadow"),
)
_DESCRIPTION = """\
Drives a load through stock vLLM and through compressed serving, in turns, on a model with random
weights, and writes the figures of both and the ratios between them:

{scenarios}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's description and options."""
    summaries = {name: str(load.__doc__).partition("\n")[0] for name, load in SCENARIOS.items()}
    scenarios = "\n".join(f"  {name:<12}  {summary}" for name, summary in summaries.items())
    parser.description = _DESCRIPTION.format(scenarios=scenarios)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--scenario",
        choices=(*SCENARIOS, "all"),
        action="append",
        required=True,
        help="what to measure; may be given several times",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="takes SCENARIO.json, SCENARIO.md, SCENARIO.svg and engines.log",
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured repetitions (3)")
    ours = parser.add_argument_group("compression, as of serve; --kv-policy is adakv unless said")
    add_flags(ours, Settings, "settings", _SETTINGS)
    _add_load(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("model and load")
    load.add_argument(
        "--shape",
        default="",
        metavar="NAME=N,...",
        help="the model's layers (4), hidden (512), heads (8), kv_heads (8), head_size (128), "
        "dtype (bfloat16; float32 on CPUs that would emulate it)",
    )
    load.add_argument(
        "--requests", type=int, metavar="N", help="number of requests (32; long-answers: 64)"
    )
    load.add_argument(
        "--prompt",
        type=int,
        metavar="N",
        help="tokens of a prompt (4096; long-decode: 32768, oversize: 16384, long-answers: 512)",
    )
    load.add_argument(
        "--output",
        type=int,
        metavar="N",
        help="tokens that a request generates (256; long-decode and oversize: 64, long-answers: "
        "4096)",
    )
    add_engine_option(load)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints tables and writes the figures; goes on where a run was stopped."""
    names = (
        tuple(SCENARIOS)
        if "all" in arguments.scenario
        else tuple(dict.fromkeys(arguments.scenario))
    )
    make_folder(arguments.out)
    for name in names:
        benchmark = benchmark_of(name, arguments)
        if (table := report.former(benchmark, arguments.out)) is not None:
            print(f"{name}: measured before; another folder, or without {table}, measures it anew")
            print(table.read_text())
            continue
        print(f"{name}: {start_lines(Settings.from_dict(benchmark.effective_settings))[0]}")
        print(f"{name}: {dtype_text(benchmark.shape.dtype)}", flush=True)
        result = measure(benchmark, arguments.out / "engines.log")
        written = report.write(benchmark, result, arguments.out)
        print(written[1].read_text())
        print("written: " + ", ".join(map(str, written)))
    return 0


def benchmark_of(scenario: str, arguments: argparse.Namespace) -> Benchmark:
    """The benchmark of a scenario that the options ask for.

    Raises:
        ConfigError: a setting that cannot work.
    """
    sizes = {key: getattr(arguments, key) for key in ("requests", "prompt", "output")}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    if any(value < 1 for value in (*sizes.values(), arguments.repeats)):
        raise ConfigError("--requests, --prompt, --output, --repeats: expected at least 1.")
    settings = Settings.from_dict(resolve_budget({"policy": "adakv"} | arguments.settings, ""))
    return Benchmark(
        scenario=scenario,
        size=replace(SIZES.get(scenario, Size()), **sizes),
        shape=ModelShape.parse(arguments.shape),
        settings=settings.to_dict(),
        repeats=arguments.repeats,
        engine=dict(arguments.engine),
    )
