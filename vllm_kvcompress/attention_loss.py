"""What attention loses to compression: the outputs and weights of evicted entries, measured.

For measuring only, one request after the other. Evicted entries are copied aside at every event;
each later query then attends to resident and evicted entries alike, in fp32, and what it gets is
compared with what the engine's kernel gave it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_kvcompress.ledger import EventPlan
from vllm_kvcompress.pages import PagePool
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.resident_batch import ResidentBatch

MOST_QUERIES = 64  # of one step: its last ones, so that a long chunk does not take its square


@dataclass
class _Evicted:
    """[num_heads, n, head_size] entries, of which `valid` says which are real."""

    keys: Tensor
    values: Tensor
    valid: Tensor

    def joined(self, more: _Evicted) -> _Evicted:
        """These and more."""
        return _Evicted(
            torch.cat((self.keys, more.keys), dim=1),
            torch.cat((self.values, more.values), dim=1),
            torch.cat((self.valid, more.valid), dim=1),
        )


@dataclass
class AttentionLoss:
    """Sums over the queries of compressed requests, by layer and query head.

    Attributes:
        pool: the pages of one cache group.
        softcap: of the attention logits; 0: none.
        num_queries: queries seen, in the first layer.
        seconds: what measuring took, by the position after a step's last token.
    """

    pool: PagePool
    softcap: float = 0.0
    num_queries: int = 0
    seconds: dict[int, float] = field(default_factory=dict)
    _evicted: dict[tuple[int, int], _Evicted] = field(default_factory=dict)
    _errors: list[Tensor] = field(default_factory=list)
    _masses: list[Tensor] = field(default_factory=list)

    def evict(
        self,
        plan: EventPlan,
        layer: int,
        slot: int,
        view: LayerView,
        values: Tensor,
        kept: Selection,
    ) -> None:
        """Copies aside what an event does not keep.

        Args:
            plan: the event.
            layer: of the group.
            slot: the request's row in the page tables.
            view: what the event saw.
            values: [num_heads, n, head_size] beside the view's keys.
            kept: what it keeps.
        """
        started = time.perf_counter()
        num_heads, num_entries, _ = view.keys.shape
        heads = torch.repeat_interleave(kept.page_counts * view.block_size)
        gone = torch.arange(num_entries) < view.lengths[:, None]
        gone[heads, kept.kept_indices] = False
        most = int(gone.sum(dim=1).max())
        order = gone.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
        rows = torch.arange(num_heads)[:, None]
        evicted = _Evicted(
            view.keys[rows, order].float(), values[rows, order].float(), gone[rows, order]
        )
        if plan.resident_blocks:
            evicted = self._evicted[layer, slot].joined(evicted)
        self._evicted[layer, slot] = evicted
        self._spend(plan.position, started)

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
        """Compares a step's outputs of the compressed requests with those of the full cache.

        Args:
            layer: of the group.
            batch: the compressed requests.
            starts: [rows + 1] first token of every row of the batch.
            positions: [rows] logical tokens, this step's included.
            queries, outputs: [num_tokens, num_query_heads, head_size].
            scale: of the logits.
        """
        for nth, (row, slot) in enumerate(zip(batch.rows.tolist(), batch.slots, strict=True)):
            started = time.perf_counter()
            begin, end = int(starts[row]), int(starts[row + 1])
            begin = max(begin, end - MOST_QUERIES)
            mine = slice(nth * self.pool.num_heads, (nth + 1) * self.pool.num_heads)
            pages, lengths = batch.page_table[layer, mine], batch.seq_lens[layer, mine]
            exact, mass = self._full(layer, int(slot), pages, lengths, queries[begin:end], scale)
            got = outputs[begin:end].float()
            error = (got - exact).norm(dim=-1) / exact.norm(dim=-1)
            self._add(layer, error, mass)
            self._spend(int(positions[row]), started)

    def take(self) -> tuple[list[list[float]], list[list[float]]]:
        """Mean relative error and retained mass since the last call, by layer and query head.

        The error is |o - o_full| / |o_full|, the mass the share of the full cache's attention
        weights that lies on resident entries. Empty lists where no query was seen.
        """
        count, self.num_queries = max(1, self.num_queries), 0
        errors = [(layer / count).tolist() for layer in self._errors]
        masses = [(layer / count).tolist() for layer in self._masses]
        self._errors, self._masses, self.seconds = [], [], {}
        return errors, masses

    def _spend(self, position: int, started: float) -> None:
        spent = time.perf_counter() - started
        self.seconds[position] = self.seconds.get(position, 0.0) + spent

    def _add(self, layer: int, error: Tensor, mass: Tensor) -> None:
        if layer == 0:
            self.num_queries += error.shape[0]
        if layer == len(self._errors):
            self._errors.append(torch.zeros(error.shape[1]))
            self._masses.append(torch.zeros(error.shape[1]))
        self._errors[layer] += error.sum(dim=0)
        self._masses[layer] += mass.sum(dim=0)

    def _full(
        self, layer: int, slot: int, pages: Tensor, lengths: Tensor, queries: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention to resident and evicted entries, and the share of the resident ones.

        Returns:
            [m, num_query_heads, head_size] fp32 and [m, num_query_heads].
        """
        num_queries, num_query_heads, _ = queries.shape
        pages = pages.long()
        keys = self.pool.keys(pages).flatten(1, 2).float()
        values = self.pool.values(pages).flatten(1, 2).float()
        width = keys.shape[1]
        # The step's own tokens lie at the end of each head's entries: causal among themselves.
        seen = lengths[:, None] - torch.arange(num_queries - 1, -1, -1)
        visible = torch.arange(width) < seen[:, :, None]
        values = values.masked_fill(torch.arange(width)[:, None] >= lengths[:, None, None], 0)
        gone = self._evicted[layer, slot]
        visible = torch.cat((visible, gone.valid[:, None].expand(-1, num_queries, -1)), dim=2)
        grouped = queries.float().unflatten(1, (len(lengths), -1)).permute(1, 2, 0, 3)
        logits = scale * grouped @ torch.cat((keys, gone.keys), dim=1)[:, None].transpose(2, 3)
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        weights = logits.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
        outputs = weights @ torch.cat((values, gone.values), dim=1)[:, None]
        mass = weights[..., :width].sum(dim=-1)
        shape = (num_queries, num_query_heads)
        return outputs.permute(2, 0, 1, 3).reshape(*shape, -1), mass.permute(2, 0, 1).reshape(shape)
