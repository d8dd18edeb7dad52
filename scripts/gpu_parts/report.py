"""Reports of GPU measurements as JSON and Markdown, without torch and triton."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_parts.goals import OFF, STOCK, Goal, decode_steps, goals

Results = dict[str, Any]
# What parts that are measured one after the other must have in common to be one report.
SETTINGS = ("device", "versions", "quick", "block_size", "sources")
MIB = 2**20
PROFILED_KERNELS = 40  # of a profile, in the table
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


def file_name(*parts: str, suffix: str) -> str:
    """A name of [A-Za-z0-9._-] for what belongs to these parts."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts)).strip("-") + suffix


def with_earlier(results: Results, folder: Path) -> Results:
    """The results, and the parts that an earlier run with the same settings left in the folder."""
    numbers, _ = result_files(str(results["device"]), folder)
    if not numbers.exists():
        return results
    earlier = json.loads(numbers.read_text(encoding="utf-8"))
    same = all(earlier.get(name) == results[name] for name in SETTINGS)
    return {**earlier, **results} if same else results


def add_results(results: Results, part: Results) -> None:
    """Merges a part's results; engines join those of a run over the same requests."""
    runs = dict(results.get("engine", {}))
    for label, run in part.get("engine", {}).items():
        earlier = runs.get(label, {})
        same = all(earlier.get(name) == run[name] for name in run if name != "engines")
        engines = {**(earlier["engines"] if same else {}), **run["engines"]}
        runs[label] = {**run, "engines": engines}
    results.update({**part, "engine": runs} if runs else part)


def write_results(results: Results, folder: Path) -> tuple[Path, Path]:
    """Writes both files, and returns where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, text = result_files(str(results["device"]), folder)
    numbers.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text.write_text(as_markdown(results), encoding="utf-8")
    return numbers, text


def as_markdown(results: Results) -> str:
    """Returns the report as a Markdown page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        f"# Measured on {results['device']}",
        f"Measured by `scripts/gpu_check.py`{_flags(results)} with {versions}. "
        "Times are medians on the device, of kernels from replayed graphs with flushed caches.",
    ]
    sections = {
        "checks": _checks,
        "capture": _capture,
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
    if reached := goals(results):
        parts.append(_goals(reached))
    parts += [section(shown[name]) for name, section in sections.items() if shown.get(name)]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table with numbers to the right."""
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


def _goals(reached: Sequence[Goal]) -> str:
    cells = [(goal.text, goal.measured, "yes" if goal.holds else "no") for goal in reached]
    return "## Goals\n\n" + table(("goal", "measured", "holds"), cells)


def capture_passed(rows: Sequence[Results]) -> bool:
    """Whether replayed steps were those that ran, and nothing faulted."""
    return all(row.get("passed") for row in rows)


def _capture(rows: Sequence[Results]) -> str:
    text = (
        "## Decode steps, captured and replayed\n\nWithout vLLM, while block tables, page tables "
        "and ring buffers move; `eager` captures nothing, and unmaps freed memory. "
        f"{'Passed' if capture_passed(rows) else 'Failed'}."
    )
    cells = [
        (
            row["mode"],
            row["policy"],
            ", ".join(map(str, row["rows"])),
            row["layers"],
            row["rounds"],
            f"{row['error']:.2g}",
            row["forgotten"],
            ", ".join(f"{name} {count}" for name, count in row["moved"].items()),
        )
        for row in rows
        if "refused" not in row
    ]
    for row in rows:
        if "refused" in row:
            text += f"\n\n{row['mode']}, {row['policy']}: {row['refused']}"
    if not cells:
        return text
    header = ("mode", "policy", "requests", "layers", "steps", "largest error")
    return f"{text}\n\n" + table((*header, "layers that forgot queries", "times moved"), cells)


def engine_passed(run: Results) -> bool:
    """Whether all engines of a run served as they should.

    With nobody looking on, and with events that run together. Every trigger had its events, and
    every block was given back. No more kernels were compiled than stock vLLM compiles while it
    serves, and no more memory was taken beyond stock's than was left for it. In steps that were
    timed every request generated, and none read its prompt.
    """
    engines = run["engines"]
    ended = all("path" in row and "refused" not in row for row in engines.values())
    return ended and not any(_faults(run, name) for name in engines)


def _faults(run: Results, name: str) -> list[str]:
    """Returns the names of an engine's faults."""
    ours, stock = run["engines"][name], run["engines"].get(STOCK)
    compresses, load, path = name not in (STOCK, OFF), ours.get("load"), ours["path"]
    faults = {
        "somebody looked on": path["observers"] != 0,
        "events ran one by one": compresses and not path["batched_tokens"],
        "other steps were timed": any(row.get("others") for row in ours.get("decode_only", ())),
        "kernels compiled while serving": ours["compiled"]
        > (stock or ours).get("compiled", ours["compiled"]),
    }
    if load is not None:
        faults["events"] = not (_has_events(run, load) if compresses else not load["events"])
        faults["blocks lost"] = load["lost_blocks"] != 0
        if stock is not None and "load" in stock:
            taken = load["taken_bytes"] - stock["load"]["taken_bytes"]
            faults["memory taken"] = compresses and taken > load["left_bytes"]
    return [fault for fault, is_so in faults.items() if is_so]


def _has_events(run: Results, load: Results) -> bool:
    """Returns whether every trigger had the events that it calls for."""
    for text in str(run["settings"]["trigger"]).split(","):
        trigger, _, number = text.partition(":")
        count = load["events"].get(trigger, 0)
        if trigger == "prompt" and count != run["long"]:
            return False
        # How many exactly depends on where blocks end.
        if trigger == "decode" and run["output"] >= 2 * int(number) and count < run["long"]:
            return False
    return True


def _engine(runs: Results) -> str:
    return "\n\n".join(_engine_run(label, run) for label, run in runs.items())


def _engine_run(label: str, run: Results) -> str:
    text = (
        f"## Whole engines, events by {label}\n\n{run['model']}, compressed with "
        f"{run['settings']}. {'Passed' if engine_passed(run) else 'Failed'}."
    )
    if run["requests"]:
        text += (
            f" At once {run['long']} requests of {run['prompt']} tokens and {run['short']} too "
            f"short to be compressed, of {run['output']} tokens each."
        )
    started = {name: row for name, row in run["engines"].items() if "refused" not in row}
    for name, row in run["engines"].items():
        if "refused" in row:
            text += f"\n\n{name} ended: {row['refused']}"
        elif "path" not in row:
            text += f"\n\n{name} has not ended."
        elif faults := _faults(run, name):
            text += f"\n\n{name}: {', '.join(faults)}."
    loads = {name: row for name, row in started.items() if "load" in row}
    if loads:
        text += "\n\n" + _loads(loads)
    if rows := _decode_only_rows(run):
        text += "\n\nSteps in which all requests generate, in ms:\n\n" + _decode_only(run, rows)
    profiles = {name: row["profile"] for name, row in started.items() if "profile" in row}
    if profiles:
        text += "\n\n" + _profiles(profiles)
    return text


def _profiles(profiles: Results) -> str:
    """Returns what kernels took, those first that take the first engine longer than the last."""
    names = list(profiles)
    kernels = {
        name: {row["name"]: row for row in profile["kernels"]} for name, profile in profiles.items()
    }
    nothing = {"seconds": 0.0, "calls": 0}

    def of(name: str, kernel: str) -> Results:
        return kernels[name].get(kernel, nothing)

    def more(kernel: str) -> float:
        first, last = (float(of(name, kernel)["seconds"]) for name in (names[0], names[-1]))
        return first if len(names) == 1 else first - last

    every = sorted(set().union(*kernels.values()), key=more, reverse=True)[:PROFILED_KERNELS]
    cells = [
        (
            f"`{kernel}`",
            *(f"{1e3 * of(name, kernel)['seconds']:.2f}" for name in names),
            *(of(name, kernel)["calls"] for name in names),
        )
        for kernel in every
    ]
    header = ("kernel", *(f"{name}, ms" for name in names), *(f"{name}, calls" for name in names))
    sums = "; ".join(
        f"{name} {1e3 * profile['seconds']:.0f} ms, of which kernels "
        f"{1e3 * profile['device_seconds']:.0f} ({profile['launches']:,} launches)"
        for name, profile in profiles.items()
    )
    return f"The same requests under torch's profiler: {sums}.\n\n" + table(header, cells)


def _loads(engines: Results) -> str:
    expected = engines.get(STOCK, {}).get("load", {}).get("replies", [])
    cells = [
        (
            name,
            row.get("path", {}).get("graphs", ""),
            f"{row['start_seconds']:.0f}",
            f"{load['requests_per_second']:.2f}",
            f"{load['tokens_per_second']:.0f}",
            f"{1e3 * load['first_token_seconds']:.0f}",
            f"{1e3 * load['token_seconds']:.1f}",
            ", ".join(f"{count} {trigger}" for trigger, count in load["events"].items()) or 0,
            load["lost_blocks"],
            row.get("compiled", ""),
            f"{load['taken_bytes'] / MIB:.0f}",
            f"{load['left_bytes'] / MIB:.0f}",
            sum(map(operator.eq, load["replies"], expected)),
        )
        for name, row in engines.items()
        for load in [row["load"]]
    ]
    header = ("engine", "graphs", "start, s", "requests/s", "tokens/s", "first token, ms")
    more = ("next ones, ms", "events", "blocks lost", "kernels compiled while serving")
    taken = ("taken while serving, MiB", "left for it, MiB")
    return table((*header, *more, *taken, "of the short ones with stock's reply"), cells)


def _decode_only_rows(run: Results) -> list[tuple[int, int]]:
    """Returns lengths and batches that an engine was timed with."""
    rows = [row for engine in run["engines"].values() for row in engine.get("decode_only", ())]
    return sorted({(row["length"], row["batch"]) for row in rows})


def _decode_only(run: Results, cases: Sequence[tuple[int, int]]) -> str:
    names = [name for name, row in run["engines"].items() if row.get("decode_only")]
    seconds = {
        name: {case: row["seconds"] for case, row in decode_steps(run, name).items()}
        for name in names
    }
    stock = seconds.get(STOCK, {})
    cells = []
    for case in cases:
        times = [
            f"{1e3 * seconds[name][case]:.2f}" if case in seconds[name] else "left out"
            for name in names
        ]
        ratios = [
            f"{seconds[name][case] / stock[case]:.2f}x"
            if case in seconds[name] and case in stock
            else ""
            for name in names
            if name != STOCK
        ]
        cells.append((*case, *times, *ratios))
    ratio_names = [f"{name} to stock" for name in names if name != STOCK]
    return table(("tokens", "requests", *names, *ratio_names), cells)


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
