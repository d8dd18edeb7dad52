"""Reads a text and compresses it on the way, event by event, without an engine.

Events are where a server has them (`scheduling/ledger.py`), and what they evict is gone, so later
hidden states differ. For policies that merge nothing; heads and layers may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offline.dense import BLOCK_SIZE
from offline.gathered_kv import GatheredKV
from offline.masked import MaskedModel
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import EntryState, LayerView
from vllm_kvcompress.scheduling.ledger import RequestLedger
from vllm_kvcompress.scheduling.rule import CompressionRule

MAX_OBSERVED_QUERIES = 256  # that a policy may observe


@dataclass(frozen=True)
class LayerCache:
    """A layer's cache, in position order; heads that hold less than others begin later.

        the longest head:   | 0  1  2  3 .............. n - 1 |
        another one:        | nothing | 0  1 .......... n - p - 1 |

    Attributes:
        keys, values: [H, n, D].
        padding: [H] int64 leading columns of a head that hold nothing (p above).
        accumulated: [H, n] fp32 attention received at events so far.
        positions: [H, n] int64.
        queries: [w, H * G, D] of the last tokens.
        layer, num_layers: which one of how many.
        rotary: how keys are rotated.
    """

    keys: Tensor
    values: Tensor
    padding: Tensor
    accumulated: Tensor
    positions: Tensor
    queries: Tensor
    layer: int
    num_layers: int
    rotary: Rotary | None

    @property
    def bias(self) -> Tensor:
        """[H, n] zeros, and minus infinity in columns that hold nothing."""
        columns = torch.arange(self.keys.shape[1], device=self.keys.device)
        return self.keys.new_zeros(self.keys.shape[:2]).masked_fill(
            columns < self.padding[:, None], float("-inf")
        )

    @property
    def num_tail(self) -> int:
        """Tokens in the partial last block, the same in all heads."""
        return int(self.keys.shape[1] - self.padding[0]) % BLOCK_SIZE

    def from_left(self, rows: Tensor) -> Tensor:
        """[H, n - t, ...] entries of full blocks of `rows`, each head's first one at index 0."""
        num_full = self.keys.shape[1] - self.num_tail
        places = torch.arange(num_full, device=rows.device) + self.padding[:, None]
        heads = torch.arange(len(rows), device=rows.device)[:, None]
        return rows[heads, places.clamp_max(max(0, num_full - 1))]

    def view(self, num_queries: int) -> LayerView:
        """What a policy that reads no weights sees of the resident tokens."""
        keys, values = self.keys.float(), self.values.float()
        num_full = keys.shape[1] - self.num_tail
        tail = keys[:, num_full:], values[:, num_full:]
        rows = self.from_left(keys), self.from_left(values)
        return LayerView(
            kv=GatheredKV.of(*rows, lengths=num_full - self.padding, tail=tail),
            queries=self.queries[len(self.queries) - num_queries :].float(),
            scale=self.keys.shape[2] ** -0.5,
            layers=range(self.layer, self.layer + 1),
            block_size=BLOCK_SIZE,
            ends=(1 + int(self.positions[0, -1]),),
            rotary=self.rotary,
            entries=EntryState(
                positions=self.from_left(self.positions),
                accumulated=self.from_left(self.accumulated),
            ),
        )

    def joined(self, begin: int, query: Tensor, key: Tensor, value: Tensor) -> LayerCache:
        """With what was read from position `begin` on: [1, heads, m, D] each."""
        count = key.shape[2]
        new = torch.arange(begin, begin + count, device=key.device).expand(len(self.keys), -1)
        room = self.accumulated.new_zeros(len(self.keys), count)
        queries = torch.cat([self.queries, query[0].transpose(0, 1)])
        return replace(
            self,
            keys=torch.cat([self.keys, key[0]], dim=1),
            values=torch.cat([self.values, value[0]], dim=1),
            accumulated=torch.cat([self.accumulated, room], dim=1),
            positions=torch.cat([self.positions, new], dim=1),
            queries=queries[-MAX_OBSERVED_QUERIES:],
        )


class BlockwiseModel(MaskedModel):
    """Predicts a text's continuation with a cache that is compressed again and again."""

    def __init__(self, folder: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(folder, dtype)
        self._read_already: tuple[list[int], dict[int, list[LayerCache]]] = ([], {})

    def nats(
        self, tokens: list[int], num_context: int, pipeline: Pipeline, rule: CompressionRule
    ) -> float:
        """Mean of `losses`, which explains the arguments."""
        return float(self.losses(tokens, num_context, pipeline, rule).mean())

    def losses(
        self, tokens: list[int], num_context: int, pipeline: Pipeline, rule: CompressionRule
    ) -> Tensor:
        """[m] nats of every token behind the context but its first.

        Args:
            tokens: of the context and what follows it.
            num_context: which counts as the prompt; what follows counts as generated.
            pipeline: the policy.
            rule: when, and down to what; blocks of BLOCK_SIZE.

        Raises:
            ConfigError: a policy that merges, or that reads output weights.
        """
        needs = pipeline.needs
        if pipeline.merger is not None or needs.output_weight or needs.output_root:
            raise ConfigError(
                f"{pipeline.name}: expected a policy that merges nothing and reads no output "
                "weights; measure others with `vllm-kvcompress eval`."
            )
        ledger = RequestLedger(num_context, rule, num_prompt_tokens=len(tokens))
        caches, read = self._empty(), 0
        losses: list[Tensor] = []
        last = len(tokens) - 1
        while read < last:
            stops = [rule.next_position(num_context, read), num_context, last]
            end = min(stop for stop in stops if stop is not None and stop > read)
            if end <= num_context:
                untouched = ledger.first_event_position is None
                caches = self._read_context(tokens, caches, read, end, untouched)
            else:
                logits, caches = self._read(tokens, caches, read, end, end - read)
                said = torch.tensor(tokens[read + 1 : end + 1], device=logits.device)
                losses.append(torch.nn.functional.cross_entropy(logits, said, reduction="none"))
            read = end
            decision = ledger.decide(read)
            if decision is not None and decision.skipped is None:
                queries = ledger.observed_window(read)
                caches = _compressed(pipeline, caches, read, decision.num_kept_blocks, queries)
                ledger.commit(read, decision.num_kept_blocks)
        return torch.cat(losses)

    def _read_context(
        self, tokens: list[int], caches: list[LayerCache], read: int, end: int, untouched: bool
    ) -> list[LayerCache]:
        """What was never compressed is read once for all settings."""
        if self._read_already[0] is not tokens:
            self._read_already = (tokens, {})
        known = self._read_already[1]
        if untouched and end in known:
            return known[end]
        caches = self._read(tokens, caches, read, end, 1)[1]
        if untouched:
            known[end] = caches
        return caches

    def _read(
        self, tokens: list[int], caches: list[LayerCache], read: int, end: int, num_logits: int
    ) -> tuple[Tensor, list[LayerCache]]:
        """Logits of the last tokens, and the caches with what was read."""
        if read:
            self._context = [(each.keys, each.values, each.bias) for each in caches]
        some = torch.tensor(tokens[read:end], device=self.model.device)
        logits = self._go_on(read, some, num_logits)
        seen = [(query, key, value) for _, query, key, value, _ in self._seen]
        return logits, [each.joined(read, *new) for each, new in zip(caches, seen, strict=True)]

    def _empty(self) -> list[LayerCache]:
        config = self.model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        none = torch.empty(config.num_key_value_heads, 0, size, device=self.model.device)
        none = none.to(self.model.dtype)
        numbers, queries = none[..., 0], none.new_empty(0, config.num_attention_heads, size)
        padding = torch.zeros(len(none), dtype=torch.int64, device=none.device)
        layers = range(config.num_hidden_layers)
        layout = (len(layers), self._rotary())
        return [
            LayerCache(
                none, none, padding, numbers.float(), numbers.long(), queries, layer, *layout
            )
            for layer in layers
        ]


def _compressed(
    pipeline: Pipeline,
    caches: list[LayerCache],
    position: int,
    num_blocks: int,
    num_queries: int,
) -> list[LayerCache]:
    """All layers after an event at `position` that leaves so many blocks."""
    num_heads, last = len(caches[0].keys), caches[0]
    shape = (len(caches), num_heads, last.queries.shape[1], BLOCK_SIZE)
    bound = pipeline.bind(*shape)
    held = [int((each.keys.shape[1] - each.padding).sum()) // BLOCK_SIZE for each in caches]
    pages = bound.allocator.layer_pages(num_blocks, held, num_heads, position // BLOCK_SIZE)
    return [
        _compressed_layer(bound, cache, count, num_queries)
        for cache, count in zip(caches, pages, strict=True)
    ]


def _compressed_layer(
    pipeline: Pipeline, cache: LayerCache, num_pages: int, num_queries: int
) -> LayerCache:
    """A layer that keeps so many pages over all heads; the partial last block stays."""
    view = cache.view(num_queries)
    selection = compress_layer(pipeline, view, num_pages)
    counts = selection.page_counts * BLOCK_SIZE
    longest, heads = int(counts.max()), selection.heads(BLOCK_SIZE)
    columns = torch.arange(len(heads), device=heads.device) - counts.cumsum(0)[heads] + longest
    kept = counts.new_zeros(len(counts), longest)
    kept[heads, columns] = selection.kept_indices
    num_full = cache.keys.shape[1] - cache.num_tail
    received = cache.accumulated
    if selection.merged.accumulated is not None:
        received = selection.merged.accumulated
    else:
        received = cache.from_left(received)

    def rows(from_left: Tensor, whole: Tensor) -> Tensor:
        these = torch.arange(len(kept), device=kept.device)[:, None]
        return torch.cat([from_left[these, kept], whole[:, num_full:]], dim=1)

    return replace(
        cache,
        keys=rows(cache.from_left(cache.keys), cache.keys),
        values=rows(cache.from_left(cache.values), cache.values),
        padding=longest - counts,
        accumulated=rows(received, cache.accumulated),
        positions=rows(cache.from_left(cache.positions), cache.positions),
    )
