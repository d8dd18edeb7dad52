"""Measures heads without an engine, with prompts of random words or of a text.

    python scripts/measure/head_prompts.py models/smollm2 --samples 8 --length 768 --out words.json
    python scripts/measure/head_prompts.py models/smollm2 --text FILE --out text.json

What a model that serves does when it starts (`compression/needles.py`), to see what the result
depends on. With --text, prompts are pieces of a file that hide and repeat a few tokens from another
place in it, instead of random words. FILE.json is for `+headkv:profile=FILE.json` of `stand_in.py`.
With --beside FILE.json, prints how much of a budget moves between both.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offline.masked import MaskedModel
from vllm_kvcompress.compression.needles import (
    NEEDLE_WORDS,
    NeedlePrompt,
    needle_mass,
    needle_prompt,
)
from vllm_kvcompress.policies.base import ModelHeads
from vllm_kvcompress.policies.headkv import (
    ByImportance,
    Scores,
    headkv_text,
    mean_importance,
    read_importance,
)
from vllm_kvcompress.policies.parts.allocation import spread
from vllm_kvcompress.policies.parts.profiles import Table
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer


def words_of(tokenizer: Any) -> list[int]:
    """Tokens that are words, as the engine chooses them (`compat/config.py`)."""
    special = {*tokenizer.all_special_ids}
    return sorted(
        number
        for text, number in tokenizer.get_vocab().items()
        if number not in special
        and (plain := text.lstrip("\u2581\u0120 ")).isascii()
        and plain.isalnum()
    )


def text_prompt(words: Sequence[int], start: Sequence[int], length: int, seed: int) -> NeedlePrompt:
    """Draws a piece of a text, with a needle from another place in it, repeated at the end."""
    rng = random.Random(seed)
    size = length - len(start) - 2 * NEEDLE_WORDS
    begin = rng.randrange(len(words) - size)
    noise = words[begin : begin + size]
    rest = [*words[:begin], *words[begin + size :]]
    at, place = rng.randrange(len(rest) - NEEDLE_WORDS), rng.randrange(size + 1)
    needle = rest[at : at + NEEDLE_WORDS]
    prompt = [*start, *noise[:place], *needle, *noise[place:], *needle]
    return NeedlePrompt(prompt, len(start) + place)


def scores_of(model: MaskedModel, prompt: NeedlePrompt) -> torch.Tensor:
    """[layers, H * G] attention that heads pay to a prompt's needle."""
    needle = slice(prompt.needle, prompt.needle + NEEDLE_WORDS)
    layers = model.layers(prompt.tokens[:-1])
    rows = [
        needle_mass(layer.queries[prompt.asked :], layer.keys, needle, layer.scale, 0.0)
        for layer in layers
    ]
    return torch.stack(rows)


def pages_of(importance: Table, model: ModelHeads, share: float, num_blocks: int) -> list[int]:
    """Pages of every KV head at a budget of `share` of so many blocks per head."""
    bound = ByImportance(importance=importance).bind(model)
    flat = [value for row in bound.importance for value in row]
    total = round(share * num_blocks * len(flat))
    return spread(flat, total, [num_blocks] * len(flat), [1] * len(flat))


def moved(one: list[int], other: list[int]) -> float:
    """Part of a budget that other heads have."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2 / sum(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("--samples", type=int, default=8, help="prompts (8)")
    parser.add_argument("--length", type=int, default=768, help="tokens of a prompt (768)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="whose pieces are the prompts")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="FILE.json")
    options = parser.parse_args()
    tokenizer, model = load_tokenizer(options.model), MaskedModel(options.model)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    if options.text is None:
        tokens, draw = words_of(tokenizer), needle_prompt
    else:
        text = options.text.read_text()
        tokens, draw = tokenizer(text, add_special_tokens=False)["input_ids"], text_prompt
    seeds = range(options.seed * 1_000_003, options.seed * 1_000_003 + options.samples)
    columns = [scores_of(model, draw(tokens, start, options.length, seed)) for seed in seeds]
    scores: Scores = torch.stack(columns, dim=2).tolist()
    options.out.write_text(headkv_text(scores))
    config = model.model.config
    heads = ModelHeads(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        num_query_heads=config.num_attention_heads,
        block_size=32,
    )
    own = mean_importance(scores)
    print("| moved beside | at 0.1 | at 0.25 | at 0.5 |\n|---|---|---|---|")
    for path in options.beside:
        other = read_importance(path)
        shares = [
            moved(pages_of(own, heads, share, 32), pages_of(other, heads, share, 32))
            for share in (0.1, 0.25, 0.5)
        ]
        print(f"| {path.name} | {' | '.join(f'{part:.1%}' for part in shares)} |")


if __name__ == "__main__":
    main()
