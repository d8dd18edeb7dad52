"""Measures which heads of a model retrieve, for HeadKV and DuoAttention.

A prompt of random words hides a needle: a few words of cue and of content. At the end the prompt
repeats it. Retrieval heads attend from the repeated words to the needle; the attention that a query
head spends there, from 0 to 1, is its score in that prompt.

    noise ... | cue content | ... noise | cue content
                ^~~~~~~~~~~~ attention ~~~~~~~~^

The files have the format that the methods' authors publish; `policies/headkv.py` and
`policies/duoattention.py` read them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.files import write_whole

CUE_WORDS = 3
CONTENT_WORDS = 6
CHUNK_TOKENS = 256  # queries whose attention is in memory at a time
FULL_ATTENTION = "full_attention"

Scores = list[list[list[float]]]  # by layer, query head and prompt


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt, and the position of its needle's first token."""

    tokens: list[int]
    needle: int

    @property
    def asked(self) -> int:
        """Position of the first token that has content to retrieve: the repeated cue's last."""
        return len(self.tokens) - CONTENT_WORDS - 1


@dataclass(frozen=True)
class ProfileSettings:
    """How to measure: number of prompts, tokens of a prompt, and the prompts' seed."""

    num_samples: int = 16
    length: int = 1024
    seed: int = 0


def needle_prompt(
    words: Sequence[int], start: Sequence[int], length: int, seed: int
) -> NeedlePrompt:
    """Draws a prompt of `length` tokens with a needle somewhere, repeated at the end.

    Args:
        words: tokens to draw from; the needle's own do not occur elsewhere.
        start: tokens that every prompt of the model begins with.
        length: of the prompt.
        seed: of the draw.
    """
    rng = random.Random(seed)
    size = CUE_WORDS + CONTENT_WORDS
    needle = rng.sample(list(words), size)
    others = [word for word in words if word not in set(needle)]
    noise = [rng.choice(others) for _ in range(length - len(start) - 2 * size)]
    place = rng.randrange(len(noise) + 1)
    tokens = [*start, *noise[:place], *needle, *noise[place:], *needle]
    return NeedlePrompt(tokens, len(start) + place)


def vocabulary_words(tokenizer: Any, vocabulary_size: int) -> list[int]:
    """Tokens that are words, if the vocabulary shows it; otherwise all but special ones."""
    special = set(tokenizer.all_special_ids)
    ids = {
        text: number
        for text, number in tokenizer.get_vocab().items()
        if number not in special and number < vocabulary_size
    }
    words = sorted(
        number
        for text, number in ids.items()
        if (plain := text.lstrip("\u2581\u0120 ")).isascii() and plain.isalnum()
    )
    return words if len(words) >= 4 * (CUE_WORDS + CONTENT_WORDS) else sorted(ids.values())


def measure_heads(
    model: Any,
    tokenizer: Any,
    settings: ProfileSettings,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Scores:
    """Retrieval scores, from 0 to 1, by full-attention layer, query head and prompt.

    Args:
        model: a Hugging Face causal LM with eager attention.
        tokenizer: the model's.
        settings: how to measure.
        progress: wraps the loop over prompts.

    Raises:
        ConfigError: the prompt is too short, too long for the model, or the vocabulary too small.
    """
    config = model.config.get_text_config()
    words = vocabulary_words(tokenizer, config.vocab_size)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    _check(settings.length, config, words)
    layers = compressed_layers(config)
    scores: Scores = [[[] for _ in range(config.num_attention_heads)] for _ in layers]
    for sample in progress(range(settings.num_samples)):
        seed = settings.seed * 1_000_003 + sample
        prompt = needle_prompt(words, start, settings.length, seed)
        attentions = _asked_attention(model, prompt)
        for row, layer in zip(scores, layers, strict=True):
            for head, mass in zip(row, needle_mass(attentions[layer], prompt), strict=True):
                head.append(mass)
    return scores


def compressed_layers(config: Any) -> list[int]:
    """Layers with full attention; sliding-window layers are never compressed."""
    kinds = getattr(config, "layer_types", None) or [FULL_ATTENTION] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind == FULL_ATTENTION]


def needle_mass(attention: torch.Tensor, prompt: NeedlePrompt) -> list[float]:
    """Mean attention on the needle by query head, of the tokens with content to retrieve.

    `attention` is [query heads, asking tokens, tokens] fp32.
    """
    needle = slice(prompt.needle, prompt.needle + CUE_WORDS + CONTENT_WORDS)
    return [float(mass) for mass in attention[:, :, needle].sum(dim=2).mean(dim=1)]


def _asked_attention(model: Any, prompt: NeedlePrompt) -> list[torch.Tensor]:
    """Attention of the tokens that predict content: per layer [query heads, tokens, tokens] fp32.

    The prompt goes through the model in chunks, so that no attention matrix of the full prompt
    exists; only the last chunk, the tokens that predict content, returns its attention.
    """
    tokens = torch.tensor([prompt.tokens[:-1]], device=model.device)
    cache = None
    with torch.inference_mode():
        for begin in range(0, prompt.asked, CHUNK_TOKENS):
            chunk = tokens[:, begin : min(begin + CHUNK_TOKENS, prompt.asked)]
            cache = model(chunk, past_key_values=cache, use_cache=True).past_key_values
        asking = tokens[:, prompt.asked :]
        last = model(asking, past_key_values=cache, use_cache=True, output_attentions=True)
    if not last.attentions or any(layer is None for layer in last.attentions):
        raise ConfigError(
            f"{type(model).__name__} does not hand out its attention, which profiles are measured "
            "by; use a policy that needs no profile, such as adakv."
        )
    return [layer[0].float() for layer in last.attentions]


def _check(length: int, config: Any, words: Sequence[int]) -> None:
    size = CUE_WORDS + CONTENT_WORDS
    longest = getattr(config, "max_position_embeddings", None) or length
    if not 4 * size <= length <= longest:
        raise ConfigError(
            f"--length {length}: expected at least {4 * size} tokens, so that there is noise "
            f"around the needle, and at most the model's {longest}."
        )
    if len(words) < 2 * size:
        raise ConfigError(
            f"expected a vocabulary of at least {2 * size} ordinary tokens, found {len(words)}."
        )


def write_headkv(path: Path, scores: Scores) -> None:
    """Writes HeadKV's JSON: `{"layer-head": [score per prompt], ...}`."""
    rows = {
        f"{layer}-{head}": values
        for layer, heads in enumerate(scores)
        for head, values in enumerate(heads)
    }
    write_whole(path, json.dumps(rows, indent=1) + "\n")


@dataclass(frozen=True)
class StreamingSizes:
    """What DuoAttention's pattern contains besides gates.

    Attributes:
        num_sinks, num_recent: first and last tokens that streaming heads keep.
        sparsity: share of the heads whose gate is written as 0, or None for none.
    """

    num_sinks: int = 128
    num_recent: int = 256
    sparsity: float | None = None


def gates_of(scores: Scores, num_kv_heads: int, sparsity: float | None) -> list[list[float]]:
    """Gates in [0, 1] by layer and KV head: mean scores relative to the highest.

    A KV head scores as the best query head that reads it.
    """
    group = len(scores[0]) // num_kv_heads
    means = [[sum(values) / len(values) for values in heads] for heads in scores]
    best = [[max(row[h * group : (h + 1) * group]) for h in range(num_kv_heads)] for row in means]
    top = max(map(max, best)) or 1.0
    gates = [[value / top for value in row] for row in best]
    places = [(la, h) for la in range(len(gates)) for h in range(num_kv_heads)]
    places.sort(key=lambda place: gates[place[0]][place[1]])
    for layer, head in places[: round((sparsity or 0.0) * len(places))]:
        gates[layer][head] = 0.0
    return gates


def write_duoattention(
    path: Path, scores: Scores, num_kv_heads: int, sizes: StreamingSizes
) -> None:
    """Writes DuoAttention's pattern: a TSV of gates and, beside it, `config.json`."""
    gates = gates_of(scores, num_kv_heads, sizes.sparsity)
    write_whole(path, "".join("\t".join(f"{gate:.6f}" for gate in row) + "\n" for row in gates))
    settings = {"sink_size": sizes.num_sinks, "recent_size": sizes.num_recent}
    write_whole(path.parent / "config.json", json.dumps(settings) + "\n")
