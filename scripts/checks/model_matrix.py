#!/usr/bin/env python3
"""Which of vLLM's text models are served: one tiny model of each class, stock and compressed.

    python scripts/checks/model_matrix.py [CLASS ...] [--folder DIR] [--again] [--write]

Each class is started as `serve` does, with random weights, first by stock vLLM, then with this
package: at budget 1.0 it has to give stock's tokens and log-probabilities, at 0.25 it has to free
blocks. Both have plain operators of `model_parts` where vLLM's CPU build lacks some. Results are
appended to results.jsonl in the folder, and what is there is not run again. --write makes
docs/models.md of them. A dozen classes, Qwen 3.5's among them, need torchvision, whose package for
this build of torch is in PyTorch's own index.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from model_parts import configs, engines  # noqa: E402

SECONDS = 180  # for an engine
HYBRID = "--no-enable-prefix-caching"
# Options that classes need on CPUs, and why.
NEEDED = {
    HYBRID: "which stock vLLM needs",
    "--block-size=16": "which vLLM's MLA kernel there reads",
}


def classes() -> list[str]:
    """Returns the decoder-only text models in vLLM's registry."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    return list(_TEXT_GENERATION_MODELS)


def run(kind: str, model: Path, options: Sequence[str]) -> dict[str, Any]:
    """Runs an engine in a process of its own, and returns its report."""
    from tests.forked import forked

    report, log = model / f"{kind}.json", model / f"{kind}.log"
    report.unlink(missing_ok=True)
    if model.name in configs.ON_GPUS:
        return run_for_gpus(kind, model, report, log, options)
    process = forked(engines.run, kind, str(model), list(options), str(report), str(log))
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return {"error": f"not done after {SECONDS} seconds"}
    if not report.exists():
        return {"error": f"ended with {process.exitcode}"}
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def run_for_gpus(
    kind: str, model: Path, report: Path, log: Path, options: Sequence[str]
) -> dict[str, Any]:
    """Does the same on the path for GPUs."""
    given = kind, str(model), str(report), str(log), *options
    command = [sys.executable, "-m", "model_parts.gpu_path", *given]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "scripts" / "checks")))
    try:
        subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {SECONDS} seconds"}
    if not report.exists():
        return {"error": "ended without a report"}
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def result_of(name: str, folder: Path) -> dict[str, Any]:
    """Checks and runs a class, and returns its row: class, result, reason, layers."""
    try:
        model = configs.write(name, folder)
    except Exception as error:
        return {"class": name, "result": "no config", "reason": f"{type(error).__name__}: {error}"}
    row: dict[str, Any] = {"class": name, "options": []}
    always = configs.OPTIONS.get(name, [])
    for options in () if name in configs.ON_GPUS else (always, [*always, HYBRID]):
        checked = run("check", model, options)
        if checked.get("kind") == "UnsupportedError":
            return {**row, "result": "refused", "reason": checked["error"]}
        if not checked:
            break
    first: dict[str, Any] = {}
    for row["options"], dtype in product((always, [*always, HYBRID]), ("float32", "bfloat16")):
        options = [*row["options"], "--dtype", dtype]
        stock = run("stock", model, options)
        if "error" not in stock:
            break
        first = first or stock
    else:
        return {**row, "result": "not started", "reason": said(first)}
    return {**row, "dtype": dtype, **judged(stock, run("compressed", model, options))}


def said(report: dict[str, Any]) -> str:
    """Returns an engine's error, with its kind unless it is a refusal."""
    kind = report.get("kind", "UnsupportedError")
    prefix = "" if kind == "UnsupportedError" else f"{kind}: "
    return f"{prefix}{report['error']}"


def judged(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Returns result, reason and layers of a class that stock vLLM serves."""
    if "error" in ours:
        refused = ours.get("kind") == "UnsupportedError"
        return {"result": "refused" if refused else "failed", "reason": said(ours)}
    layers = ours["layers"]
    if ours["answer"] != stock["answer"] or not ours["unchanged"]:
        return {"result": "failed", "reason": "budget 1.0 differs from stock", "layers": layers}
    if not any(freed > written for freed, written in ours["events"]):
        return {"result": "failed", "reason": "no block was freed", "layers": layers}
    if ours["compressed"][0][0] != stock["answer"][0][0]:
        return {"result": "failed", "reason": "another first token", "layers": layers}
    part = layers.keys() != {"CompressedAttentionSpec"}
    return {"result": "in part" if part else "served", "reason": "", "layers": layers}


KINDS = {
    "DependentSlidingWindowSpec": "sliding-window layers",
    "DependentChunkedLocalSpec": "layers that attend within chunks",
    "DependentMambaSpec": "Mamba or linear-attention layers",
    "FullAttentionSpec": "other attention layers",
}
SUMMARY = """\
Of the {total} decoder-only text model classes in vLLM 0.32's registry **{all_served} are
compressed** ({share:.0f}%), {served} in all of their layers and {in_part} in part, in the
layers that keep every token. {refused} are refused, {failed} fail, and {not_started} do not start
in stock vLLM.
"""
HEAD = """# Models

{summary}

A class is *served* when its tiny random model, started on a CPU as `serve` starts it, gives stock
vLLM's tokens and log-probabilities at a budget of 1.0, and at 0.25 frees blocks after stock's first
token. Where vLLM's CPU build lacks an operator, both have a plain one. Classes that it
serves on GPUs alone took the [path for GPUs](limits.md#where-it-runs), on a CPU.
`vllm-kvcompress doctor MODEL --kv-policy snapkv` says the same of a model's own `config.json`: it
builds the layers without weights. `scripts/checks/model_matrix.py --write` makes this page.

| result | why, or what is not compressed | classes |
|---|---|---|
"""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Returns docs/models.md."""
    counts = Counter(row["result"] for row in rows)
    served = counts["served"] + counts["in part"]
    not_started = counts["not started"] + counts["no config"]
    summary = SUMMARY.format(
        total=len(rows),
        all_served=served,
        share=100 * served / len(rows),
        served=counts["served"],
        in_part=counts["in part"],
        refused=counts["refused"],
        failed=counts["failed"],
        not_started=not_started,
    )
    head = HEAD.format(summary=fill(summary, 120))
    order = ["served", "in part", "refused", "failed", "not started", "no config"]
    alike: dict[tuple[int, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: row["class"].lower()):
        alike.setdefault((order.index(row["result"]), why(row)), []).append(f"`{row['class']}`")
    lines = [
        f"| {order[result]} | {reason} | {', '.join(alike[result, reason])} |"
        for result, reason in sorted(alike)
    ]
    return head + "\n".join(lines) + "\n"


def why(row: dict[str, Any]) -> str:
    """Returns the last column of a class."""
    if row["result"] in ("served", "in part"):
        beside = [text for kind, text in KINDS.items() if kind in row["layers"]]
        options = [f"on CPUs with `{option}`, {NEEDED[option]}" for option in row["options"]]
        on_gpus = configs.ON_GPUS.get(row["class"])
        return "; ".join([*beside, *options, *([f"on GPUs alone: {on_gpus}"] if on_gpus else [])])
    reason = row["reason"].partition(" [type=")[0].partition("; ")[0]
    reason = reason.rpartition("Value error, ")[2] if "Value error, " in reason else reason
    if "failed to be inspected" in reason:
        reason = "vLLM cannot inspect the class"
    reason = re.sub(r"\w+(\.\w+)*\.layers\.[\w.]+", "a layer", reason)
    reason = reason.replace(row["class"], "the model").partition(". ")[0]
    return " ".join(reason.replace("|", "/").replace("<", "").split())[:160].rstrip(". ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what has no result yet; returns 1 if a class fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("classes", nargs="*", help="default: all")
    parser.add_argument("--folder", type=Path, help="where results and logs are kept")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--write", action="store_true", help="make docs/models.md of all results")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    rows = {}
    if path.exists():
        rows = {row["class"]: row for row in map(json.loads, path.read_text().splitlines())}
    from tqdm import tqdm

    for name in tqdm(options.classes or classes()):
        if name in rows and not options.again:
            continue
        rows[name] = result_of(name, folder)
        with path.open("a") as file:
            file.write(json.dumps(rows[name]) + "\n")
        tqdm.write(f"{name}: {rows[name]['result']} {rows[name]['reason']}")
    if options.write:
        (ROOT / "docs" / "models.md").write_text(page(list(rows.values())))
    return 1 if any(row["result"] == "failed" for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
