"""What attention loses to compression: its outputs against those of the whole cache, measured.

For measuring only: one request after the other, and waiting for the device. Keys and values are
copied aside, as they were computed, before an event evicts or merges them; each later query then
attends to all of them in fp32, and what it gets is compared with what the engine gave it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch
from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.scheduling.plan import EventPlan

MOST_QUERIES = 64  # of one step: its last ones, so that a long chunk does not take its square


@dataclass
class _Originals:
    """The tokens that events have compressed, by logical position.

    Attributes:
        keys, values: [num_heads, n, head_size] fp32.
        kept: [num_heads, n] bool: still resident, as themselves or merged with others.
    """

    keys: Tensor
    values: Tensor
    kept: Tensor


@dataclass
class AttentionLoss:
    """Sums over the queries of compressed requests, by layer and query head.

    Attributes:
        pool: the pages of one cache group.
        softcap: of the attention logits; 0: none.
        num_queries: queries seen, in the first layer.
    """

    pool: PagePool
    softcap: float = 0.0
    num_queries: int = 0
    _originals: dict[tuple[int, int], _Originals] = field(default_factory=dict)
    _errors: list[Tensor] = field(default_factory=list)
    _masses: list[Tensor] = field(default_factory=list)

    def compress(
        self, plan: EventPlan, layer: int, slot: int, view: LayerView, values: Tensor, to: Selection
    ) -> None:
        """Copies aside what an event reads for the first time, and records what it keeps.

        Args:
            plan: the event.
            layer: of the group.
            slot: the request's row in the page tables.
            view: what the event saw.
            values: [num_heads, n, head_size] beside the view's keys.
            to: what it keeps.
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
        if plan.resident_blocks:
            former = self._originals[layer, slot]
            keys = torch.cat((former.keys, keys), dim=1)
            values = torch.cat((former.values, values), dim=1)
            heads, places = former.kept.nonzero(as_tuple=True)
            nth = former.kept.cumsum(dim=1)[heads, places] - 1
            positions[heads, nth] = places
        kept = torch.zeros(num_heads, end, dtype=torch.bool, device=device)
        heads = torch.repeat_interleave(to.page_counts * size)
        kept[heads, positions[heads, to.kept_indices]] = True
        self._originals[layer, slot] = _Originals(keys, values, kept)

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
            originals = self._originals[layer, int(slot)]
            cache = self._whole_cache(
                originals,
                batch.page_table[layer, mine],
                batch.seq_lens[layer, mine],
                int(positions[row]),
            )
            exact, mass = self._attend(queries[begin:end].float() * scale, *cache)
            error = (outputs[begin:end].float() - exact).norm(dim=-1) / exact.norm(dim=-1)
            self._add(layer, error, mass)

    def means(self) -> tuple[list[list[float]], list[list[float]]]:
        """Mean relative error and retained mass so far, by layer and query head.

        The error is |o - o_full| / |o_full|, the mass the share of the whole cache's attention
        weights that lies on tokens which were not evicted. Empty lists where no query was seen.
        """
        count = max(1, self.num_queries)
        errors = [(layer / count).tolist() for layer in self._errors]
        masses = [(layer / count).tolist() for layer in self._masses]
        return errors, masses

    def _add(self, layer: int, error: Tensor, mass: Tensor) -> None:
        if layer == 0:
            self.num_queries += error.shape[0]
        if layer == len(self._errors):
            self._errors.append(torch.zeros(error.shape[1], device=error.device))
            self._masses.append(torch.zeros(error.shape[1], device=error.device))
        self._errors[layer] += error.sum(dim=0)
        self._masses[layer] += mass.sum(dim=0)

    def _whole_cache(
        self, originals: _Originals, pages: Tensor, lengths: Tensor, num_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values [num_heads, num_tokens, head_size] and which of them are resident."""
        num_tail = num_tokens - originals.keys.shape[1]
        device = pages.device
        rows = torch.arange(len(lengths), device=device)[:, None]
        # The tail lies at the end of each head's resident entries.
        tail = (lengths - num_tail)[:, None].long() + torch.arange(num_tail, device=device)
        keys, values = (
            read(pages.long()).flatten(1, 2)[rows, tail].float()
            for read in (self.pool.keys, self.pool.values)
        )
        here = torch.ones(len(lengths), num_tail, dtype=torch.bool, device=device)
        return (
            torch.cat((originals.keys, keys), dim=1),
            torch.cat((originals.values, values), dim=1),
            torch.cat((originals.kept, here), dim=1),
        )

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of the last tokens' queries, and the share of its weights on kept tokens.

        Returns:
            [m, num_query_heads, head_size] and [m, num_query_heads].
        """
        num_queries, num_query_heads, _ = queries.shape
        num_tokens = keys.shape[1]
        last = num_tokens - torch.arange(num_queries, 0, -1, device=keys.device)
        hidden = torch.arange(num_tokens, device=keys.device) > last[:, None]
        grouped = queries.unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
        logits = grouped @ keys[:, None].transpose(2, 3)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        outputs = weights @ values[:, None]
        mass = (weights * kept[:, None, None]).sum(dim=-1)
        shape = (num_queries, num_query_heads)
        return outputs.permute(2, 0, 1, 3).reshape(*shape, -1), mass.permute(2, 0, 1).reshape(shape)
