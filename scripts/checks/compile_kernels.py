#!/usr/bin/env python3
"""Compiles every Triton kernel for GPUs that need not be installed; prints what programs use.

    python scripts/checks/compile_kernels.py [--targets 80 86 ...] [--head-sizes 64 128 ...]
                                      [--dtypes bfloat16 ...] [--block-sizes 16 ...] [--jobs N]

Prints two tables in Markdown: shared memory, and the kernels of whose threads registers spill.
Programs that a GPU has no room for are refused and compiled again with half the rows, as when the
kernels are launched. Ends with 1 if some kernel does not compile, or has no size that fits. Needs
torch and Triton, no GPU; about a quarter of an hour on two cores for everything.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TARGETS = (80, 86, 89, 90, 100, 120)  # as in `tests.kernels.compiling`, which imports Triton
HEAD_SIZES = (64, 96, 128, 256)
FEW_BYTES = 10_000  # of shared memory: kernels that take no more anywhere are not in the table


@dataclass(frozen=True)
class Shape:
    """What kernels are compiled for.

    Attributes:
        target: compute capability, 90 for 9.0.
        head_size: elements of a key.
        dtype: torch's name of the type.
        block_size: tokens of a page.
    """

    target: int
    head_size: int
    dtype: str
    block_size: int


@dataclass(frozen=True)
class Row:
    """One kernel, as compiled for one shape.

    Attributes:
        kernel: its launcher's name and its own.
        shape: what for.
        shared_bytes: of a program; None where it did not compile or nothing fits.
        refused_bytes: what larger programs would have taken, the first of them first.
        registers, spilled_bytes: of a thread.
        error: why there is none.
    """

    kernel: str
    shape: Shape
    shared_bytes: int | None
    refused_bytes: tuple[int, ...] = ()
    registers: int = 0
    spilled_bytes: int = 0
    error: str = ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=HEAD_SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16])
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    return parser.parse_args(arguments)


def compile_shape(shape: Shape) -> list[Row]:
    """Every kernel for one shape; in a process of its own, since Triton must not interpret."""
    import torch

    from tests.kernels.compiled_cases import launches, launches_without_pages
    from tests.kernels.compiling import compile_launch

    torch.set_num_threads(1)
    rows = []
    over_pages = launches(shape.head_size, shape.block_size, getattr(torch, shape.dtype))
    for launch in (*over_pages, *launches_without_pages()):
        try:
            compiled = compile_launch(shape.target, launch.launcher, *launch.args)
        except Exception as error:
            rows.append(Row(launch.name, shape, None, error=f"{type(error).__name__}: {error}"))
            continue
        refused: list[int] = []
        for kernel in compiled:
            if not kernel.fits:
                refused.append(kernel.shared_bytes)
                continue
            name = f"{launch.name} `{kernel.name}`"
            used = (kernel.shared_bytes, tuple(refused), *kernel.registers())
            rows.append(Row(name, shape, *used))
            refused = []
    return rows


def compile_all(shapes: Sequence[Shape], jobs: int) -> Iterator[Row]:
    """Rows of all shapes; progress goes to standard error."""
    os.environ["TRITON_INTERPRET"] = "0"
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for number, rows in enumerate(pool.map(compile_shape, shapes), start=1):
            print(f"{number} of {len(shapes)} shapes", file=sys.stderr)
            yield from rows


def shared_table(rows: Sequence[Row]) -> Iterator[str]:
    """KB of shared memory by target, for each head size; cursive where larger ones were refused."""
    targets = sorted({row.shape.target for row in rows})
    sizes = sorted({row.shape.head_size for row in rows})
    columns = {target: _column(rows, target) for target in targets}
    alike: dict[str, list[str]] = {}
    for target, column in columns.items():
        alike.setdefault(repr(column), []).append(f"{target // 10}.{target % 10}")
    shown = [columns[round(10 * float(names[0]))] for names in alike.values()]
    yield (
        f"| kernel, head size {' / '.join(map(str, sizes))} | "
        + " | ".join(", ".join(names) for names in alike.values())
        + " |"
    )
    yield "|---" * (1 + len(shown)) + "|"
    for kernel in dict.fromkeys(row.kernel for row in rows):
        most = max(row.shared_bytes or 0 for row in rows if row.kernel == kernel)
        if most > FEW_BYTES:
            yield (
                f"| {kernel} | " + " | ".join(column.get(kernel, "none") for column in shown) + " |"
            )


def _column(rows: Sequence[Row], target: int) -> dict[str, str]:
    """A cell for each kernel: its largest program for every head size, `none` where nothing is."""
    sizes = sorted({row.shape.head_size for row in rows})
    cells: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: row.shared_bytes or 0):
        if row.shape.target == target:
            cells.setdefault(row.kernel, {})[row.shape.head_size] = row
    return {
        kernel: " / ".join(_kilobytes(cell.get(size)) for size in sizes)
        for kernel, cell in cells.items()
    }


def _kilobytes(row: Row | None) -> str:
    if row is None or row.shared_bytes is None:
        return "none"
    shown = f"{row.shared_bytes / 1000:.0f}"
    return f"*{shown}*" if row.refused_bytes else shown


def spills_table(rows: Sequence[Row]) -> Iterator[str]:
    """Where registers spill: the worst head size of each kernel and target, the worst first."""
    worst: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = (row.kernel, row.shape.target)
        if row.spilled_bytes > (worst[key].spilled_bytes if key in worst else 0):
            worst[key] = row
    yield "| kernel | compute capability | head size | registers | bytes spilled by a thread |"
    yield "|---|---|---|---|---|"
    for row in sorted(worst.values(), key=lambda row: -row.spilled_bytes):
        target = f"{row.shape.target // 10}.{row.shape.target % 10}"
        numbers = f"{row.shape.head_size} | {row.registers} | {row.spilled_bytes}"
        yield f"| {row.kernel} | {target} | {numbers} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles and prints; returns 0 if every kernel compiles and fits."""
    options = parse(arguments)
    shapes = product(options.targets, options.head_sizes, options.dtypes, options.block_sizes)
    rows = list(compile_all([Shape(*shape) for shape in shapes], options.jobs))
    import triton

    print(f"Triton {triton.__version__}, {len(rows)} kernels\n")
    print(*shared_table(rows), "", *spills_table(rows), sep="\n")
    failed = [row for row in rows if row.shared_bytes is None]
    for row in failed:
        print(f"{row.kernel}, {row.shape}: {row.error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
