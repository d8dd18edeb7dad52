"""Reads a text and compresses it on the way, event by event, without an engine.

Events are where a server has them (`scheduling/ledger.py`), and what they evict is gone, so later
hidden states differ. For policies that give all heads the same and merge nothing.
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
    """A layer's cache, in position order.

    Attributes:
        keys, values: [H, n, D].
        accumulated: [H, n] fp32 attention received at events so far.
        positions: [H, n] int64.
        queries: [w, H * G, D] of the last tokens.
        layer, num_layers: which one of how many.
        rotary: how keys are rotated.
    """

    keys: Tensor
    values: Tensor
    accumulated: Tensor
    positions: Tensor
    queries: Tensor
    layer: int
    num_layers: int
    rotary: Rotary | None

    @property
    def no_bias(self) -> Tensor:
        """Logit biases [H, n] of zeros."""
        return self.keys.new_zeros(self.keys.shape[:2])

    def view(self, num_tokens: int, num_queries: int) -> LayerView:
        """What a policy without values sees of the first resident tokens, whole blocks."""
        keys, values = self.keys.float(), self.values.float()
        tail = keys[:, num_tokens:], values[:, num_tokens:]
        return LayerView(
            kv=GatheredKV.of(keys[:, :num_tokens], values[:, :num_tokens], tail=tail),
            queries=self.queries[len(self.queries) - num_queries :].float(),
            scale=self.keys.shape[2] ** -0.5,
            layers=range(self.layer, self.layer + 1),
            block_size=BLOCK_SIZE,
            rotary=self.rotary,
            entries=EntryState(
                positions=self.positions[:, :num_tokens],
                accumulated=self.accumulated[:, :num_tokens],
            ),
        )

    def joined(self, query: Tensor, key: Tensor, value: Tensor) -> LayerCache:
        """With what was read since: [1, heads, m, D] each."""
        count = key.shape[2]
        begin = int(self.positions[0, -1]) + 1 if self.positions.shape[1] else 0
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
        """Per token behind the context, its first token left out.

        Args:
            tokens: of the context and what follows it.
            num_context: which counts as the prompt; what follows counts as generated.
            pipeline: the policy.
            rule: when, and down to what; blocks of BLOCK_SIZE.

        Raises:
            ConfigError: a policy whose layers differ, or that merges.
        """
        if pipeline.merger is not None or pipeline.layer_dependent:
            raise ConfigError(
                f"{pipeline.name}: expected a policy that merges nothing and gives all layers the "
                "same; measure others with `vllm-kvcompress eval`."
            )
        ledger = RequestLedger(num_context, rule, num_prompt_tokens=len(tokens))
        caches, read, total = self._empty(), 0, 0.0
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
                lost = torch.nn.functional.cross_entropy(logits, said, reduction="sum")
                total += float(lost)
            read = end
            decision = ledger.decide(read)
            if decision is not None and decision.skipped is None:
                queries = ledger.observed_window(read)
                caches = [
                    _compressed(pipeline, cache, decision.num_kept_blocks, queries)
                    for cache in caches
                ]
                ledger.commit(read, decision.num_kept_blocks)
        return total / (last - num_context)

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
            self._context = [(each.keys, each.values, each.no_bias) for each in caches]
        some = torch.tensor(tokens[read:end], device=self.model.device)
        logits = self._go_on(read, some, num_logits)
        seen = [(query, key, value) for _, query, key, value, _ in self._seen]
        return logits, [each.joined(*new) for each, new in zip(caches, seen, strict=True)]

    def _empty(self) -> list[LayerCache]:
        config = self.model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        none = torch.empty(config.num_key_value_heads, 0, size, device=self.model.device)
        none = none.to(self.model.dtype)
        numbers, queries = none[..., 0], none.new_empty(0, config.num_attention_heads, size)
        layers = range(config.num_hidden_layers)
        layout = (len(layers), self._rotary())
        return [
            LayerCache(none, none, numbers.float(), numbers.long(), queries, layer, *layout)
            for layer in layers
        ]


def _compressed(
    pipeline: Pipeline, cache: LayerCache, num_blocks: int, num_queries: int
) -> LayerCache:
    """After an event that leaves so many blocks."""
    num_heads = len(cache.keys)
    num_full = cache.keys.shape[1] // BLOCK_SIZE * BLOCK_SIZE
    heads = (cache.num_layers, num_heads, cache.queries.shape[1], BLOCK_SIZE)
    selection = compress_layer(
        pipeline.bind(*heads), cache.view(num_full, num_queries), num_blocks * num_heads
    )
    counts = selection.page_counts.tolist()
    if len(set(counts)) > 1:
        raise ConfigError(f"{pipeline.name}: expected the same pages for all heads, found {counts}")
    kept = selection.kept_indices.view(num_heads, -1)
    received = cache.accumulated
    if selection.merged.accumulated is not None:
        received = torch.cat([selection.merged.accumulated, received[:, num_full:]], dim=1)
    return replace(
        cache,
        keys=_gathered(cache.keys, kept, num_full),
        values=_gathered(cache.values, kept, num_full),
        accumulated=_gathered(received, kept, num_full),
        positions=_gathered(cache.positions, kept, num_full),
    )


def _gathered(rows: Tensor, kept: Tensor, num_full: int) -> Tensor:
    """Kept entries of the full blocks, and all behind them."""
    heads = torch.arange(len(kept), device=kept.device)[:, None]
    return torch.cat([rows[heads, kept], rows[:, num_full:]], dim=1)
