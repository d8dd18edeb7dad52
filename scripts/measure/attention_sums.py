"""Measures what compression costs in attention: outputs against those over the full cache.

For measuring only: one request at a time, and it waits for the device. Keys and values are copied
before an event evicts or merges them; each later query attends to all of them in fp32, and the
result is compared with the engine's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_parts import (
    AttentionParts,
    attend_in_parts,
    estimate_cosine,
    gap_cosine,
    projected_error,
    relative_error,
)
from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.merging.neighbours import neighbour_cosines
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.scheduling.plan import EventPlan

MAX_STEP_QUERIES = 64  # the last of a step: a long chunk would need memory for its square


@dataclass
class _Originals:
    """The tokens that events have compressed, by logical position.

    Attributes:
        keys, values: [num_heads, n, head_size] fp32.
        kept: [num_heads, n] bool: still resident, as themselves or merged with others.
        entries: [num_heads, any] int64 position of each resident entry, in the order of pages.
        moments: [num_heads, moment_size] fp32 of the evicted ones, where attention is corrected.
    """

    keys: Tensor
    values: Tensor
    kept: Tensor
    entries: Tensor
    moments: Tensor | None


@dataclass
class AttentionLoss:
    """Sums over the queries of compressed requests, by layer and query head.

    Attributes:
        pool: the pages of one cache group.
        softcap: cap of the attention logits; 0: none.
        output_weights: [num_query_heads, head_size, hidden size] o_proj of every layer; empty: the
            projected error is not measured.
        num_queries: queries seen in the first layer.
    """

    pool: PagePool
    softcap: float = 0.0
    output_weights: Sequence[Tensor] = ()
    num_queries: int = 0
    _originals: dict[tuple[int, int], _Originals] = field(default_factory=dict)
    _sums: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _key_cosines: dict[int, list[Tensor]] = field(default_factory=dict)

    def compress(
        self,
        plan: EventPlan,
        layer: int,
        slot: int,
        view: LayerView,
        values: Tensor,
        selection: Selection,
        moments: Tensor | None = None,
    ) -> None:
        """Copies what an event reads for the first time, and records what it keeps.

        Args:
            plan, layer, view, selection: of one request's event in one layer of the group.
            slot: the request's row in the page tables.
            values: [num_heads, n, head_size] of the entries that the event read.
            moments: [num_heads, moment_size] fp32 of evicted tokens, where attention is corrected.
        """
        size, num_heads = view.block_size, view.num_heads
        before, end = plan.first_block * size, plan.end_block * size
        device = view.device
        rows = torch.arange(num_heads, device=device)[:, None]
        newest = torch.arange(end - before, device=device)
        new = (view.lengths - (end - before))[:, None] + newest
        keys, values = view.kv.keys()[rows, new].float(), values[rows, new].float()
        # The logical position of every entry that the event saw.
        positions = torch.zeros_like(view.valid, dtype=torch.int64)
        if not plan.resident_blocks:
            cosines = neighbour_cosines(view.kv)[:, 1:].mean(dim=1)
            self._key_cosines.setdefault(layer, []).append(cosines)
        else:
            former = self._originals[layer, slot]
            keys = torch.cat((former.keys, keys), dim=1)
            values = torch.cat((former.values, values), dim=1)
            positions[:, : former.entries.shape[1]] = former.entries
        positions[rows, new] = before + newest
        counts = selection.page_counts * size
        heads = torch.repeat_interleave(counts)
        resident = positions[heads, selection.kept_indices]
        kept = torch.zeros(num_heads, end, dtype=torch.bool, device=device)
        kept[heads, resident] = True
        entries = torch.nn.utils.rnn.pad_sequence(resident.split(counts.tolist()), batch_first=True)
        self._originals[layer, slot] = _Originals(keys, values, kept, entries, moments)

    def observe(
        self,
        layer: int,
        batch: ResidentBatch,
        starts: Tensor,
        positions: Tensor,
        queries: Tensor,
        outputs: Tensor,
        scale: float,
    ) -> None:
        """Compares a step's outputs for the compressed requests with those over the full cache.

        Args:
            layer, batch, scale: layer number in the group, its compressed requests, softmax scale.
            starts: [rows + 1] first token of each request in the step.
            positions: [rows] logical tokens of each request, this step's included.
            queries, outputs: [num_tokens, num_query_heads, head_size] of all requests.
        """
        num_heads = self.pool.num_heads
        for index, (row, slot) in enumerate(zip(batch.rows.tolist(), batch.slots, strict=True)):
            begin, end = int(starts[row]), int(starts[row + 1])
            begin = max(begin, end - MAX_STEP_QUERIES)
            heads = slice(index * num_heads, (index + 1) * num_heads)
            originals = self._originals.get((layer, int(slot)))
            if originals is None:  # it holds everything, and decode steps read a part
                continue
            num_tokens = int(positions[row])
            pages, lengths = batch.page_table[layer, heads], batch.seq_lens[layer, heads]
            cache = self._full_cache(layer, originals, pages, lengths, num_tokens)
            scaled = queries[begin:end].float() * scale
            places = torch.arange(num_tokens - len(scaled), num_tokens, device=scaled.device)
            parts = attend_in_parts(scaled, places, *cache, softcap=self.softcap)
            self._add(layer, scaled, outputs[begin:end].float(), parts, originals.moments)

    def means(self) -> dict[str, list[list[float]]]:
        """Means so far, by name, layer and query head; empty if no query was seen.

        `error`: |o - o_full| / |o_full|. `mass`: share of the full cache's attention weights on
        tokens that were not evicted. `projected_error`: L1 norm of the head's (o - o_full) W_O.
        `gap_cosine`: between attention over kept and over evicted tokens; `estimate_cosine`:
        between MomentKV's estimate and attention over evicted tokens. `key_cosine`, by KV head: of
        neighbouring keys before the first event.
        """
        means: dict[str, list[list[float]]] = {}
        for (name, _), total in sorted(self._sums.items()):
            means.setdefault(name, []).append((total / max(1, self.num_queries)).tolist())
        if self._sums and self._key_cosines:
            layers = sorted(self._key_cosines.items())
            means["key_cosine"] = [torch.stack(seen).mean(dim=0).tolist() for _, seen in layers]
        return means

    def _add(
        self,
        layer: int,
        queries: Tensor,
        outputs: Tensor,
        parts: AttentionParts,
        moments: Tensor | None,
    ) -> None:
        """Adds the figures of some queries, which are scaled."""
        figures = {
            "error": relative_error(outputs, parts),
            "mass": parts.mass,
            "gap_cosine": gap_cosine(parts),
        }
        if self.output_weights:
            weight = self.output_weights[layer]
            figures["projected_error"] = projected_error(outputs, parts, weight)
        if moments is not None:
            figures["estimate_cosine"] = estimate_cosine(parts, queries, moments)
        if layer == 0:
            self.num_queries += len(queries)
        for name, figure in figures.items():
            self._sums[name, layer] = self._sums.get((name, layer), 0) + figure.sum(dim=0)

    def _full_cache(
        self, layer: int, originals: _Originals, pages: Tensor, lengths: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [num_heads, num_tokens, head_size], and which of them are resident."""
        num_tail = num_tokens - originals.keys.shape[1]
        device = pages.device
        rows = torch.arange(len(lengths), device=device)[:, None]
        # The tail lies at the end of each head's resident entries.
        tail = (lengths - num_tail)[:, None].long() + torch.arange(num_tail, device=device)
        keys, values = (
            read(pages.long(), layer).flatten(1, 2)[rows, tail].float()
            for read in (self.pool.keys, self.pool.values)
        )
        tail_kept = torch.ones(len(lengths), num_tail, dtype=torch.bool, device=device)
        return (
            torch.cat((originals.keys, keys), dim=1),
            torch.cat((originals.values, values), dim=1),
            torch.cat((originals.kept, tail_kept), dim=1),
        )
