#!/usr/bin/env python3
"""Checks the Triton kernels on this machine's GPU, whole engines, and measures them.

    python scripts/gpu_check.py --plan      prints the commands for half an hour on a GPU
    python scripts/gpu_check.py [--part tests capture engine decode-only decode prefill events
        batched reading tune] [--quick] [--limit SECONDS] [--out FOLDER]

Needs an NVIDIA GPU, torch and triton. Uses numpy (for whole events), pytest, pytest-xdist and tqdm
where they are installed, and compares with vLLM's kernels where Python finds vllm. The parts
`engine` and `decode-only` need vLLM for CUDA. Writes gpu-<device>.json and
gpu-<device>.md after every part and every engine; parts that an earlier run left there stay if it
had the same settings, versions and sources. Ends with 1 if a check failed; then nothing is
measured.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_parts import plan as half_an_hour
from gpu_parts.goals import COMPRESSED, OFF, PIECEWISE, STOCK, goals
from gpu_parts.report import (
    Results,
    add_results,
    capture_passed,
    engine_passed,
    with_earlier,
    write_results,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BANDWIDTH_BYTES = 1 << 32
GPU_TESTS = (
    "tests/kernels",
    "tests/policies/test_devices.py",
    "tests/compression/test_events_on_accelerator.py",
    "tests/attention/test_decode_steps.py",
)
PYTEST_ENDS_BEFORE = 30  # seconds that are left when pytest is ended
CHECKS = ("capture", "tests")  # if one fails, nothing is measured
REHEARSED = ("capture", "engine", "decode-only")  # parts that a CPU can run, too
SHAPE_8B = "8b"  # as of --model
MOST_WORKERS = 8  # processes of pytest; each holds a context on the GPU


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--plan", action="store_true", help="print the commands for half an hour, and stop"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder")
    parser.add_argument("--quick", action="store_true", help="small contexts, few repetitions")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a page")
    parser.add_argument(
        "--limit",
        type=float,
        default=540,
        metavar="SECONDS",
        help="when this call is to be over: pytest is ended, and no engine started (%(default)s)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help=f"run {', '.join(REHEARSED)} on this machine's CPU, to check them",
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=("tests", *MEASUREMENTS),
        default=("tests", "capture", "decode", "prefill", "events", "batched", "reading"),
        help="what to do: everything but engine, decode-only and tune unless said",
    )
    _add_engine_options(parser)
    return parser.parse_args(arguments)


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the parts engine and decode-only."""
    group = parser.add_argument_group("engine and decode-only")
    group.add_argument(
        "--model",
        default=SHAPE_8B,
        help="name or directory; 8b has Llama-3.1-8B's shape and random weights (%(default)s)",
    )
    group.add_argument(
        "--layers", type=int, default=32, help="of the shape 8b; fewer start sooner (%(default)s)"
    )
    group.add_argument(
        "--engine",
        type=engine_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword argument of vllm.LLM",
    )
    group.add_argument(
        "--engines",
        nargs="+",
        choices=(COMPRESSED, STOCK, OFF, PIECEWISE),
        default=(COMPRESSED, STOCK, OFF, PIECEWISE),
        help="which, in this order: compressed as served; stock vLLM; ours that compresses nobody; "
        "compressed with vLLM's kernels between piecewise CUDA graphs",
    )
    group.add_argument("--kv-policy", default="adakv+criticalkv", help="as of serve (%(default)s)")
    group.add_argument("--kv-budget", type=budget, default=0.25, help="as of serve (%(default)s)")
    group.add_argument("--kv-trigger", default="prompt", help="as of serve (%(default)s)")
    group.add_argument(
        "--checked",
        action="store_true",
        help="end engines where a step waits for the GPU (VLLM_GPU_SYNC_CHECK=error) or a kernel "
        "is compiled while serving (--jit-monitor-mode error); times are not compared then",
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="serve the requests of engine once more under torch's profiler: kernels by time, and "
        "a timeline beside the log",
    )
    group.add_argument("--requests", type=int, default=20, help="of engine (%(default)s)")
    group.add_argument("--prompt", type=int, help="tokens of a long prompt (4096; quick: 1024)")
    group.add_argument("--output", type=int, default=64, help="tokens to generate (%(default)s)")
    group.add_argument(
        "--pool", type=int, metavar="N", help="memory for N uncompressed requests; all are long"
    )
    several = {"type": int, "nargs": "+", "metavar": "N"}
    group.add_argument("--batches", default=(1, 8, 64), **several, help="requests of decode-only")
    group.add_argument(
        "--lengths", default=(1024, 4096, 32768), **several, help="their tokens (1024 4096 32768)"
    )
    group.add_argument("--steps", type=int, default=128, help="of decode-only (%(default)s)")


def budget(text: str) -> int | float:
    """Parses a budget with the parser of `serve`."""
    from vllm_kvcompress.scheduling.budgets import parse_budget

    return parse_budget(text)


def engine_option(text: str) -> tuple[str, Any]:
    """Parses an engine option with the parser of `vllm-kvcompress eval`."""
    from vllm_kvcompress.cli import eval as eval_command

    return eval_command.engine_option(text)


def why_not(rehearses: bool) -> str | None:
    """Returns what is missing on this machine; None: nothing."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"gpu_check needs {' and '.join(missing)}: pip install {' '.join(missing)}."
    import torch

    if not rehearses and not torch.cuda.is_available():
        return (
            f"gpu_check needs an NVIDIA GPU that torch can use, and torch {torch.__version__} "
            "finds none; run it on a machine with one, with a CUDA build of torch."
        )
    return None


def run_pytest(quick: bool, limit_seconds: float, log: Path) -> str | None:
    """The last line of the tests for GPUs, kernels in bf16 alone if quick; None without pytest.

    What pytest prints is shown as it comes, and kept, so that a run that is ended says how far it
    came.

    Args:
        quick: whether to leave out the other types of numbers.
        limit_seconds: after which pytest is ended.
        log: takes what it prints.
    """
    if importlib.util.find_spec("pytest") is None:
        return None
    command = [sys.executable, "-m", "pytest", *GPU_TESTS, "-m", "gpu", "-v"]
    if quick:
        command += ["-k", "bfloat16 or test_device or events_on_a_gpu or test_decode_steps"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]
    return stream(command, limit_seconds, log)


def stream(command: Sequence[str], limit_seconds: float, log: Path) -> str:
    """Runs a command, showing and keeping what it prints; returns the last line.

    Args:
        command: what to run, in this repository.
        limit_seconds: after which it is ended, with all that it has started; an error then.
        log: takes what it prints.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        log.open("w") as copy,
        subprocess.Popen(command, cwd=ROOT, start_new_session=True, **piped) as process,
    ):
        overdue = threading.Timer(limit_seconds, os.killpg, (process.pid, signal.SIGKILL))
        overdue.start()
        last = "no output"
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                print(line, end="", flush=True, file=copy)
                last = line.strip("= \n") or last
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            overdue.cancel()
        if (code := process.wait()) < 0:
            return f"error: ended after {limit_seconds:.0f} s; before: {last}"
    return last if code == 0 else f"error, exit status {code}: {last}"


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Runs pytest and the kernels' checks."""
    from gpu_parts.checks import check_flash, check_kernels, check_selection
    from gpu_parts.flash import why_no_flash

    block_sizes = (16, 64) if options.quick else (16, 32, 64, 128)
    kernels = [*check_kernels(block_sizes), *check_selection()]
    if (reason := why_no_flash()) is None:
        kernels += check_flash(block_sizes)
    else:
        print(reason)
    log = options.out / "pytest.log"
    return {"kernels": kernels, "pytest": run_pytest(options.quick, seconds_left(options), log)}


def seconds_left(options: argparse.Namespace) -> float:
    """Returns the seconds until this call's time limit."""
    return max(1.0, float(options.deadline - time.monotonic() - PYTEST_ENDS_BEFORE))


def passed(checks: dict[str, Any]) -> bool:
    """Returns whether every check passed."""
    said = checks["pytest"] or ""
    return all(row["passed"] for row in checks["kernels"]) and not (
        "failed" in said or "error" in said
    )


def measure_decode(options: argparse.Namespace, _: Callable[[Results], None]) -> Results:
    """Measures decode attention, and the bandwidth that it is compared with."""
    from gpu_parts import decode, measure, vllm_attention

    if (reason := vllm_attention.why_not()) is not None:
        print(reason)
    read = measure.read_bandwidth(BANDWIDTH_BYTES, repeats(options))
    return {
        "read_bandwidth": read,
        "decode": decode.measure_decode(decode_plan(options), read),
    }


def measure_tune(options: argparse.Namespace, _: Callable[[Results], None]) -> Results:
    """Measures decode attention with other ways to split its work."""
    from gpu_parts import decode, measure

    read = measure.read_bandwidth(BANDWIDTH_BYTES, repeats(options))
    return {"read_bandwidth": read, "tuning": decode.tune_decode(decode_plan(options), read)}


def measure_prefill(options: argparse.Namespace, _: Callable[[Results], None]) -> Results:
    """Measures a chunk's attention over compressed pages."""
    from gpu_parts import prefill, vllm_attention

    if (reason := vllm_attention.why_not()) is not None:
        print(reason)
    plan = prefill.PrefillPlan(block_size=options.block_size, repeats=repeats(options))
    if options.quick:
        plan = replace(plan, context=8192, chunks=(512,))
    return {"prefill": prefill.measure_prefill(plan)}


def measure_events(options: argparse.Namespace, _: Callable[[Results], None]) -> Results:
    """Measures events, and the bandwidth that compaction is compared with."""
    from gpu_parts import events, measure

    if (reason := events.why_no_whole_events()) is not None:
        print(reason)
    prompts = (1024, 8192) if options.quick else (1024, 8192, 32768, 131072)
    copy = measure.copy_bandwidth(BANDWIDTH_BYTES, repeats(options))
    rows = events.measure_events(prompts, options.block_size, repeats(options), copy)
    return {"copy_bandwidth": copy, "events": rows}


def measure_batched(options: argparse.Namespace, _: Callable[[Results], None]) -> Results:
    """Measures events of prompts that end in one step, batched and one by one."""
    from gpu_parts import batched, events

    if (reason := events.why_no_whole_events()) is not None:
        print(reason)
        return {}
    tries = max(3, repeats(options) // 5)
    return {"batched": batched.measure_batched(16, 512, options.block_size, tries)}


def measure_reading(options: argparse.Namespace, _: Callable[[Results], None]) -> Results:
    """Measures how --kv-read chooses pages, and attention to these."""
    from gpu_parts import reading

    plan = reading.ReadPlan(block_size=options.block_size, repeats=repeats(options))
    if options.quick:
        plan = replace(plan, contexts=(8192,), batches=(1, 8))
    return {"reading": reading.measure_reading(plan)}


def measure_capture(options: argparse.Namespace, _: Callable[[Results], None]) -> Results:
    """Captures and replays decode steps, without vLLM."""
    from gpu_parts import capture

    plan = capture.CapturePlan(block_size=options.block_size)
    if options.quick:
        plan = replace(plan, rounds=12)
    if options.rehearse:
        plan = replace(plan, num_layers=2, small=True, device="cpu", rounds=12, longest=120)
    limit = seconds_left(options) / (2 if "tests" in options.part else 1)  # the rest is pytest's
    return {"capture": capture.measure_capture(plan, capture.POLICIES, options.out, limit)}


def measure_engines(options: argparse.Namespace, save: Callable[[Results], None]) -> Results:
    """Measures whole engines in the chosen parts."""
    import torch

    from gpu_parts import engine

    torch.cuda.empty_cache()  # engines want the whole GPU
    plan = engine_plan(options)

    def save_run(run: Results) -> None:
        save({"engine": {plan.label: run}})

    run = engine.measure_engines(plan, options.out, save_run, options.deadline)
    return {"engine": {plan.label: run}}


def engine_plan(options: argparse.Namespace) -> Any:
    """Returns what the engines are and what they serve."""
    from gpu_parts.engine import EnginePlan
    from gpu_parts.served import write_8b_shape

    model, engine = options.model, dict(options.engine)
    if model == SHAPE_8B:
        folder = options.out / f"{SHAPE_8B}-{options.layers}-layers"
        model = str(write_8b_shape(folder, options.layers))
        engine = {"load_format": "dummy", "dtype": "bfloat16", **engine}
    settings = {name: getattr(options, f"kv_{name}") for name in ("policy", "budget", "trigger")}
    decodes = "decode-only" in options.part
    return EnginePlan(
        model=model,
        settings=settings,
        engine=engine,
        names=tuple(options.engines),
        requests=options.requests if "engine" in options.part else 0,
        prompt=options.prompt or (1024 if options.quick else 4096),
        output=options.output,
        pool=options.pool,
        batches=tuple(options.batches) if decodes else (),
        lengths=tuple(options.lengths) if decodes else (),
        steps=options.steps,
        checked=options.checked,
        profiled=options.profile,
    )


# Each is given the options, and what writes results before it ends.
MEASUREMENTS: dict[str, Callable[[argparse.Namespace, Callable[[Results], None]], Results]] = {
    "capture": measure_capture,
    "engine": measure_engines,
    "decode-only": measure_engines,
    "decode": measure_decode,
    "prefill": measure_prefill,
    "events": measure_events,
    "batched": measure_batched,
    "reading": measure_reading,
    "tune": measure_tune,
}


def repeats(options: argparse.Namespace) -> int:
    """Returns how often measurements are repeated."""
    return 10 if options.quick else 50


def decode_plan(options: argparse.Namespace) -> Any:
    """What to measure of decode attention."""
    from gpu_parts.decode import DecodePlan

    plan = DecodePlan(block_size=options.block_size, repeats=repeats(options))
    return replace(plan, context=8192, batches=(1, 8)) if options.quick else plan


def sources() -> str:
    """Tells apart the code that was measured: the start of a hash over this package's files."""
    files = sorted((ROOT / "vllm_kvcompress").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def settings(options: argparse.Namespace) -> Results:
    """What all parts of a report have in common."""
    import torch
    import triton

    return {
        "device": "cpu" if options.rehearse else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "quick": options.quick,
        "block_size": options.block_size,
        "sources": sources(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts one after the other; 0 if all checks passed."""
    options = parse(arguments)
    if options.plan:
        print(half_an_hour.as_text())
        return 0
    if (reason := refusal(options)) is not None:
        print(reason, file=sys.stderr)
        return 2
    options.deadline = time.monotonic() + options.limit
    if options.checked:  # before vLLM is imported anywhere
        os.environ["VLLM_GPU_SYNC_CHECK"] = "error"
    results = with_earlier(settings(options), options.out)
    failed = False
    for name in parts_of(options):
        if failed and name not in CHECKS:
            break
        failed = not run_part(name, options, results) or failed
    for goal in goals(results):
        print(f"{'holds' if goal.holds else 'FAILS'}: {goal.text}: {goal.measured}")
    for path in write_results(results, options.out):
        print(path)
    return 1 if failed else 0


def refusal(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be followed here; None: they can."""
    others = [part for part in options.part if part not in REHEARSED]
    if options.rehearse and others:
        return f"--rehearse: {', '.join(others)} need a GPU; give --part {' '.join(REHEARSED)}."
    return why_not(options.rehearse)


def parts_of(options: argparse.Namespace) -> list[str]:
    """In order, checks first; engine and decode-only share the start of every engine."""
    parts = [name for name in (*CHECKS, *MEASUREMENTS) if name in options.part]
    parts = list(dict.fromkeys(parts))
    return [name for name in parts if name != "decode-only" or "engine" not in parts]


def run_part(name: str, options: argparse.Namespace, results: Results) -> bool:
    """Runs a part, and writes what it found; whether its checks passed."""

    def save(part: Results) -> None:
        add_results(results, part)
        write_results(results, options.out)

    if name == "tests":
        save({"checks": check(options)})
        return passed(results["checks"])
    part = MEASUREMENTS[name](options, save)
    save(part)
    if name == "capture":
        return capture_passed(part["capture"])
    return all(engine_passed(run) for run in part.get("engine", {}).values())


if __name__ == "__main__":
    sys.exit(main())
