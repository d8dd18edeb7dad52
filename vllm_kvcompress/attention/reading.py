"""Sparse reads: decode steps and prefill chunks that read a part of their pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import HostNumbers, ResidentBatch
from vllm_kvcompress.cache.page_summaries import PageSummaries, SummaryKind
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import Integers
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.page_choice import Choice, PageLists, choose_pages
from vllm_kvcompress.scheduling.plan import ReadPlan
from vllm_kvcompress.scheduling.read_rule import NEVER, PromptChunks, ReadRule, Share


def summary_kind(rule: ReadRule) -> SummaryKind:
    """Returns the summaries by which a rule chooses pages."""
    return SummaryKind(rule.num_means, rounded=rule.bounds == "int8")


@dataclass(frozen=True)
class SparseRead:
    """Sparse read of requests of a step that have equally many queries.

    Attributes:
        batch: the requests with the lengths of what they read; their page table has room for the
            pages that are chosen.
        pages: all pages of their sequences in every layer, and how many of them are read.
        choice: how pages are chosen.
        summaries: key summaries by which they are.
    """

    batch: ResidentBatch
    pages: PageLists
    choice: Choice
    summaries: PageSummaries

    def choose(self, layer: int, queries: Tensor) -> Tensor:
        """Returns the [sequences, most] int32 pages that a layer reads.

        Args:
            layer: layer of the cache group.
            queries: [sequences * m, group, head_size] m queries of each sequence, sequence after
                sequence; they share what they read.
        """
        pages = self._layers[layer]
        queries = queries.reshape(len(pages.num_pages), -1, queries.shape[2])
        summaries = self.summaries
        return choose_pages(queries, summaries.vectors, pages, self.choice, summaries.scales)

    @cached_property
    def _layers(self) -> list[PageLists]:
        """The pages of every layer."""
        return [PageLists(*each) for each in zip(*map(torch.unbind, self.pages), strict=True)]


class SparseReads:
    """Sparse-read state of a cache group.

    It is looked up again only when the requests of a step change.

    Args:
        others: summaries of other cache groups, as for `PageSummaries`.

    Attributes:
        rule: the rule of requests that choose none.
        tables: page tables of the requests that have one.
        summaries: key summaries by which pages are chosen.
        chunks: sparse reads of prefill chunks, if the rule has any.
        plans: read plans by request id.
    """

    def __init__(
        self, rule: ReadRule, tables: PageTables, others: Iterable[PageSummaries] = ()
    ) -> None:
        self.rule, self.tables = rule, tables
        self.summaries = PageSummaries(tables.pool, summary_kind(rule), others)
        self.chunks = PromptChunks.of(rule, tables.pool.block_size)
        self.plans: dict[str, ReadPlan] = {}
        self._request_ids: list[str] | None = None
        self._starts: Integers = np.zeros(0, dtype=np.int64)
        self._prompts = self._ends = self._in_chunks = self._starts
        self._decoding: np.ndarray[Any, np.dtype[np.bool_]] = self._starts > 0
        self._shares: Integers = np.zeros((0, 3), dtype=np.int64)
        self._rules = {rule}

    def register_plans(self, plans: dict[str, ReadPlan]) -> None:
        """Adds the read plans of new requests."""
        if plans:
            self.plans |= plans
            self._request_ids = None

    def forget(self, request_id: str) -> None:
        """Drops a request; ignores unknown ones."""
        self.plans.pop(request_id, None)

    def admit(self, request_ids: list[str], lengths: HostNumbers, num_queries: HostNumbers) -> None:
        """Finds the sparse reads of a step; gives uncompressed requests that need one a page table.

        Such a table consists of tail pages alone.

        Args:
            request_ids: request ids of all rows of the step.
            lengths: [rows] logical tokens, including the step.
            num_queries: [rows] tokens in the step.
        """
        if self._request_ids != request_ids:
            self._look_up(request_ids)
        self._decoding = (num_queries == 1) & (lengths > self._prompts)
        needs_table = self._decoding & (lengths >= self._starts)
        if self.chunks is not None:
            in_chunk = (lengths > self.chunks.num_read_fully) & (lengths <= self._ends)
            self._in_chunks = np.where(in_chunk, num_queries, 0)
            needs_table |= in_chunk & (self._starts < NEVER)
        for row in np.flatnonzero(needs_table):
            self._starts[row] = NEVER
            if request_ids[row] not in self.tables.slots:
                self.tables.acquire(request_ids[row])

    def _look_up(self, request_ids: list[str]) -> None:
        """Looks up every row's rule, and the length at which it needs a page table."""
        slots, size = self.tables.slots, self.tables.pool.block_size
        plans = [self.plans.get(each, ReadPlan(self.rule)) for each in request_ids]
        rules = [plan.rule for plan in plans]
        self._prompts = np.array([plan.num_prompt_tokens for plan in plans], dtype=np.int64)
        self._ends = np.array([plan.num_in_chunks for plan in plans], dtype=np.int64)
        self._rules = set(rules)
        self._shares = np.array([rule.share(size) for rule in rules], dtype=np.int64)
        starts = {rule: rule.reads_less_from(size) for rule in self._rules}
        self._starts = np.array(
            [
                NEVER if each in slots else starts[rule]
                for each, rule in zip(request_ids, rules, strict=True)
            ],
            dtype=np.int64,
        )
        self._request_ids = list(request_ids)

    def split(self, batch: ResidentBatch) -> tuple[list[SparseRead], ResidentBatch | None]:
        """Splits a batch into sparse reads, one per number of queries, and the other requests."""
        decoding = self._decoding[batch.rows]
        if decoding.all():
            return [self.reading(batch)], None
        readings, rest = [], ~decoding
        if decoding.any():
            readings.append(self.reading(batch.take(decoding)))
        if self.chunks is not None:
            numbers = self._in_chunks[batch.rows]
            for number in np.unique(numbers[numbers > 0]):
                rule = self.rule.of_chunk(int(number))
                readings.append(self.reading(batch.take(numbers == number), rule))
            rest &= numbers == 0
        return readings, batch.take(rest) if rest.any() else None

    def reading(self, batch: ResidentBatch, chunk_rule: ReadRule | None = None) -> SparseRead:
        """Plans the sparse read of decoding requests, or of prefill chunks under `chunk_rule`."""
        size, rule = self.tables.pool.block_size, chunk_rule or self.rule
        lengths, width = batch.seq_lens, batch.page_table.shape[2]
        rules = self._rules if chunk_rule is None else {chunk_rule}
        most = max(each.most_pages(width, size) for each in rules)
        share = self._share(batch) if chunk_rule is None else chunk_rule.share(size)
        num_pages = (lengths + size - 1) // size
        chosen = share.of(num_pages).clamp(min=rule.least_pages(size))
        num_read = torch.where(lengths < rule.min_tokens, num_pages, num_pages.minimum(chosen))
        part = replace(
            batch,
            page_table=batch.page_table[:, :, :most],
            seq_lens=lengths - (num_pages - num_read) * size,
        )
        choice = Choice(most, rule.num_first(size), rule.num_last(size), rule.num_means)
        pages = PageLists(batch.page_table, num_pages, num_read.to(torch.int32))
        return SparseRead(part, pages, choice, self.summaries)

    def warm_up(self, queries_per_kv: int) -> None:
        """Compiles the kernel by choosing pages once."""
        pool, size = self.tables.pool, self.tables.pool.block_size
        width = self.rule.least_pages(size) + 1
        table = torch.zeros((pool.num_heads, width), dtype=torch.int32, device=pool.device)
        shape = (pool.num_heads, queries_per_kv, pool.head_size)
        queries = pool.pages.new_zeros(shape, dtype=pool.dtype)
        choice = Choice(width, num_means=self.rule.num_means)
        pages = PageLists(table, table[:, 0] + 1, table[:, 0] + 1)
        choose_pages(queries, self.summaries.vectors, pages, choice, self.summaries.scales)

    def _share(self, batch: ResidentBatch) -> Share:
        """Returns the share that is read, as [sequences] numbers or the same for all sequences."""
        if len(self._rules) == 1:
            return next(iter(self._rules)).share(self.tables.pool.block_size)
        num_heads = batch.page_table.shape[1] // len(batch.rows)
        numbers = np.repeat(self._shares[batch.rows].T, num_heads, axis=1).astype(np.int32)
        return Share(*upload(numbers, batch.seq_lens.device))
