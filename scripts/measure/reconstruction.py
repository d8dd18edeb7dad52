"""Scores a context by its repetition, as KVzip does (arXiv 2505.23416), and asks for its needles.

    python scripts/measure/reconstruction.py models/smollm2 --needles 4 --seed 100 --out kvzip.jsonl

The context is read, then a request to repeat it and the context once more. A token's score is the
highest attention that any query of the repetition pays to it, over the queries and the query heads
of a group (in contexts longer than CHUNK chunk by chunk; keys of the chunk, the first tokens and
the repetition itself compete, as in kvpress's KVzipPress). Budgets are the same for all heads
(uniform), shared out within a layer (layer), or over the whole model (model, the authors' way).
Then the question is asked of what is kept, beside `leverage` and `spans`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offline.dense import DenseLayer, Kept
from offline.masked import MaskedModel
from offline.rows import append_rows, read_rows
from stand_in import NEEDLES, keeps
from vllm_kvcompress.policies.base import Merged
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.items import generate
from vllm_kvcompress.tools.evaluation.prompts import (
    REPEAT,
    before_and_after,
    load_tokenizer,
    split_prompt,
)

CHUNK, OVERLAP, NUM_SINKS = 2048, 8, 4
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
SHARED = ("uniform", "layer", "model")
OTHERS = ("leverage", "spans")


def repetitions(tokenizer: Any, context: list[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """By chunk: where it begins, what asks for it, and the chunk again."""
    begin, reply = before_and_after(tokenizer)
    for start in range(begin, len(context), CHUNK):
        asked = tokenizer(LATER if start > begin else REPEAT, add_special_tokens=False)["input_ids"]
        if start > begin:
            asked = [*asked, *context[start - OVERLAP : start]]
        yield start, [*asked, *reply], context[start : start + CHUNK]


def chunk_scores(layer: DenseLayer, num_context: int, start: int, end: int) -> Tensor:
    """[H, end - start] highest attention of the queries behind the context to its chunk."""
    num_sinks = min(NUM_SINKS, start)
    keys = layer.keys
    seen = torch.cat([keys[:, :num_sinks], keys[:, start:end], keys[:, num_context:]], dim=1)
    queries = layer.queries[num_context:].unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    scores = torch.zeros(len(keys), end - start)
    for member in range(queries.shape[1]):
        logits = layer.scale * queries[:, member] @ seen.mT
        own = logits[..., num_sinks + end - start :]
        own += torch.full_like(own[0], float("-inf")).triu(1)
        attention = logits.softmax(dim=-1)[..., num_sinks : num_sinks + end - start]
        scores = torch.maximum(scores, attention.amax(dim=1))
    return scores


def reconstruct(
    model: MaskedModel, tokenizer: Any, context: list[int]
) -> tuple[Tensor, list[bool]]:
    """[layers, H, n] scores, and which of the context's tokens the model would have repeated."""
    scores, right = torch.zeros(0), [False] * len(context)
    for start, asked, chunk in repetitions(tokenizer, context):
        layers, logits = model.read([*context, *asked, *chunk], len(chunk) + 1)
        if not len(scores):
            scores = torch.zeros(len(layers), len(layers[0].keys), len(context))
            scores[..., :NUM_SINKS] = 1
        end = start + len(chunk)
        for layer in layers:
            scores[layer.index, :, start:end] = chunk_scores(layer, len(context), start, end)
        right[start:end] = (logits[:-1].argmax(dim=1) == torch.tensor(chunk)).tolist()
    return scores, right


def choose(scores: Tensor, num_kept: int, shared: str) -> list[Kept]:
    """What is kept of every layer, with so many tokens per head in the mean."""
    num_layers, num_heads = scores.shape[:2]
    rows = {"uniform": num_layers * num_heads, "layer": num_layers, "model": 1}[shared]
    flat = scores.reshape(rows, -1)
    best = flat.topk(num_kept * num_layers * num_heads // rows, dim=1).indices
    mask = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, best, True)
    return [Kept(each, Merged()) for each in mask.view(scores.shape)]


def place(context: list[int], answer: list[int]) -> slice:
    """Where an answer's tokens stand in a context (it may be written behind another token)."""
    for part in (answer, answer[1:]):
        for start in range(len(context) - len(part) + 1):
            if context[start : start + len(part)] == part:
                return slice(start, start + len(part))
    raise ValueError("the context does not hold the answer's tokens")


def row_of(model: MaskedModel, tokenizer: Any, item: Item, budgets: list[float]) -> dict[str, Any]:
    """What is found of one needle, by setting, and what became of its tokens."""
    context, question = split_prompt(tokenizer, item)
    answer = tokenizer(f" {item.answers[0]}", add_special_tokens=False)["input_ids"]
    layers, needle = model.layers(context), place(context, answer)
    scores, right = reconstruct(model, tokenizer, context)
    asked = torch.tensor([*question, *answer[:-1]])

    def found(kept: list[Kept] | None) -> bool:
        said = model.logits(layers, kept, asked).argmax(dim=1)[-len(answer) :]
        return bool(said.tolist() == answer)

    row: dict[str, Any] = {"task": item.task, "full": found(None)}
    row |= {"repeated": sum(right) / len(right)}
    row |= {"needle repeated": sum(right[needle]) / len(right[needle])}
    for budget in budgets:
        settings = {f"{name}@{budget:g}": keeps(f"{name}@{budget:g}", layers) for name in OTHERS}
        assert settings[f"spans@{budget:g}"] is not None
        num_kept = int(settings[f"spans@{budget:g}"][0].mask[0].sum())  # type: ignore[index]
        settings |= {
            f"reconstruction, {shared}@{budget:g}": choose(scores, num_kept, shared)
            for shared in SHARED
        }
        for name, kept in settings.items():
            assert kept is not None
            row[name] = found(kept)
            of_needle = torch.stack([each.mask[:, needle].float().mean() for each in kept])
            row[f"needle kept, {name}"] = float(of_needle.mean())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("--length", type=int, default=1024, help="tokens of contexts (1024)")
    parser.add_argument("--needles", type=int, default=4, help="questions of each task (4)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions (0)")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    options = parser.parse_args()
    from tqdm import tqdm

    tokenizer = load_tokenizer(options.model)
    model = MaskedModel(options.model)

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    settings = ([options.length], options.needles, options.seed, count)
    items = [item for task in NEEDLES for item in generate(f"ruler/{task}", *settings)]
    # From task to task, so that a run that is stopped has some of each.
    items = [items[i] for i in sorted(range(len(items)), key=lambda i: i % options.needles)]
    rows = read_rows(options.out)
    for item in tqdm(items[len(rows) :], unit="needle"):
        rows.append(row_of(model, tokenizer, item, options.budgets))
        append_rows(options.out, rows[-1:])
    able = [row for row in rows if row["full"]]
    print("| | found, or the mean |\n|---|---|")
    for name, value in rows[0].items():
        total = 0 if name == "task" else sum(row[name] for row in able)
        if isinstance(value, bool):
            print(f"| {name} | {total} of {len(able)} |")
        elif name != "task":
            print(f"| {name} | {total / len(able):.2f} |")


if __name__ == "__main__":
    main()
