#!/usr/bin/env python3
"""Checks the Triton kernels on this machine's GPU, a whole engine, and measures them.

    python scripts/gpu_check.py [--part tests engine decode prefill events batched reading tune]
        [--quick] [--model MODEL] [--engine KEY=VALUE] [--out FOLDER]

Needs an NVIDIA GPU, torch and triton. Uses numpy (for whole events), pytest, pytest-xdist and tqdm
where they are installed, and compares with vLLM's kernels where Python finds vllm. The part
`engine` needs vLLM for CUDA, and a model (any that vLLM takes; with --engine load_format=dummy its
configuration is enough). Writes gpu-<device>.json and gpu-<device>.md after every part; parts that
an earlier run left there stay if it had the same settings, versions and kernels. Ends with 1 if a
check failed; then nothing is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_parts.report import Results, engine_passed, with_earlier, write_results

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BANDWIDTH_BYTES = 1 << 32
GPU_TESTS = (
    "tests/kernels",
    "tests/policies/test_devices.py",
    "tests/compression/test_events_on_accelerator.py",
    "tests/attention/test_decode_steps.py",
)
MOST_WORKERS = 8  # processes of pytest; each holds a context on the GPU


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder")
    parser.add_argument("--quick", action="store_true", help="small contexts, few repetitions")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="of the engine (%(default)s)")
    parser.add_argument(
        "--engine",
        type=engine_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword argument of vllm.LLM",
    )
    parser.add_argument(
        "--part",
        nargs="+",
        choices=("tests", *MEASUREMENTS),
        default=("tests", "decode", "prefill", "events", "batched", "reading"),
        help="what to do: everything but engine and tune unless said",
    )
    return parser.parse_args(arguments)


def engine_option(text: str) -> tuple[str, Any]:
    """As of `vllm-kvcompress eval`, whose imports only this part needs."""
    from vllm_kvcompress.cli import eval as eval_command

    return eval_command.engine_option(text)


def why_not() -> str | None:
    """What is missing here, as a sentence; None where everything needed is there."""
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"gpu_check needs {' and '.join(missing)}: pip install {' '.join(missing)}."
    import torch

    if not torch.cuda.is_available():
        return (
            f"gpu_check needs an NVIDIA GPU that torch can use, and torch {torch.__version__} "
            "finds none; run it on a machine with one, with a CUDA build of torch."
        )
    return None


def run_pytest(quick: bool) -> str | None:
    """The last line of the tests for GPUs, kernels in bf16 alone if quick; None without pytest."""
    if importlib.util.find_spec("pytest") is None:
        return None
    command = [sys.executable, "-m", "pytest", *GPU_TESTS, "-m", "gpu", "-q"]
    if quick:
        command += ["-k", "bfloat16 or test_device or events_on_a_gpu or test_decode_steps"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
    return (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of checks."""
    from gpu_parts.checks import check_flash, check_kernels, check_selection
    from gpu_parts.flash import why_no_flash

    block_sizes = (16, 64) if options.quick else (16, 32, 64, 128)
    kernels = [*check_kernels(block_sizes), *check_selection()]
    if (reason := why_no_flash()) is None:
        kernels += check_flash(block_sizes)
    else:
        print(reason)
    return {"kernels": kernels, "pytest": run_pytest(options.quick)}


def passed(checks: dict[str, Any]) -> bool:
    """Whether nothing failed."""
    said = checks["pytest"] or ""
    return all(row["passed"] for row in checks["kernels"]) and not (
        "failed" in said or "error" in said
    )


def measure_decode(options: argparse.Namespace) -> Results:
    """Decode attention, and the bandwidth that it is compared with."""
    from gpu_parts import decode, measure, vllm_attention

    if (reason := vllm_attention.why_not()) is not None:
        print(reason)
    read = measure.read_bandwidth(BANDWIDTH_BYTES, repeats(options))
    return {
        "read_bandwidth": read,
        "decode": decode.measure_decode(decode_plan(options), read),
    }


def measure_tune(options: argparse.Namespace) -> Results:
    """Decode attention with its work cut in other ways."""
    from gpu_parts import decode, measure

    read = measure.read_bandwidth(BANDWIDTH_BYTES, repeats(options))
    return {"read_bandwidth": read, "tuning": decode.tune_decode(decode_plan(options), read)}


def measure_prefill(options: argparse.Namespace) -> Results:
    """A chunk's attention over compressed pages."""
    from gpu_parts import prefill, vllm_attention

    if (reason := vllm_attention.why_not()) is not None:
        print(reason)
    plan = prefill.PrefillPlan(block_size=options.block_size, repeats=repeats(options))
    if options.quick:
        plan = replace(plan, context=8192, chunks=(512,))
    return {"prefill": prefill.measure_prefill(plan)}


def measure_events(options: argparse.Namespace) -> Results:
    """Events, and the bandwidth that compaction is compared with."""
    from gpu_parts import events, measure

    if (reason := events.why_no_whole_events()) is not None:
        print(reason)
    prompts = (8192,) if options.quick else (8192, 32768, 131072)
    copy = measure.copy_bandwidth(BANDWIDTH_BYTES, repeats(options))
    rows = events.measure_events(prompts, options.block_size, repeats(options), copy)
    return {"copy_bandwidth": copy, "events": rows}


def measure_batched(options: argparse.Namespace) -> Results:
    """Prompts that end in one step, together and one by one."""
    from gpu_parts import batched, events

    if (reason := events.why_no_whole_events()) is not None:
        print(reason)
        return {}
    tries = max(3, repeats(options) // 5)
    return {"batched": batched.measure_batched(16, 512, options.block_size, tries)}


def measure_reading(options: argparse.Namespace) -> Results:
    """--kv-read's choice of pages, and attention to these."""
    from gpu_parts import reading

    plan = reading.ReadPlan(block_size=options.block_size, repeats=repeats(options))
    if options.quick:
        plan = replace(plan, contexts=(8192,), batches=(1, 8))
    return {"reading": reading.measure_reading(plan)}


def measure_engine(options: argparse.Namespace) -> Results:
    """A whole engine, stock and compressed."""
    from gpu_parts import engine

    plan = engine.EnginePlan(model=options.model, engine=dict(options.engine))
    if options.quick:
        plan = replace(plan, prompt=1024)
    return {"engine": engine.measure_engine(plan, options.out)}


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], Results]] = {
    "engine": measure_engine,
    "decode": measure_decode,
    "prefill": measure_prefill,
    "events": measure_events,
    "batched": measure_batched,
    "reading": measure_reading,
    "tune": measure_tune,
}


def repeats(options: argparse.Namespace) -> int:
    """Of every measurement."""
    return 10 if options.quick else 50


def decode_plan(options: argparse.Namespace) -> Any:
    """What to measure of decode attention."""
    from gpu_parts.decode import DecodePlan

    plan = DecodePlan(block_size=options.block_size, repeats=repeats(options))
    return replace(plan, context=8192, batches=(1, 8)) if options.quick else plan


def sources() -> str:
    """Tells apart the kernels that were measured: the start of a hash over their files."""
    files = sorted((ROOT / "vllm_kvcompress" / "kernels").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def settings(options: argparse.Namespace) -> Results:
    """What all parts of a report have in common."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "quick": options.quick,
        "block_size": options.block_size,
        "sources": sources(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts one after the other; 0 if all checks passed."""
    options = parse(arguments)
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 2
    results = with_earlier(settings(options), options.out)
    if "tests" in options.part:
        results["checks"] = check(options)
        write_results(results, options.out)
        if not passed(results["checks"]):
            return 1
    for name, measure in MEASUREMENTS.items():
        if name in options.part:
            results.update(measure(options))
            write_results(results, options.out)
    if "engine" in options.part and not engine_passed(results["engine"]):
        return 1
    for path in write_results(results, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
