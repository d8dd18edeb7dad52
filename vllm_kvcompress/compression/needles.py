"""Prompts whose words return, and the attention that heads pay to the first time.

A prompt of random words hides a needle: a few words of cue and of content. At the end the prompt
repeats it. Retrieval heads attend from the repeated words to the needle; the attention that a query
head spends there, from 0 to 1, is its score in that prompt.

    noise ... | cue content | ... noise | cue content
                ^~~~~~~~~~~~ attention ~~~~~~~~^
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.cache.query_windows import QueryRows
from vllm_kvcompress.compression.repetitions import Repetition, Repetitions

CUE_WORDS = 3
CONTENT_WORDS = 6
NEEDLE_WORDS = CUE_WORDS + CONTENT_WORDS
MIN_LENGTH = 4 * NEEDLE_WORDS  # so that there is noise around the needle


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt, and the position of its needle's first token."""

    tokens: list[int]
    needle: int

    @property
    def asked(self) -> int:
        """Position of the first token that has content to retrieve: the repeated cue's last."""
        return len(self.tokens) - CONTENT_WORDS - 1


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
    needle = rng.sample(list(words), NEEDLE_WORDS)
    others = [word for word in words if word not in set(needle)]
    noise = [rng.choice(others) for _ in range(length - len(start) - 2 * NEEDLE_WORDS)]
    place = rng.randrange(len(noise) + 1)
    tokens = [*start, *noise[:place], *needle, *noise[place:], *needle]
    return NeedlePrompt(tokens, len(start) + place)


class NeedleAttention(Repetitions):
    """Measures a prompt's needle with the queries that would score a context.

    Args:
        pool: page pool of the group.
        sinks: returns the [H, G] attention sinks of a layer, if it has any.
        softcap: cap of the attention logits; 0: none.

    Attributes:
        masses: [num_query_heads] fp32 attention on the needle, by layer, of the last prompt.
    """

    def __init__(
        self, pool: PagePool, sinks: Callable[[int], Tensor | None], softcap: float
    ) -> None:
        super().__init__(pool, sinks)
        self.masses: dict[int, Tensor] = {}
        self._softcap = softcap
        self._needle = slice(0)

    def watch(self, request_id: str, prompt: NeedlePrompt) -> None:
        """Measures the request that reads a prompt up to its last token."""
        self.masses, self._needle = {}, slice(prompt.needle, prompt.needle + NEEDLE_WORDS)
        self.register({request_id: prompt.asked})

    def observe(self, layer: int, repetition: Repetition, queries: QueryRows, scale: float) -> None:
        """Measures a layer with the queries of a step that holds all tokens with content to come.

        Args:
            layer: number in the group.
            repetition: the request's work.
            queries: [tokens, num_query_heads, head_size] of all requests.
            scale: softmax scale.
        """
        table = self._pool.layer_page_ids(layer, repetition.blocks)
        keys = self._pool.keys(table, layer).flatten(1, 2)[:, : repetition.num_tokens]
        rows, sinks = queries[repetition.queries], self._sinks(layer)
        self.masses[layer] = needle_mass(rows, keys, self._needle, scale, self._softcap, sinks)


def needle_mass(
    queries: Tensor,
    keys: Tensor,
    needle: slice,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns [H * G] fp32 mean attention of queries on a needle.

    Args:
        queries: [Q, H * G, D] of a prompt's last tokens.
        keys: [H, n, D] of all its tokens.
        needle: the needle's tokens.
        scale: softmax scale.
        softcap: cap of the logits; 0: none.
        sinks: [H, G] logits that take part in every softmax and are no token; None: none.
    """
    by_head = queries.float().unflatten(1, (len(keys), -1))
    logits = torch.einsum("qhgd,hnd->hgqn", by_head, keys.float()) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    num_queries, num_tokens = logits.shape[2:]
    later = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=logits.device)
    later = later.triu(num_tokens - num_queries + 1)
    logits = logits.masked_fill(later, -torch.inf)
    masses = logits.softmax(dim=-1)[..., needle].sum(dim=-1)
    if sinks is not None:
        masses *= torch.sigmoid(logits.logsumexp(dim=-1) - sinks[..., None])
    return masses.mean(dim=-1).flatten()
