#!/usr/bin/env python3
"""Scenarios of vLLM's own tests, run against stock vLLM and against this package.

    python scripts/checks/vllm_scenarios.py [--columns stock off all half] [--only served|engine]

They are vLLM 0.32's tests in what they ask, written anew (`vllm_scenario_parts/`): each names the
file and the tests that it follows. A scenario passes where its own assertions hold and, but in the
compressed column, where it says what it says on stock vLLM: texts, tokens, log-probabilities (to
0.001), kinds of refusals, and the scheduler's steps. Prints a table by vLLM's files; ends with 1
where stock vLLM passes and another column does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from soak_parts import models  # noqa: E402
from vllm_scenario_parts.columns import (  # noqa: E402
    COLUMNS,
    IN_ENGINE,
    SERVED,
    Column,
    Result,
    in_engine,
    served,
)
from vllm_scenario_parts.scenario import Scenario, difference  # noqa: E402


def judged(column: Column, result: Result, stock: Result) -> dict[str, str]:
    """Returns why scenarios failed in a column, by name."""
    failed = dict(result.failed)
    if column.is_exact:
        for name in result.said.keys() & stock.said.keys():
            if place := difference(stock.said[name], result.said[name]):
                failed[name] = f"stock vLLM says otherwise{place}"[:1000]
    return failed


def table(scenarios: Sequence[Scenario], failed: dict[str, dict[str, str]]) -> str:
    """Returns a table of passed scenarios by vLLM's test file and column."""
    lines = [
        f"| vLLM's tests | scenarios | {' | '.join(failed)} |",
        "|---" * (2 + len(failed)) + "|",
    ]
    for file in dict.fromkeys(scenario.file for scenario in scenarios):
        names = {scenario.name for scenario in scenarios if scenario.file == file}
        counts = [str(len(names - of_column.keys())) for of_column in failed.values()]
        lines.append(f"| `{file}` | {len(names)} | {' | '.join(counts)} |")
    names = {scenario.name for scenario in scenarios}
    counts = [str(len(names - of_column.keys())) for of_column in failed.values()]
    return "\n".join([*lines, f"| all | {len(names)} | {' | '.join(counts)} |"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the columns, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [column.name for column in COLUMNS]
    parser.add_argument("--columns", nargs="+", choices=names, default=names)
    parser.add_argument("--only", choices=("served", "engine"))
    parser.add_argument("--folder", type=Path, help="where the model and logs are kept")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    models.prepare(folder)
    kinds = [("served", served, SERVED), ("engine", in_engine, IN_ENGINE)]
    kinds = [kind for kind in kinds if options.only in (None, kind[0])]
    failed: dict[str, dict[str, str]] = {}
    stock = Result()
    for column in (column for column in COLUMNS if column.name in options.columns):
        result = Result()
        for kind, run, _ in kinds:
            print(f"{column.name}: {kind}", file=sys.stderr, flush=True)
            part = run(column, folder / "llama", folder / f"{column.name}-{kind}.log")
            result.said |= part.said
            result.failed |= part.failed
        stock = result if column.settings is None else stock
        failed[column.name] = judged(column, result, stock)
        for name, reason in failed[column.name].items():
            print(f"{column.name}: {name}: {reason}", flush=True)
    print(table([scenario for *_, part in kinds for scenario in part], failed))
    of_stock = failed.get("stock", {}).keys()
    return 1 if any(each.keys() - of_stock for each in failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
