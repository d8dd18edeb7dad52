"""What attention loses to compression: its outputs against those of the whole cache, measured.

For measuring only: one request after the other, and waiting for the device. Keys and values are
copied aside, as they were computed, before an event evicts or merges them; each later query then
attends to all of them in fp32, and what it gets is compared with what the engine gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.merging.neighbours import neighbour_cosines
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.scheduling.plan import EventPlan
from vllm_kvcompress.tools.evaluation.attention_parts import (
    AttentionParts,
    attend_in_parts,
    estimate_cosine,
    gap_cosine,
    projected_error,
    relative_error,
)

MOST_QUERIES = 64  # of one step: its last ones, so that a long chunk does not take its square


@dataclass
class _Originals:
    """The tokens that events have compressed, by logical position.

    Attributes:
        keys, values: [num_heads, n, head_size] fp32.
        kept: [num_heads, n] bool: still resident, as themselves or merged with others.
        moments: [num_heads, moment_size] fp32 of the others, where attention is corrected by them.
    """

    keys: Tensor
    values: Tensor
    kept: Tensor
    moments: Tensor | None


@dataclass
class AttentionLoss:
    """Sums over the queries of compressed requests, by layer and query head.

    Attributes:
        pool: the pages of one cache group.
        softcap: of the attention logits; 0: none.
        output_weights: [num_query_heads, head_size, hidden size] o_proj of every layer; none:
            nothing is measured behind it.
        num_queries: queries seen, in the first layer.
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
        to: Selection,
        moments: Tensor | None = None,
    ) -> None:
        """Copies aside what an event reads for the first time, and records what it keeps.

        Args:
            plan: the event.
            layer: of the group.
            slot: the request's row in the page tables.
            view: what the event saw.
            values: [num_heads, n, head_size] beside the view's keys.
            to: what it keeps.
            moments: [num_heads, moment_size] fp32 of what was evicted so far, where attention is
                corrected by them.
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
        positions[rows, new] = before + newest
        if not plan.resident_blocks:
            cosines = neighbour_cosines(view.kv)[:, 1:].mean(dim=1)
            self._key_cosines.setdefault(layer, []).append(cosines)
        else:
            former = self._originals[layer, slot]
            keys = torch.cat((former.keys, keys), dim=1)
            values = torch.cat((former.values, values), dim=1)
            heads, places = former.kept.nonzero(as_tuple=True)
            nth = former.kept.cumsum(dim=1)[heads, places] - 1
            positions[heads, nth] = places
        kept = torch.zeros(num_heads, end, dtype=torch.bool, device=device)
        heads = torch.repeat_interleave(to.page_counts * size)
        kept[heads, positions[heads, to.kept_indices]] = True
        self._originals[layer, slot] = _Originals(keys, values, kept, moments)

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
        """Compares a step's outputs of the compressed requests with those of the whole cache.

        Args:
            layer: of the group.
            batch: the compressed requests.
            starts: [rows + 1] first token of every row of the batch.
            positions: [rows] logical tokens, this step's included.
            queries, outputs: [num_tokens, num_query_heads, head_size].
            scale: of the logits.
        """
        for nth, (row, slot) in enumerate(zip(batch.rows.tolist(), batch.slots, strict=True)):
            begin, end = int(starts[row]), int(starts[row + 1])
            begin = max(begin, end - MOST_QUERIES)
            mine = slice(nth * self.pool.num_heads, (nth + 1) * self.pool.num_heads)
            originals = self._originals.get((layer, int(slot)))
            if originals is None:  # it holds everything, and decode steps read a part
                continue
            num_tokens = int(positions[row])
            pages, lengths = batch.page_table[layer, mine], batch.seq_lens[layer, mine]
            cache = self._whole_cache(layer, originals, pages, lengths, num_tokens)
            scaled = queries[begin:end].float() * scale
            places = torch.arange(num_tokens - len(scaled), num_tokens, device=scaled.device)
            parts = attend_in_parts(scaled, places, *cache, softcap=self.softcap)
            self._add(layer, scaled, outputs[begin:end].float(), parts, originals.moments)

    def means(self) -> dict[str, list[list[float]]]:
        """Means so far, by layer and query head; empty where no query was seen.

        Returns:
            `error`: |o - o_full| / |o_full|. `mass`: the share of the whole cache's attention
            weights that lies on tokens which were not evicted. `projected_error`: the L1 norm of
            (o - o_full) W_O of the head. `gap_cosine`: of what kept and what evicted tokens give;
            `estimate_cosine`: of what MomentKV's moments and what evicted tokens give.
            `key_cosine`, by KV head: of neighbouring keys, as they were before the first event.
        """
        found: dict[str, list[list[float]]] = {}
        for (name, _), total in sorted(self._sums.items()):
            found.setdefault(name, []).append((total / max(1, self.num_queries)).tolist())
        if self._sums and self._key_cosines:
            layers = sorted(self._key_cosines.items())
            found["key_cosine"] = [torch.stack(seen).mean(dim=0).tolist() for _, seen in layers]
        return found

    def _add(
        self,
        layer: int,
        queries: Tensor,
        outputs: Tensor,
        parts: AttentionParts,
        moments: Tensor | None,
    ) -> None:
        """Adds some queries' figures; `queries` times the scale."""
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

    def _whole_cache(
        self, layer: int, originals: _Originals, pages: Tensor, lengths: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values [num_heads, num_tokens, head_size] and which of them are resident."""
        num_tail = num_tokens - originals.keys.shape[1]
        device = pages.device
        rows = torch.arange(len(lengths), device=device)[:, None]
        # The tail lies at the end of each head's resident entries.
        tail = (lengths - num_tail)[:, None].long() + torch.arange(num_tail, device=device)
        keys, values = (
            read(pages.long(), layer).flatten(1, 2)[rows, tail].float()
            for read in (self.pool.keys, self.pool.values)
        )
        here = torch.ones(len(lengths), num_tail, dtype=torch.bool, device=device)
        return (
            torch.cat((originals.keys, keys), dim=1),
            torch.cat((originals.values, values), dim=1),
            torch.cat((originals.kept, here), dim=1),
        )
