"""The oracle of decoding: Hugging Face's Llama with only the kept tokens per layer and head.

Shares no code with the package: the prompt is computed densely, and every later token attends
to the kept prompt tokens, the prompt's last partial block and the tokens generated so far.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

BLOCK = 32


class KeptTokensDecoder:
    """A Llama that drops chosen tokens of its prompt after reading it.

    Args:
        model: directory of the model.
        prompt: token ids.
        kept: kept[layer][head] = positions, among the first `num_full` tokens, that stay.
        num_full: tokens of the prompt's full blocks; those behind them always stay.
        corrects: estimate what forgotten tokens would have added, as MomentKV does.
    """

    def __init__(
        self,
        model: str,
        prompt: list[int],
        kept: list[list[list[int]]],
        num_full: int,
        corrects: bool = False,
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.config = self.model.config
        self.num_tokens, self.corrects = len(prompt), corrects
        self.prompt_logits, layers = self.read_prompt(prompt)
        self.first_logits = self.prompt_logits[-1]
        self.keys: list[list[Tensor]] = []
        self.values: list[list[Tensor]] = []
        self.gone_keys: list[list[Tensor]] = []
        self.gone_values: list[list[Tensor]] = []
        for layer in range(self.config.num_hidden_layers):
            keys, values = layers[layer]
            positions = [
                [*kept[layer][head], *range(num_full, len(prompt))]
                for head in range(self.config.num_key_value_heads)
            ]
            self.keys.append([keys[h, p] for h, p in enumerate(positions)])
            self.values.append([values[h, p] for h, p in enumerate(positions)])
            gone = [sorted(set(range(len(prompt))) - set(p)) if corrects else [] for p in positions]
            self.gone_keys.append([keys[h, p] for h, p in enumerate(gone)])
            self.gone_values.append([values[h, p] for h, p in enumerate(gone)])

    def forget(self, kept: list[list[list[int]]]) -> None:
        """Drops tokens that heads still have and that are not `kept`; a partial block stays."""
        for layer, heads in enumerate(kept):
            for head, places in enumerate(heads):
                keys, values = self.keys[layer][head], self.values[layer][head]
                stay = [*places, *range(len(keys) // BLOCK * BLOCK, len(keys))]
                self.keys[layer][head], self.values[layer][head] = keys[stay], values[stay]
                if self.corrects:
                    gone = sorted(set(range(len(keys))) - set(stay))
                    known = self.gone_keys[layer], self.gone_values[layer]
                    for rows, more in zip(known, (keys[gone], values[gone]), strict=True):
                        rows[head] = torch.cat([rows[head], more])

    @torch.no_grad()
    def read_prompt(self, prompt: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Returns the logits, and every layer's keys and values [heads, tokens, head_size]."""
        cache = self.cache()
        output = self.model(torch.tensor([prompt]), past_key_values=cache)
        return output.logits[0], [(layer.keys[0], layer.values[0]) for layer in cache.layers]

    def cache(self) -> DynamicCache:
        """Makes the cache for the prompt's keys and values."""
        return DynamicCache()

    def stored(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a token's keys and values after storing; subclasses quantize."""
        return keys, values

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Appends a token and returns the logits after it, [vocabulary]."""
        inner = self.model.model
        hidden = inner.embed_tokens(torch.tensor([[token]]))
        position = torch.tensor([[self.num_tokens]])
        rotary = inner.rotary_emb(hidden, position)
        for index, layer in enumerate(inner.layers):
            normed = layer.input_layernorm(hidden)
            hidden = hidden + self._attend(index, layer.self_attn, normed, rotary)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.num_tokens += 1
        return self.model.lm_head(inner.norm(hidden))[0, 0]

    def _attend(self, index: int, attention, hidden: Tensor, rotary) -> Tensor:
        size = self.config.head_dim
        shape = (1, 1, -1, size)
        query = attention.q_proj(hidden).view(shape).transpose(1, 2)
        key = attention.k_proj(hidden).view(shape).transpose(1, 2)
        value = attention.v_proj(hidden).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        key, value = self.stored(index, key, value)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        heads = []
        for head in range(self.config.num_key_value_heads):
            keys = torch.cat([self.keys[index][head], key[0, head]])
            values = torch.cat([self.values[index][head], value[0, head]])
            self.keys[index][head], self.values[index][head] = keys, values
            read = self.read([query[0, head * group + i, 0] for i in range(group)], keys)
            keys, values = keys[read], values[read]
            for member in range(head * group, (head + 1) * group):
                logits = keys @ query[0, member, 0] / size**0.5
                output = torch.softmax(logits, 0) @ values
                gone = self.gone_keys[index][head], self.gone_values[index][head]
                heads.append(_corrected(output, logits, query[0, member, 0] / size**0.5, *gone))
        return attention.o_proj(torch.cat(heads)[None, None])

    def read(self, queries: list[Tensor], keys: Tensor) -> list[int]:
        """Returns which of a head's tokens its queries attend to: all."""
        return list(range(len(keys)))


class PagesDecoder(KeptTokensDecoder):
    """A decoder whose heads read the first, the last and the highest-scored pages.

    Args:
        part: of its pages that a head reads.
        number: pages that a head reads instead.
        score: the highest mean of products with the keys of a half of a page (halves), or bounds on
            products with its keys; or bounds of which minima are rounded down and maxima up to 8
            bits (int8).
        always: pages at the beginning and at the end that are read whatever their scores are.
        shortest: heads with fewer tokens read everything.

    Attributes:
        closest: least difference between a page that was read and one that was not, as a part of
            the former's score. Where it is that of rounding the engine may say otherwise.
    """

    def __init__(
        self,
        *args: Any,
        part: float = 1.0,
        number: int | None = None,
        score: str = "halves",
        always: tuple[int, int] = (0, 1),
        shortest: int = 128,
    ) -> None:
        super().__init__(*args)
        self.part, self.number, self.score = part, number, score
        self.always, self.shortest = always, shortest
        self.closest = math.inf

    def read(self, queries: list[Tensor], keys: Tensor) -> list[int]:
        """Returns the tokens of the chosen pages, 32 tokens each."""
        pages = [list(range(at, min(at + BLOCK, len(keys)))) for at in range(0, len(keys), BLOCK)]
        first, last = self.always
        number = self.number or max(first + last + 1, math.ceil(self.part * len(pages) - 1e-9))
        if len(keys) < self.shortest or number >= len(pages):
            return super().read(queries, keys)
        numbers, asked = keys.tolist(), [query.tolist() for query in queries]
        scores: dict[int, float] = {}
        for page_index in range(first, len(pages) - last):
            page = [numbers[token] for token in pages[page_index]]
            scores[page_index] = max(page_score(query, page, self.score) for query in asked)
        order = sorted(scores, key=lambda page: -scores[page])
        room = number - first - last
        lowest, next_one = scores[order[room - 1]], scores[order[room]]
        self.closest = min(self.closest, (lowest - next_one) / abs(lowest))
        ends = [*range(first), *range(len(pages) - last, len(pages))]
        return [token for page in sorted([*order[:room], *ends]) for token in pages[page]]


class ChunksDecoder(PagesDecoder):
    """A decoder that also reads its prompt in part: each chunk's queries share their head's pages.

    Args:
        chunk: tokens of one.
        num_read_fully: first tokens of the prompt, which read all pages.

    Attributes:
        chunk_pages: that heads have read, and had, by the end of their chunk.
        closest_in_chunks: as `closest`.
    """

    def __init__(self, *args: Any, chunk: int, num_read_fully: int, **how: Any) -> None:
        self.chunk, self.num_read_fully, self.how = chunk, num_read_fully, how
        self.chunk_pages: dict[int, tuple[int, int]] = {}
        self.closest_in_chunks = math.inf
        super().__init__(*args, **how)

    @torch.no_grad()
    def read_prompt(self, prompt: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        logits, layers = super().read_prompt(prompt[: self.num_read_fully])
        for start in range(self.num_read_fully, len(prompt), self.chunk):
            more = self._read_chunk(prompt[start : start + self.chunk], start, layers)
            logits = torch.cat((logits, more))
        return logits, layers

    def _read_chunk(self, tokens: list[int], start: int, layers: list) -> Tensor:
        inner, size = self.model.model, self.config.head_dim
        hidden = inner.embed_tokens(torch.tensor([tokens]))
        rotary = inner.rotary_emb(hidden, torch.arange(start, start + len(tokens))[None])
        for index, layer in enumerate(inner.layers):
            normed, attention = layer.input_layernorm(hidden), layer.self_attn
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            shape = (1, len(tokens), -1, size)
            query, key, value = (p(normed).view(shape).transpose(1, 2) for p in projections)
            query, key = apply_rotary_pos_emb(query, key, *rotary)
            keys = torch.cat([layers[index][0], key[0]], dim=1)
            values = torch.cat([layers[index][1], value[0]], dim=1)
            layers[index] = keys, values
            group, outputs = len(query[0]) // len(keys), []
            for head in range(len(keys)):
                head_queries = query[0, head * group : (head + 1) * group]
                read = self._pages_of_chunk(head_queries, keys[head], len(tokens))
                later = torch.tensor(read) > torch.arange(start, start + len(tokens))[:, None]
                logits = head_queries @ keys[head, read].T / size**0.5
                weights = torch.softmax(logits.masked_fill(later, -math.inf), -1)
                outputs.append(weights @ values[head, read])
            joined = torch.cat(outputs).transpose(0, 1).flatten(1)[None]
            hidden = hidden + attention.o_proj(joined)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(inner.norm(hidden))[0]

    def _pages_of_chunk(self, queries: Tensor, keys: Tensor, num_tokens: int) -> list[int]:
        """Returns the positions that a chunk's queries read: [group, tokens, head_size]."""
        pages = [list(range(at, min(at + BLOCK, len(keys)))) for at in range(0, len(keys), BLOCK)]
        first, last = self.how["always"]
        room = self.how["number"] - first - last
        last = max(last, math.ceil(num_tokens / BLOCK))
        scores = {}
        for page_index in range(first, len(pages) - last):
            page = keys[pages[page_index]]
            ends = page[: BLOCK // 2].sum(0), page[BLOCK // 2 :].sum(0)
            scores[page_index] = max(float((queries @ half).max()) for half in ends)
        order = sorted(scores, key=lambda page: -scores[page])
        if len(order) > room:
            lowest, next_one = scores[order[room - 1]], scores[order[room]]
            self.closest_in_chunks = min(self.closest_in_chunks, (lowest - next_one) / abs(lowest))
        ends = [*range(min(first, len(pages))), *range(max(first, len(pages) - last), len(pages))]
        read = sorted([*order[:room], *ends])
        self.chunk_pages[len(keys)] = (len(read), len(pages))
        return [token for page in read for token in pages[page]]


def page_score(query: list[float], page: list[list[float]], score: str) -> float:
    """Returns a page's score for some queries; see `PagesDecoder`."""
    if score == "halves":
        products, half = [_product(query, key) for key in page], len(page) // 2
        return max(sum(products[:half]), sum(products[half:]))
    step = _step(page) if score == "int8" else None
    total = 0.0
    for element, wanted in enumerate(query):
        ends = [min(key[element] for key in page), max(key[element] for key in page)]
        if step is not None:
            ends = [math.floor(ends[0] / step) * step, math.ceil(ends[1] / step) * step]
        total += max(wanted * end for end in ends)
    return total


def _step(page: list[list[float]]) -> float:
    """Returns int8's step: a power of two of which 127 exceed the largest key element."""
    step, largest = 2.0**-40, max(abs(element) for key in page for element in key)
    while step * 127 <= largest:
        step *= 2
    return step


def _product(query: list[float], key: list[float]) -> float:
    return sum(wanted * number for wanted, number in zip(query, key, strict=True))


def _corrected(output: Tensor, logits: Tensor, query: Tensor, keys: Tensor, values: Tensor):
    """Adds the forgotten tokens' estimated share; `query` is scaled already."""
    if not len(keys):
        return output
    estimate = values.mean(0)
    for key, value in zip(keys, values, strict=True):
        estimate = estimate + (value - values.mean(0)) * ((key - keys.mean(0)) @ query) / len(keys)
    kept_mass, evicted_mass = logits.exp().sum(), len(keys) * (query @ keys.mean(0)).exp()
    return (kept_mass * output + evicted_mass * estimate) / (kept_mass + evicted_mass)


def kept_positions(records: list[dict[str, Any]], num_layers: int) -> list[list[list[int]]]:
    """kept[layer][head] of one event, from the flat records."""
    kept: list[list[list[int]]] = []
    for record in records[:num_layers]:
        heads, start = [], 0
        for count in record["counts"]:
            heads.append(record["kept"][start : start + count * BLOCK])
            start += count * BLOCK
        kept.append(heads)
    return kept


def visible_positions(
    records: list[dict[str, Any]], num_layers: int, ends: list[int]
) -> list[list[list[list[int]]]]:
    """visible[event][layer][head], the positions in full blocks that a head still reads.

    Args:
        records: what each event keeps of the entries that there are, `num_layers` for each.
        num_layers: layers that are compressed.
        ends: number of tokens at each event.
    """
    visible: list[list[list[list[int]]]] = []
    for number, end in enumerate(ends):
        kept = kept_positions(records[number * num_layers :], num_layers)
        start = ends[number - 1] // BLOCK * BLOCK if number else 0
        new, event = range(start, end // BLOCK * BLOCK), []
        for layer, heads in enumerate(kept):
            before = visible[-1][layer] if visible else [[] for _ in heads]
            entries = [[*old, *new] for old in before]
            event.append([[e[at] for at in rows] for e, rows in zip(entries, heads, strict=True)])
        visible.append(event)
    return visible


def check_decoding(
    model: str, prompt: list[int], records: list[dict[str, Any]], output: dict[str, Any]
) -> None:
    """Asserts that every token follows from dense attention over the kept tokens, to 2e-3.

    Args:
        model: directory.
        prompt: token ids; compressed once, when all of them were read.
        records: what the event kept, layer by layer.
        output: tokens, and the logprobs of some candidates for each.
    """
    kept = kept_positions(records, num_layers=len(records))
    decoder = KeptTokensDecoder(model, prompt, kept, len(prompt) // BLOCK * BLOCK)
    follow(decoder, output)


def follow(
    decoder: KeptTokensDecoder,
    output: dict[str, Any],
    events: dict[int, list[list[list[int]]]] | None = None,
    within: float = 2e-3,
) -> None:
    """Asserts that decoder and engine agree on the logprobs of every token.

    Args:
        decoder: behind the prompt.
        output: tokens, and the logprobs of some candidates for each.
        events: what those keep that happen while it answers, by how many tokens there are then.
        within: by how much logprobs may differ.
    """
    logits = decoder.first_logits
    for token, logprobs in zip(output["tokens"], output["logprobs"], strict=True):
        expected = torch.log_softmax(logits, 0)
        for candidate, logprob in logprobs.items():
            assert abs(float(expected[int(candidate)]) - logprob) < within, (token, candidate)
        logits = decoder.step(token)
        if events is not None and decoder.num_tokens in events:
            decoder.forget(events[decoder.num_tokens])
