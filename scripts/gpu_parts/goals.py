"""Goals of a run on a GPU, measured against stock vLLM in the same run. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]
# Engines: ours as served, vLLM's own, ours that compresses nobody, and ours with vLLM's kernels
# between piecewise CUDA graphs.
COMPRESSED, STOCK, OFF, PIECEWISE = "compressed", "stock", "off", "piecewise"
LONG, REQUESTS, SHORTEST = 32768, 8, 1024
MOST_AT_A_QUARTER, MOST_ANYWHERE = 0.55, 1.0  # 0.50x is what an H100 could do
LEAST_REQUESTS_PER_SECOND = 1.5
OFF_WITHIN = 0.02
HIDDEN_POLICY = "adakv+criticalkv"


@dataclass(frozen=True)
class Goal:
    """A goal, and the measured value.

    Attributes:
        text: the goal.
        measured: the figure that decides, in words.
        holds: whether it was reached.
    """

    text: str
    measured: str
    holds: bool


def goals(results: Results) -> list[Goal]:
    """Returns the goals that the results cover."""
    runs = [run for run in results.get("engine", {}).values() if not run["checked"]]
    reached = [goal for run in runs for goal in _of_run(run)]
    return [*reached, *_hidden(results.get("events", ()))]


def _of_run(run: Results) -> Iterator[Goal]:
    compressed, stock = (decode_steps(run, name) for name in (COMPRESSED, STOCK))
    ratios = {
        case: row["seconds"] / stock[case]["seconds"]
        for case, row in compressed.items()
        if case in stock and case[0] >= SHORTEST and row["events_before"] >= case[1]
    }
    trigger, budget = run["settings"]["trigger"], run["settings"]["budget"]
    if (case := (LONG, REQUESTS)) in ratios and budget == 0.25:
        yield Goal(
            f"steps of {REQUESTS} requests of {LONG:,} tokens, of which a quarter is kept, take at "
            f"most {MOST_AT_A_QUARTER}x of stock's time (events by {trigger})",
            f"{ratios[case]:.2f}x",
            ratios[case] <= MOST_AT_A_QUARTER,
        )
    if ratios:
        worst = max(ratios, key=lambda case: ratios[case])
        yield Goal(
            f"steps never take longer than stock's, from {SHORTEST:,} tokens on "
            f"(events by {trigger})",
            f"at most {ratios[worst]:.2f}x: {worst[1]} requests of {worst[0]:,} tokens; "
            f"{len(ratios)} cases",
            ratios[worst] <= MOST_ANYWHERE,
        )
    if run["pool"] and (ratio := _load_ratio(run, COMPRESSED)) is not None:
        yield Goal(
            f"at least {LEAST_REQUESTS_PER_SECOND}x stock's requests/s with the pool full, "
            f"{run['requests']} requests and memory for {run['pool']}",
            f"{ratio:.2f}x",
            ratio >= LEAST_REQUESTS_PER_SECOND,
        )
    yield from _off(run)


def _off(run: Results) -> Iterator[Goal]:
    """The goal that an extension without compression costs nothing."""
    stock = decode_steps(run, STOCK)
    ratios = [
        row["seconds"] / stock[case]["seconds"]
        for case, row in decode_steps(run, OFF).items()
        if case in stock
    ]
    if (ratio := _load_ratio(run, OFF)) is not None:
        ratios.append(ratio)
    if ratios:
        furthest = max(ratios, key=lambda ratio: abs(ratio - 1))
        yield Goal(
            f"--kv-policy none is stock vLLM, 1.00 +- {OFF_WITHIN}x",
            f"at most {furthest:.3f}x, of {len(ratios)} ratios",
            abs(furthest - 1) <= OFF_WITHIN,
        )


def _hidden(events: Any) -> Iterator[Goal]:
    """The goal that the host queues an event while the GPU still reads the prompt."""
    shares = {
        row["prompt"]: policy["host_seconds"] / row["prefill_seconds"]
        for row in events
        for policy in row["policies"]
        if policy["policy"] == HIDDEN_POLICY and row["prompt"] >= SHORTEST
    }
    if shares:
        worst = max(shares, key=lambda prompt: shares[prompt])
        yield Goal(
            f"the prefill hides what the host does for an event, from {SHORTEST:,} tokens on "
            f"({HIDDEN_POLICY})",
            f"at most {100 * shares[worst]:.0f}% of the prefill, at {worst:,} tokens",
            shares[worst] <= 1 and min(shares) == SHORTEST,
        )


def decode_steps(run: Results, name: str) -> dict[tuple[int, int], Results]:
    """What was timed of an engine's steps in which all generate, by prompt length and batch."""
    rows = run["engines"].get(name, {}).get("decode_only", ())
    return {(row["length"], row["batch"]): row for row in rows if "seconds" in row}


def _load_ratio(run: Results, name: str) -> float | None:
    """Requests per second of an engine, to stock's."""
    loads = [run["engines"].get(which, {}).get("load") for which in (name, STOCK)]
    if None in loads:
        return None
    ours, stock = (load["requests_per_second"] for load in loads)
    return float(ours / stock)
