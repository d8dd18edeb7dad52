"""Draws loss of text over bytes per token: eviction alone, bits alone, and both.

    python scripts/measure/memory_figure.py SmolLM2=smol.jsonl:64 Qwen=qwen.jsonl:128 --out loss.svg

reads what `stand_in.py --caches` has written, with the head size of each model, and prints a table
from the fewest bytes on.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from offline.rows import read_rows
from vllm_kvcompress.cache.quantization import row_bytes

FULL, MODEL_TYPE = "full", "16 bits"
COLOURS = {
    MODEL_TYPE: "tab:blue",
    "int8_per_token_head": "tab:green",
    "fp8_per_token_head": "tab:orange",
    "fp8": "tab:purple",
    "int4_per_token_head": "tab:red",
}
LEAST_LOSS = 0.001  # of the axis; smaller ones are drawn there
Point = tuple[float, float, float]


def points(rows: list[dict], head_size: int) -> dict[str, dict[float, Point]]:
    """Share of the full cache's bytes, loss in nats and its standard error, by type and budget."""
    values: dict[str, dict[int, float]] = {}
    for row in rows:
        values.setdefault(row["setup"], {})[row["item"]] = row["value"]
    found: dict[str, dict[float, Point]] = {}
    for setup, losses in values.items():
        policy, _, cache = setup.partition(" in ")
        budget = 1.0 if policy == FULL else float(policy.rpartition("@")[2])
        stored = row_bytes(cache, head_size) or 2 * head_size
        more = [loss - values[FULL][item] for item, loss in losses.items()]
        error = statistics.stdev(more) / math.sqrt(len(more))
        point = budget * stored / (2 * head_size), statistics.mean(more), error
        found.setdefault(cache or MODEL_TYPE, {})[budget] = point
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="NAME=FILE.jsonl:HEAD_SIZE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    options = parser.parse_args()
    import matplotlib.pyplot as plt

    print("| cache | bytes | loss (standard error) |\n|---|---|---|")
    figure, axes = plt.subplots(1, len(options.models), figsize=(10, 4.2), squeeze=False)
    for axis, given in zip(axes[0], options.models, strict=True):
        name, _, source = given.partition("=")
        path, _, head_size = source.rpartition(":")
        curves = points(read_rows(Path(path)), int(head_size))
        for cache, by_budget in curves.items():
            ordered = sorted(by_budget.values())
            losses = [max(LEAST_LOSS, loss) for _, loss, _ in ordered]
            shares, colour = [100 * share for share, _, _ in ordered], COLOURS.get(cache)
            axis.plot(shares, losses, "o-", label=cache, color=colour)
        axis.set(title=name, xlabel="bytes per token, % of 16 bits", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        flat = [(p, cache, budget) for cache, each in curves.items() for budget, p in each.items()]
        for (share, loss, error), cache, budget in sorted(flat):
            point = f"{name}, {cache}, {budget:g}"
            print(f"| {point} | {share:.3f} | {loss:.3f} ({error:.3f}) |")
    axes[0][0].set_ylabel("loss of text, nats per token")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out)


if __name__ == "__main__":
    main()
