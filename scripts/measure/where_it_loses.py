"""Where a setting loses: by band of layers, by what heads keep, and by the age of evicted tokens.

    python scripts/measure/where_it_loses.py models/smollm2 --seed 100 --out where.jsonl \\
        spans+headkv:profile=models/smollm2/kv_heads.json@0.25

A text's context is read once. Then a part of the heads is compressed and all others keep
everything, and the continuation is predicted: its loss over the full cache's is what that part
costs. Parts are bands of layers, and heads that keep little or much. Beside it stands the attention
that the continuation's tokens pay to what was evicted, with the full cache. No engine runs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from offline.dense import DenseLayer, Kept
from offline.masked import MaskedModel
from offline.rows import append_rows, read_rows
from stand_in import keeps
from vllm_kvcompress.tools.dtypes import fast_dtype
from vllm_kvcompress.tools.evaluation.items import load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt

KEPT_LIMITS = (0.0, 0.1, 0.25, 0.5, 1.01)  # of a head's tokens
AGES = ((0, 64), (64, 256), (256, 1 << 30))  # tokens before the context's end
Row = dict[str, Any]


def parts_of(kept: list[Kept], num_bands: int) -> dict[str, Tensor]:
    """[layers, H] bool by name: the heads that are compressed, all others keep everything."""
    shares = torch.stack([layer.mask.float().mean(dim=1) for layer in kept])
    num_layers, everything = len(kept), torch.ones_like(shares, dtype=torch.bool)
    parts = {"all": everything}
    for band in torch.arange(num_layers).chunk(num_bands):
        members = torch.isin(torch.arange(num_layers), band)[:, None]
        parts[f"layers {int(band[0])} to {int(band[-1])}"] = everything & members
    for low, high in itertools.pairwise(KEPT_LIMITS):
        parts[f"heads that keep {low:.0%} to {min(1, high):.0%}"] = (shares >= low) & (
            shares < high
        )
    return parts


def only(kept: list[Kept], part: Tensor) -> list[Kept]:
    """What is kept if heads outside of a part keep everything."""
    return [
        replace(layer, mask=layer.mask | ~heads[:, None])
        for layer, heads in zip(kept, part, strict=True)
    ]


def attention(model: MaskedModel, context: list[DenseLayer]) -> Tensor:
    """[layers, H, n] attention of the tokens just read to a context, mean over query heads.

    Args:
        model: that has read the tokens behind the full context.
        context: every layer of it.
    """
    rows = []
    for layer, (_, queries, keys, _, scale) in zip(context, model._seen, strict=True):
        every_key = torch.cat([layer.keys, keys[0].float()], dim=1)
        grouped = queries[0].float().unflatten(0, (len(layer.keys), -1)).flatten(1, 2)
        logits = scale * grouped @ every_key.mT
        count, num_context = queries.shape[2], layer.keys.shape[1]
        future = torch.full((count, count), float("-inf")).triu(1)
        logits[..., num_context:] += future.repeat(grouped.shape[1] // count, 1)
        rows.append(logits.softmax(dim=-1)[..., :num_context].mean(dim=1))
    return torch.stack(rows)


def rows_of(model: MaskedModel, tokens: tuple[list[int], list[int]], options: Any) -> Iterator[Row]:
    """One per setting and part of the heads."""
    context, continuation = model.layers(tokens[0]), torch.tensor(tokens[1])

    def nats(kept: list[Kept] | None) -> float:
        logits = model.logits(context, kept, continuation[:-1])
        return float(torch.nn.functional.cross_entropy(logits, continuation[1:]))

    full = nats(None)
    weights = attention(model, context)
    num_context = weights.shape[2]
    for setup in options.setups:
        kept = keeps(setup, context)
        assert kept is not None
        masks = torch.stack([layer.mask for layer in kept])
        evicted = weights * ~masks
        for name, part in parts_of(kept, options.bands).items():
            if not part.any():
                continue
            row = {"setup": setup, "part": name, "heads": int(part.sum())}
            row["kept"] = float(masks[part].float().mean())
            row["evicted attention"] = float(evicted[part].sum(dim=1).mean())
            for low, high in AGES:
                ages = slice(max(0, num_context - high), num_context - low)
                row[f"evicted attention, age {low}"] = float(
                    evicted[part][:, ages].sum(dim=1).mean()
                )
            yield {**row, "loss": nats(only(kept, part)) - full}


def table(rows: list[Row]) -> Iterator[str]:
    """Means over texts, with the standard error of the loss."""
    yield "| compressed heads | heads | kept | loss (error) | attention evicted |"
    yield "|---" * 5 + "|"
    for setup, part in dict.fromkeys((row["setup"], row["part"]) for row in rows):
        some = [row for row in rows if (row["setup"], row["part"]) == (setup, part)]
        losses = [row["loss"] for row in some]
        error = stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else float("nan")
        ages = ", ".join(
            f"{fmean(row[f'evicted attention, age {low}'] for row in some):.1%}" for low, _ in AGES
        )
        yield (
            f"| `{setup}`, {part} | {fmean(row['heads'] for row in some):.0f} "
            f"| {fmean(row['kept'] for row in some):.0%} | {fmean(losses):.3f} ({error:.3f}) "
            f"| {fmean(row['evicted attention'] for row in some):.1%} ({ages}) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("setups", nargs="+", metavar="POLICY[:NAME=VALUE,...]@BUDGET")
    parser.add_argument("--length", type=int, default=1024, help="tokens of contexts (1024)")
    parser.add_argument("--continuation", type=int, default=128, help="of texts (128)")
    parser.add_argument("--texts", type=int, default=1, help="of each kind (1)")
    parser.add_argument("--bands", type=int, default=4, help="of layers (4)")
    parser.add_argument("--seed", type=int, default=0, help="of texts (0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    options = parser.parse_args()
    from tqdm import tqdm

    tokenizer = load_tokenizer(options.model)
    model = MaskedModel(options.model, getattr(torch, fast_dtype()))
    rows = read_rows(options.out)
    done = {row["item"] for row in rows}
    items = load_texts("text", [options.length], options.continuation, options.texts, options.seed)
    for number, item in enumerate(tqdm(items, unit="text")):
        if number in done:
            continue
        tokens = split_prompt(tokenizer, item)
        new = [
            {"item": number, "task": item.task, **row} for row in rows_of(model, tokens, options)
        ]
        rows += new
        append_rows(options.out, new)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
