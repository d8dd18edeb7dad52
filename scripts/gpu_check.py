#!/usr/bin/env python3
"""Checks the Triton kernels on this machine's GPU, and measures them.

    python scripts/gpu_check.py [--quick] [--tune] [--out docs/results]

Needs an NVIDIA GPU, torch and triton; uses pytest and tqdm where they are installed. Writes
gpu-<device>.json and gpu-<device>.md. Ends with 1 if a check failed; then nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.report import Results, write_results  # noqa: E402

BANDWIDTH_BYTES = 1 << 32


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder")
    parser.add_argument("--quick", action="store_true", help="small contexts, few repetitions")
    parser.add_argument("--tune", action="store_true", help="also try other cuts of decoding")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--checks-only", action="store_true", help="measure nothing")
    return parser.parse_args(arguments)


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


def run_pytest() -> str | None:
    """The last line of the kernel tests on the GPU; None without pytest."""
    if importlib.util.find_spec("pytest") is None:
        return None
    command = [sys.executable, "-m", "pytest", "tests/kernels", "-m", "gpu", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
    return (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")


def check() -> dict[str, Any]:
    """Both kinds of checks."""
    from benchmarks.gpu.checks import check_kernels

    return {"kernels": check_kernels(), "pytest": run_pytest()}


def passed(checks: dict[str, Any]) -> bool:
    """Whether nothing failed."""
    said = checks["pytest"] or ""
    return all(row["passed"] for row in checks["kernels"]) and not (
        "failed" in said or "error" in said
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Bandwidths, decode attention, events, and the cuts if asked for."""
    from benchmarks.gpu import decode, events, measure

    repeats = 10 if options.quick else 50
    plan = decode.DecodePlan(block_size=options.block_size, repeats=repeats)
    prompts: tuple[int, ...] = (8192, 32768, 131072)
    if options.quick:
        plan = decode.DecodePlan(8192, (1, 8), block_size=options.block_size, repeats=repeats)
        prompts = (8192,)
    read = measure.read_bandwidth(BANDWIDTH_BYTES, repeats)
    copy = measure.copy_bandwidth(BANDWIDTH_BYTES, repeats)
    found: dict[str, Any] = {"bandwidth": {"read": read, "copy": copy}}
    found["decode"] = decode.measure_decode(plan, read)
    found["events"] = events.measure_events(prompts, options.block_size, repeats, copy)
    if options.tune:
        found["tuning"] = decode.tune_decode(plan, read)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; 0 if all checks passed."""
    options = parse(arguments)
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 2
    import torch
    import triton

    results: Results = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "quick": options.quick,
        "block_size": options.block_size,
        "checks": check(),
    }
    good = passed(results["checks"])
    if good and not options.checks_only:
        results.update(measure(options))
    for path in write_results(results, options.out):
        print(path)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
