"""What was measured on a GPU, as JSON and as tables. Pure text: needs neither torch nor triton."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Results = dict[str, Any]
# What parts that are measured one after the other must have in common to be one report.
SETTINGS = ("device", "versions", "quick", "block_size", "sources")
STOCK, COMPRESSED, PIECEWISE = "stock", "compressed", "compressed, piecewise graphs"
MIB = 2**20
# Of attention, as parts name them.
KERNELS = {
    "paged": "this package's",
    "vllm": "vLLM's Triton kernel",
    "flash": "FlashAttention",
    "torch": "torch's, contiguous",
}
# Of events of one step, as `batched.WAYS` names them.
WAYS = {"alone": "one by one", "at_once": "layers at once", "together": "together"}
BANDWIDTHS = ("read_bandwidth", "copy_bandwidth")


def result_files(device: str, folder: Path) -> tuple[Path, Path]:
    """gpu-<device>.json and gpu-<device>.md."""
    name = "gpu-" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"{name}.json", folder / f"{name}.md"


def with_earlier(results: Results, folder: Path) -> Results:
    """The results, and the parts that an earlier run with the same settings left in the folder."""
    numbers, _ = result_files(str(results["device"]), folder)
    if not numbers.exists():
        return results
    earlier = json.loads(numbers.read_text(encoding="utf-8"))
    same = all(earlier.get(name) == results[name] for name in SETTINGS)
    return {**earlier, **results} if same else results


def write_results(results: Results, folder: Path) -> tuple[Path, Path]:
    """Writes both files, and returns where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, text = result_files(str(results["device"]), folder)
    numbers.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text.write_text(as_markdown(results), encoding="utf-8")
    return numbers, text


def as_markdown(results: Results) -> str:
    """The whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        f"# Kernels on {results['device']}",
        f"Measured by `scripts/gpu_check.py`{_flags(results)} with {versions}. "
        "Times are medians on the device, of kernels from replayed graphs with flushed caches.",
    ]
    sections = {
        "checks": _checks,
        "engine": _engine,
        "bandwidth": _bandwidth,
        "decode": _decode,
        "prefill": _prefill,
        "events": _events,
        "batched": _batched,
        "reading": _reading,
        "tuning": _tuning,
    }
    bandwidths = {name: results[name] for name in BANDWIDTHS if name in results}
    shown = {**results, "bandwidth": bandwidths}
    parts += [section(shown[name]) for name, section in sections.items() if shown.get(name)]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = [list(header), ["---:" if _is_number(cell) else "---" for cell in rows[0]]]
    lines += [[str(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _is_number(cell: Any) -> bool:
    return bool(re.match(r"^-?[\d.]", str(cell)))


def _flags(results: Results) -> str:
    return " `--quick`" if results["quick"] else ""


def _share(number: float) -> str:
    return f"{100 * number:.1f}%"


def _checks(checks: Results) -> str:
    failed = [row for row in checks["kernels"] if not row["passed"]]
    text = f"{len(checks['kernels']) - len(failed)} of {len(checks['kernels'])} checks passed."
    if failed:
        cells = [(row["kernel"], row["block_size"], f"{row['error']:.3g}") for row in failed]
        text += "\n\nFailed:\n\n" + table(("kernel", "block size", "error"), cells)
    if checks["pytest"] is not None:
        text += f" pytest: {checks['pytest']}."
    return "## Checks\n\n" + text


def engine_passed(results: Results) -> bool:
    """Whether all engines served: an event per long request, every block given back, and no
    more memory taken beyond stock's than was left for it."""
    engines = dict(results["engines"])
    if any("refused" in row for row in engines.values()):
        return False
    stock = engines.pop(STOCK)
    return stock["events"] == stock["lost_blocks"] == 0 and all(
        ours["events"] == results["long"]
        and ours["lost_blocks"] == 0
        and ours["compiled"] <= stock["compiled"]
        and ours["taken_bytes"] - stock["taken_bytes"] <= ours["left_bytes"]
        for ours in engines.values()
    )


def _engine(results: Results) -> str:
    engines = results["engines"]
    text = (
        f"## A whole engine\n\n{results['model']}, {results['long']} requests of "
        f"{results['prompt']} tokens and {results['short']} too short to be compressed, at once; "
        f"compressed with {results['settings']}. "
        f"{'Passed' if engine_passed(results) else 'Failed'}."
    )
    refused = {name: row["refused"] for name, row in engines.items() if "refused" in row}
    for name, reason in refused.items():
        text += f"\n\n{name} ended: {reason}"
    cells = [
        (
            name,
            f"{row['start_seconds']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{1e3 * row['first_token_seconds']:.0f}",
            f"{1e3 * row['token_seconds']:.1f}",
            row["events"],
            row["lost_blocks"],
            row["compiled"],
            f"{row['taken_bytes'] / MIB:.0f}",
            f"{row['left_bytes'] / MIB:.0f}",
            row["equal"],
        )
        for name, row in engines.items()
        if name not in refused
    ]
    if not cells:
        return text
    header = ("engine", "start, s", "tokens/s", "first token, ms", "next ones, ms")
    more = ("events", "blocks lost", "kernels compiled while serving")
    taken = ("taken while serving, MiB", "left for it, MiB")
    equal = "of the short ones with stock's reply"
    return text + "\n\n" + table((*header, *more, *taken, equal), cells)


def _bandwidth(bandwidths: Results) -> str:
    cells = [(name.partition("_")[0], f"{bandwidths[name] / 1e12:.2f}") for name in bandwidths]
    return "## Bandwidth\n\n" + table(("", "TB/s"), cells)


def _decode(rows: Sequence[Results]) -> str:
    header = ("requests", "kept", "heads", "outputs", "µs", "host, µs", "TB/s", "of read bandwidth")
    names = list(rows[0]["full_cache"])
    others = [name for name in ("vllm", "flash") if any(row.get(f"{name}_seconds") for row in rows)]
    cells = [
        (
            row["batch"],
            _share(row["kept"]),
            row["layout"],
            row["option"],
            f"{1e6 * row['seconds']:.1f}",
            f"{1e6 * row['host_seconds']:.0f}",
            f"{row['bytes_per_second'] / 1e12:.2f}",
            _share(row["of_read_bandwidth"]),
            *(f"{1e6 * row[f'{name}_seconds']:.1f}" for name in others),
            *(_ratio(row["full_cache"], name) for name in names),
        )
        for row in rows
    ]
    timed = (f"{KERNELS[name]}, plain, µs" for name in others)
    faster = (f"times faster than a full cache, {KERNELS[name]}" for name in names)
    text = "## Decode attention, one layer\n\n" + table((*header, *timed, *faster), cells)
    extra = raggedness(rows)
    if extra is None:
        return text
    return text + f"\n\nRagged heads cost at most {_share(extra)} more per byte than uniform ones."


def _ratio(ratios: Results, name: str) -> str:
    return f"{ratios[name]:.2f}" if name in ratios else "did not fit"


def _prefill(rows: Sequence[Results]) -> str:
    cells = [
        (
            row["chunk"],
            row["layout"],
            KERNELS.get(row["kernel"], row["kernel"]),
            f"{1e6 * row['seconds']:.1f}",
            f"{row['flops_per_second'] / 1e12:.0f}",
        )
        for row in rows
    ]
    header = ("chunk", "heads", "kernel", "µs", "TFLOP/s")
    return "## Attention of a chunk over compressed pages, one layer\n\n" + table(header, cells)


def raggedness(rows: Sequence[Results]) -> float | None:
    """The most that ragged heads cost beyond uniform ones, all else equal, per byte read."""
    speeds = {
        (row["batch"], row["kept"], row["option"], row["layout"]): row["bytes_per_second"]
        for row in rows
    }
    extra = [
        speeds[(*case, "uniform")] / speed - 1
        for (*case, layout), speed in speeds.items()
        if layout == "ragged" and (*case, "uniform") in speeds
    ]
    return max(extra, default=None)


def _events(rows: Sequence[Results]) -> str:
    parts = list(rows[0]["seconds"])
    kernels = [
        (
            row["prompt"],
            f"{row['prefill_seconds']:.2f}",
            *(f"{1e3 * row['seconds'][part]:.2f}" for part in parts),
            _share(row["compaction_of_copy_bandwidth"]),
        )
        for row in rows
    ]
    last = ("prompt", "prefill s", *(f"{part} ms" for part in parts), "compaction, of copying")
    text = "## Events, all layers\n\n"
    if rows[0]["policies"]:
        text += _whole_events(rows) + "\n\nSingle kernels:\n\n"
    return text + table(last, kernels)


def _whole_events(rows: Sequence[Results]) -> str:
    names = [row["policy"] for row in rows[0]["policies"]]
    cells = [
        (name, *(cell for row in rows for cell in _whole_event(row["policies"][place])))
        for place, name in enumerate(names)
    ]
    header = [f"{row['prompt']}: {cell}" for row in rows for cell in ("GPU", "host", "of prefill")]
    return (
        "Whole events by prompt, in ms: how long the GPU works, and how long the host takes to "
        "queue it, which it does while the GPU is still at the prompt.\n\n"
    ) + table(("policy", *header), cells)


def _whole_event(row: Results) -> tuple[str, str, str]:
    return (
        f"{1e3 * row['seconds']:.1f}",
        f"{1e3 * row['host_seconds']:.1f}",
        _share(row["of_prefill"]),
    )


def _batched(rows: Sequence[Results]) -> str:
    cells = []
    for row in rows:
        ways = [row[way] for way in WAYS]
        cells.append(
            (
                row["policy"],
                *(f"{1e3 * way['seconds']:.1f}" for way in ways),
                *(f"{1e3 * way['host_seconds']:.1f}" for way in ways),
                *(way["launches"] for way in ways),
                f"{ways[-1]['seconds'] / ways[0]['seconds']:.2f}x",
            )
        )
    first = rows[0]
    header = [
        f"{what}, {how}" for what in ("GPU ms", "host ms", "launches") for how in WAYS.values()
    ]
    return (
        f"## {first['requests']} events of {first['tokens']} tokens in one step, "
        f"{first['layers']} layers\n\n"
    ) + table(("policy", *header, "GPU, together"), cells)


def _reading(rows: Sequence[Results]) -> str:
    cells = [
        (
            row["batch"],
            row["context"],
            _share(row["part"]),
            f"{1e6 * row['choice_seconds']:.1f}",
            f"{1e6 * row['choice_host_seconds']:.0f}",
            f"{1e6 * row['part_seconds']:.1f}",
            f"{1e6 * row['whole_seconds']:.1f}",
            f"{row['whole_seconds'] / (row['choice_seconds'] + row['part_seconds']):.2f}x",
        )
        for row in rows
    ]
    header = ("requests", "tokens", "read", "choice, µs", "host, µs", "attention, µs")
    return "## Reading a part, one layer\n\n" + table(
        (*header, "attention to all, µs", "times faster"), cells
    )


def _tuning(rows: Sequence[Results]) -> str:
    names = ("programs_per_sm", "tile_bytes", "num_warps", "num_stages")
    shown = [row for place, row in enumerate(rows) if place < 10 or row["default"]]
    cells = [
        (
            *(row[name] for name in names),
            _share(row["of_read_bandwidth"]),
            "yes" if row["default"] else "",
        )
        for row in shown
    ]
    header = (*(name.replace("_", " ") for name in names), "of read bandwidth", "default")
    return "## Ways to cut the work of decode attention\n\n" + table(header, cells)
