"""Compares AsymKV's true gradients with its proxy and with KVSlimmer's Eq. 33: loss, time, memory.

    python scripts/measure/true_gradients.py models/smollm2 --seed 53 --out gradients.jsonl

Contexts are compressed once, at their end, by pairs that are the same for all three; a chunk of
the last tokens gives the loss for gradients, and the queries that the others observe.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from claims import rank_correlation
from offline.dense import DenseLayer, Kept, compress
from offline.gradients import GradientModel, compress_by_gradients, pair_cosines, saved_bytes
from offline.rows import append_rows, read_rows
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.tools.dtypes import fast_dtype
from vllm_kvcompress.tools.evaluation.items import load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt
from vllm_kvcompress.tools.evaluation.summary import interval

TRUE = "asymkv, gradients"
POLICIES = ("asymkv", "kvslimmer")
Row = dict[str, Any]


def correlations(layers: list[DenseLayer], gradients: list[torch.Tensor]) -> Row:
    """How alike the sizes of gradients are to the proxy's and to Eq. 33's (rank correlation)."""
    results: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for layer, true in zip(layers, gradients, strict=True):
        num_tokens = layer.keys.shape[1]
        for policy in POLICIES:
            rule: Any = resolve(policy).scorer
            view = layer.view(num_tokens, rule.window_size)
            mass = rule.score(view)
            alpha = mass / mass.sum(dim=1, keepdim=True)
            values = view.kv.values().float()
            norms = (values - alpha[:, None] @ values).norm(dim=2)
            size = rule.sizes(alpha, norms)
            past = view.num_entries - rule.window_size
            true_size = true[:, :past].norm(dim=2)
            results[policy].append(float(rank_correlation(size[:, :past], true_size).mean()))
    return {policy: statistics.mean(figures) for policy, figures in results.items()}


def measure(model: GradientModel, context: list[int], rest: list[int], budgets: list[float]) -> Row:
    """Losses over the full cache's by setting, seconds and bytes, of one text."""
    layers, continuation = model.layers(context), torch.tensor(rest)
    chunk = resolve("asymkv").needs.window_size
    begin = time.perf_counter()
    with saved_bytes() as saved:
        gradients, slopes = model.gradients(layers, context, chunk)
    row: Row = {"seconds": {TRUE: time.perf_counter() - begin}, "bytes": saved[0]}

    def loss(kept: list[Kept] | None) -> float:
        logits = model.logits(layers, kept, continuation[:-1])
        return float(torch.nn.functional.cross_entropy(logits, continuation[1:]))

    full = loss(None)
    for budget in budgets:
        for policy in POLICIES:
            begin = time.perf_counter()
            kept = [compress(resolve(policy), layer, len(context), budget) for layer in layers]
            row["seconds"][policy] = time.perf_counter() - begin
            row[f"{policy}@{budget:g}"] = loss(kept) - full
        kept = [
            compress_by_gradients(resolve("asymkv"), layer, len(context), budget, gradient)
            for layer, gradient in zip(layers, gradients, strict=True)
        ]
        row[f"{TRUE}@{budget:g}"] = loss(kept) - full
    cosines = [pair_cosines(layer, slope) for layer, slope in zip(layers, slopes, strict=True)]
    row["cosines"] = [
        statistics.mean(float(each[i].abs().mean()) for each in cosines) for i in range(2)
    ]
    row["opposite"] = statistics.mean(
        float((own[..., 1:] * both < 0).float().mean()) for own, both in cosines
    )
    return row | {"correlation": correlations(layers, gradients)}


def print_table(rows: list[Row], budgets: list[float]) -> None:
    print("| weights@budget | loss | more than gradients (95%) | seconds, all layers |")
    print("|---|---|---|---|")
    for budget in budgets:
        for setting in (TRUE, *POLICIES):
            name = f"{setting}@{budget:g}"
            losses = [row[name] for row in rows]
            other = [row[name] - row[f"{TRUE}@{budget:g}"] for row in rows]
            low, high = interval(other) if len(rows) > 1 else (0.0, 0.0)
            seconds = statistics.mean(row["seconds"][setting] for row in rows)
            cells = [f"{statistics.mean(losses):.3f}", f"{statistics.mean(other):+.3f}"]
            print(
                f"| {name} | {cells[0]} | {cells[1]} ({low:+.3f} to {high:+.3f}) | {seconds:.2f} |"
            )
    print(f"\nkept for the way back: {statistics.mean(r['bytes'] for r in rows) / 2**20:.0f} MiB")
    own, both = (statistics.mean(row["cosines"][i] for row in rows) for i in range(2))
    opposite = statistics.mean(row["opposite"] for row in rows)
    print(f"cosine of the loss's gradient with c_11 {own:.3f}, with c_12 {both:.3f} (sizes)")
    print(f"signs of the two differ for {opposite:.0%} of neighbours")
    for policy in POLICIES:
        mean = statistics.mean(row["correlation"][policy] for row in rows)
        print(f"rank correlation of sizes with the gradients', {policy}: {mean:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--length", type=int, default=1024, help="tokens of contexts (1024)")
    parser.add_argument("--continuation", type=int, default=256, help="tokens behind them (256)")
    parser.add_argument("--texts", type=int, default=4, help="of each kind (4)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first text (0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    options = parser.parse_args()
    from tqdm import tqdm

    tokenizer = load_tokenizer(options.model)
    model = GradientModel(options.model, getattr(torch, fast_dtype()))
    items = load_texts("text", [options.length], options.continuation, options.texts, options.seed)
    rows = read_rows(options.out)
    for item in tqdm(items[len(rows) :], unit="text"):
        rows.append(measure(model, *split_prompt(tokenizer, item), options.budgets))
        append_rows(options.out, rows[-1:])
    print_table(rows, options.budgets)


if __name__ == "__main__":
    main()
