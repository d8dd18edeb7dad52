"""Compares ways to divide a budget among heads, at equal memory and with the same choice of tokens.

    python scripts/measure/head_budgets.py models/smollm2 --seed 10 --texts 4 --needles 3 \\
        --profile models/smollm2/kv_heads.json --out budgets.jsonl

Every head keeps whole blocks, at least one, and in them what the last queries attend to
(`attention`). How many blocks, is decided by

    same       the mean
    measured   heads measured before serving (`+headkv`)
    model      the highest attention of all heads together
    lost       what a head's earlier queries lose if all heads keep the same
    repeated   the highest scores of all heads together when the context is repeated (KVzip)
    threshold  attention above --threshold, however many that are

`kvzip` also chooses tokens by repetition, with one budget for the model and no blocks. Text loss
and facts are those of `stand_in.py`; runs go on where they stopped.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from offline.dense import BLOCK_SIZE, DenseLayer, Kept
from offline.masked import MaskedModel
from offline.rows import append_rows, read_rows
from reconstruction import choose, reconstruct
from stand_in import FULL, KNOWN, NEEDLES, TEXT, UNKNOWN, items_of, pipeline_of, with_error
from vllm_kvcompress.policies.base import Merged, ModelHeads
from vllm_kvcompress.policies.headkv import ByImportance
from vllm_kvcompress.policies.parts.allocation import spread
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt

EVEN_SHARE = ByImportance().even_share
QUERY_STRIDE = 8  # of the earlier queries, those of a prompt's second half
Row = dict[str, Any]


def attention_scores(layers: list[DenseLayer]) -> Tensor:
    """[layers, H, n] scores of `attention` of the tokens in full blocks."""
    scorer, num_tokens = pipeline_of("attention@1")[0].scorer, layers[0].keys.shape[1]
    return torch.stack([scorer.score(layer.view(num_tokens, 32)) for layer in layers])


def counts_above(scores: Tensor, cut: float) -> Tensor:
    """[layers, H] how many of each head's scores are at least so high."""
    return (scores >= cut).sum(dim=2).double()


def cut_of(scores: Tensor, num_kept: int) -> float:
    """The lowest of so many highest scores of all heads together."""
    return float(scores.flatten().topk(num_kept).values[-1])


def lost_mass(layers: list[DenseLayer], kept: list[Kept]) -> Tensor:
    """[layers, H] attention of a prompt's later half to earlier tokens that are not kept."""
    rows = []
    for layer, each in zip(layers, kept, strict=True):
        num_heads, num_tokens = layer.keys.shape[:2]
        at = torch.arange(num_tokens // 2, num_tokens, QUERY_STRIDE)
        queries = layer.queries[at].unflatten(1, (num_heads, -1)).permute(1, 2, 0, 3)
        logits = layer.scale * queries @ layer.keys[:, None].mT
        logits = logits.masked_fill(torch.arange(num_tokens) > at[:, None], -torch.inf)
        evicted = ~each.mask[:, None, None]
        rows.append((logits.softmax(dim=-1) * evicted).sum(dim=-1).mean(dim=(1, 2)))
    return torch.stack(rows).double()


def blocks_of(shares: Tensor, num_kept: int, num_blocks: int) -> Tensor:
    """[layers, H] blocks in proportion to shares, `num_kept` in the mean, each from 1 to all."""
    flat = shares.flatten()
    limits = [num_blocks] * len(flat), [1] * len(flat)
    pages = spread(flat.tolist(), num_kept * len(flat), *limits)
    return torch.tensor(pages).view(shares.shape)


def select(layers: list[DenseLayer], scores: Tensor, blocks: Tensor) -> list[Kept]:
    """What `attention` keeps of every layer with so many blocks by head; the tail stays."""
    pipeline, num_tokens = pipeline_of("attention@1")[0], layers[0].keys.shape[1]
    kept = []
    for layer, score, count in zip(layers, scores, blocks, strict=True):
        view = layer.view(num_tokens, 32)
        mask = torch.ones(len(layer.keys), num_tokens, dtype=torch.bool)
        number = count * BLOCK_SIZE
        mask[:, : view.num_entries] = pipeline.selector.select(
            view, score, number, pipeline.protection
        )
        kept.append(Kept(mask, Merged()))
    return kept


def measured_shares(profile: Path, layers: list[DenseLayer]) -> Tensor:
    """[layers, H] shares of a budget by measured heads."""
    num_heads = len(layers[0].keys)
    model = ModelHeads(len(layers), num_heads, layers[0].queries.shape[1], BLOCK_SIZE)
    allocator = ByImportance().with_profile(profile).bind(model)
    return torch.tensor(allocator.importance, dtype=torch.double)


def ways(
    layers: list[DenseLayer], repeated: Tensor, budget: float, options: argparse.Namespace
) -> Iterator[tuple[str, list[Kept], float]]:
    """Each way's name, what it keeps, and the attention score that `model` cuts at (or 0)."""
    scores = attention_scores(layers)
    num_blocks, num_full = scores.shape[2] // BLOCK_SIZE, scores.shape[2]
    mean_blocks = math.ceil(round(budget * num_blocks, 6))  # as in an engine
    num_kept = mean_blocks * BLOCK_SIZE * scores[..., 0].numel()

    def by(shares: Tensor) -> list[Kept]:
        return select(layers, scores, blocks_of(shares, mean_blocks, num_blocks))

    same = by(torch.ones(scores.shape[:2], dtype=torch.double))
    cut, lost = cut_of(scores, num_kept), lost_mass(layers, same)
    again = repeated[..., :num_full]
    yield "same", same, 0.0
    yield "measured", by(measured_shares(options.profile, layers)), 0.0
    yield "model", by(counts_above(scores, cut)), cut
    yield "lost", by(EVEN_SHARE + (1 - EVEN_SHARE) * lost / lost.mean()), 0.0
    yield "repeated", by(counts_above(again, cut_of(again, num_kept))), 0.0
    if threshold := options.threshold.get(budget):
        blocks = (counts_above(scores, threshold) / BLOCK_SIZE).ceil().clamp(1, num_blocks)
        yield "threshold", select(layers, scores, blocks.long()), 0.0
    num_tail = layers[0].keys.shape[1] - num_full
    yield "kvzip", choose(repeated, num_tail + mean_blocks * BLOCK_SIZE, "model"), 0.0


def rows_of(
    model: MaskedModel, tokenizer: Any, item: Item, options: argparse.Namespace
) -> Iterator[Row]:
    """One per mode, budget and way; those of the full cache first."""
    context, rest = split_prompt(tokenizer, item)
    answer: list[int] = []
    if item.continuation:
        cases = [(TEXT, context, rest)]
    else:
        answer = tokenizer(f" {item.answers[0]}", add_special_tokens=False)["input_ids"]
        # With the question in the prompt an answer's first token is predicted before the event.
        cases = [(KNOWN, context + rest, answer), (UNKNOWN, context, rest + answer)]
    for mode, tokens, following in cases:
        layers, then = model.layers(tokens), torch.tensor(following)

        def value(kept: list[Kept] | None, layers: Any = layers, then: Tensor = then) -> Any:
            logits = model.logits(layers, kept, then[:-1])
            if not answer:
                return float(torch.nn.functional.cross_entropy(logits, then[1:]))
            number = min(len(answer), len(then) - 1)
            return bool((logits.argmax(dim=1)[-number:] == then[-number:]).all())

        row = {"task": item.task, "mode": mode}
        yield {**row, "budget": 1.0, "way": FULL, "value": value(None), "kept": 1.0}
        repeated = reconstruct(model, tokenizer, tokens)[0]
        for budget in options.budgets:
            for way, kept, cut in ways(layers, repeated, budget, options):
                share = fmean(float(each.mask.float().mean()) for each in kept)
                found = {"way": way, "value": value(kept), "kept": share, "cut": cut}
                yield {**row, "budget": budget, **found}


def table(rows: list[Row]) -> Iterator[str]:
    """Text loss, its difference from `measured`, facts and memory, by budget and way."""
    values = {(row["mode"], row["item"], row["budget"], row["way"]): row for row in rows}
    full = {key[:2]: row["value"] for key, row in values.items() if key[3] == FULL}
    yield "| way@budget | loss (error) | more than measured | known | not known | kept (texts) |"
    yield "|---" * 6 + "|"
    for budget, way in dict.fromkeys(key[2:] for key in values if key[3] != FULL):
        texts = [number for mode, number in full if mode == TEXT]
        loss = [values[TEXT, i, budget, way]["value"] - full[TEXT, i] for i in texts]
        other = [
            values[TEXT, i, budget, way]["value"] - values[TEXT, i, budget, "measured"]["value"]
            for i in texts
        ]
        cells = [f"{way}@{budget:g}", with_error(loss), with_error(other)]
        for mode in (KNOWN, UNKNOWN):
            able = [at for at, value in full.items() if at[0] == mode and value]
            cells.append(f"{sum(values[*at, budget, way]['value'] for at in able)} of {len(able)}")
        kept = [values[TEXT, i, budget, way]["kept"] for i in texts]
        if kept:
            cells.append(f"{fmean(kept):.0%} ({min(kept):.0%} to {max(kept):.0%})")
        yield f"| {' | '.join(cells)} |"


def cuts(rows: list[Row]) -> Iterator[str]:
    """Mean of the scores that `model` cuts at, by budget: what --threshold takes."""
    for budget in sorted({row["budget"] for row in rows if row["way"] == "model"}):
        some = [
            row["cut"]
            for row in rows
            if (row["way"], row["mode"], row["budget"]) == ("model", TEXT, budget)
        ]
        if some:
            yield f"--threshold {budget:g}={fmean(some):.6f}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("--profile", type=Path, required=True, help="measured heads")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.25])
    parser.add_argument(
        "--threshold",
        nargs="*",
        default=[],
        metavar="BUDGET=SCORE",
        help="what a run on other texts prints",
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of contexts (1024)")
    parser.add_argument("--continuation", type=int, default=160, help="of texts (160)")
    parser.add_argument("--texts", type=int, default=4, help="of each kind (4)")
    parser.add_argument("--needles", type=int, default=3, help="questions of each task (3)")
    parser.add_argument("--tasks", nargs="+", default=(*NEEDLES, "niah_single_3"), help="of RULER")
    parser.add_argument("--seed", type=int, default=0, help="of texts and questions (0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.set_defaults(kinds=["text"])
    options = parser.parse_args()
    pairs = (part.split("=") for part in options.threshold)
    options.threshold = {float(budget): float(score) for budget, score in pairs}
    return options


def main() -> None:
    options = parsed()
    from tqdm import tqdm

    tokenizer, model = load_tokenizer(options.model), MaskedModel(options.model)
    rows = read_rows(options.out)
    done = {row["item"] for row in rows}
    for number, item in enumerate(tqdm(items_of(options, tokenizer), unit="item")):
        if number in done:
            continue
        new = [{"item": number, **row} for row in rows_of(model, tokenizer, item, options)]
        rows += new
        append_rows(options.out, new)
    print("\n".join([*table(rows), *cuts(rows)]))


if __name__ == "__main__":
    with torch.no_grad():
        main()
