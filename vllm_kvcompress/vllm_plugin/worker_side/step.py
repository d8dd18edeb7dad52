"""One compressed cache group in one worker, and its work in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import HostNumbers, ResidentBatch, ResidentBatches
from vllm_kvcompress.attention.decode_steps import DecodeSteps
from vllm_kvcompress.attention.drafting import DraftReads
from vllm_kvcompress.attention.reading import SparseReads
from vllm_kvcompress.cache.host_blocks import HostBlocks
from vllm_kvcompress.cache.page_summaries import PageSummaries
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.query_windows import ObservedQueries, PagedWindows, QueryRows
from vllm_kvcompress.compression import guard
from vllm_kvcompress.compression.batch import EventBatch
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.compression.repetitions import Repetition
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.scheduling.plan import BlockCopy, Observation, StepPlan, kernel_blocks
from vllm_kvcompress.vllm_plugin.compat.worker import host_lengths

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class StepWork:
    """One cache group's work in one step: prepared once, then done layer by layer.

    Attributes:
        compressed: the compressed requests; empty if all are uncompressed.
        events: compression events of the step.
        batches: events that read queries of this step, grouped; they run behind each layer's
            attention.
        waiting: all other events, grouped; they run after sampling, so that no token waits.
        observed: queries to remember, and their places in the ring buffers; or None.
        repetitions: queries that score their request's context, except for a single one in a
            step that may be replayed.
        filled: [N] int64 blocks that become full, where decode steps read a part; or None.
        decodes: every request has one token in the step, and a CUDA graph may replay it.
    """

    compressed: list[ResidentBatch] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    batches: list[EventBatch] = field(default_factory=list)
    waiting: list[EventBatch] = field(default_factory=list)
    observed: ObservedQueries | None = None
    repetitions: list[Repetition] = field(default_factory=list)
    filled: Tensor | None = None
    decodes: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, and all requests are uncompressed."""
        nothing = self.observed is None and self.filled is None and not self.repetitions
        return not (self.compressed or self.events or self.decodes) and nothing


class GroupCompression:
    """A cache group of compressed layers in one worker: turns plans into work on its pages.

    Attributes:
        group: vLLM's number of the group.
        runner: runs its events.
        layer_index: numbers of the layers in the group, by vLLM's names of layers.
        sharing: by name of a layer that reads another's cache, that layer's number, and the number
            of its own ring buffers.
        scales: softmax scale of every layer.
        softcap: cap of the attention logits; 0: none.
        readers: sparse-read state; None: decode steps read everything.
        decode_steps: buffers that full CUDA graphs read; None: graphs are piecewise.
        drafts: what draft steps read; None: there are none.
        host: host memory that kept states are copied to; None: none.
        split: blocks of attention kernels in one of vLLM's.
    """

    def __init__(
        self,
        group: int,
        runner: EventRunner,
        layer_index: dict[str, int],
        scales: list[float],
        softcap: float,
        readers: SparseReads | None = None,
        decode_steps: DecodeSteps | None = None,
        sharing: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.group = group
        self.runner = runner
        self.layer_index = layer_index
        self.scales = scales
        self.softcap = softcap
        self.readers = readers
        self.decode_steps = decode_steps
        self.sharing = dict(sharing or {})
        self.drafts: DraftReads | None = None
        self.host: HostBlocks | None = None
        self.split = 1
        self.batches = ResidentBatches(runner.tables, runner.read_by_attention)

    @property
    def tables(self) -> PageTables:
        """The page tables of the group's compressed requests."""
        return self.runner.tables

    @property
    def summaries(self) -> PageSummaries | None:
        """Key summaries of the group's pages; None: every step reads everything."""
        readers = self.readers if self.drafts is None else self.drafts.readers
        return None if readers is None else readers.summaries

    def numbers_of(self, name: str) -> tuple[int, int]:
        """Returns the numbers of the layer whose pages a layer reads, and of its ring buffers."""
        index = self.layer_index.get(name)
        return self.sharing[name] if index is None else (index, index)

    def forget(self, request_id: str, state: int | None = None) -> None:
        """Drops a request, which may leave its pages as saved state; ignores unknown ones."""
        if state is not None:
            self.tables.save(request_id, state)
        self.tables.release(request_id)
        self.runner.windows.release(request_id)
        self.runner.repetitions.forget(request_id)
        if self.readers is not None:
            self.readers.forget(request_id)
        if self.drafts is not None:
            self.drafts.forget(request_id)

    def transfer(self, plan: StepPlan) -> None:
        """Copies blocks of kept states, before anything is written in the step."""
        policy_state = self.runner.policy_state
        for each in plan.transfers:
            if isinstance(each, BlockCopy):
                sources = kernel_blocks((each.source,), self.split)
                targets = kernel_blocks((each.target,), self.split)
                self.tables.pool.copy_blocks(list(zip(sources, targets, strict=True)))
                policy_state.note_copied((), targets)
                continue
            assert self.host is not None
            if each.to_host:
                self.host.store(each.blocks, each.slots)
                continue
            self.host.load(each.slots, each.blocks)
            self.tables.move_saved(each.state, each.former, each.blocks)
            policy_state.note_copied(each.blocks[: each.num_kept], each.blocks[each.num_kept :])
            self.runner.forget_blocks(each.blocks)

    def zero_blocks(self, block_ids: Sequence[int] | None) -> None:
        """Zeroes new blocks of vLLM's, which may have held the states of other layers.

        vLLM zeroes what it takes for these layers' part of a block. Where blocks are divided and
        have room for more layers, that is not where they lie.
        """
        pool = self.tables.pool
        if self.split > 1 and block_ids and pool.pages_per_block > pool.block_page_offsets.numel():
            new = upload(list(kernel_blocks(block_ids, self.split)), pool.device)
            pool.pages.index_fill_(0, pool.fresh_pages(new), 0)

    def begin_requests(self, plan: StepPlan) -> None:
        """Takes the ring buffers and saved states of requests that are new in the step."""
        self.tables.poll()
        windows = self.runner.windows
        if isinstance(windows, PagedWindows):
            for request_id, request in plan.requests.items():
                if self.group in request.windows:
                    windows.hold(request_id, request.windows[self.group])
        for adoption in plan.adoptions:
            if adoption.group == self.group:
                self.tables.restore(adoption.request_id, adoption.state, adoption.end_block)

    def begin_events(
        self, plan: StepPlan, request_ids: list[str], blocks: Tensor, after_first_token: bool
    ) -> list[Event]:
        """Begins the step's events in this group that run before the forward pass, or the others.

        Args:
            plan: the step's plan.
            request_ids: requests by row of the batch.
            blocks: [requests, max_blocks] int32 block ids by logical block.
            after_first_token: which events; those that are the first token's run first.
        """
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        return [
            guard.begin(self.runner, event, blocks[row_of[event.request_id]])
            for event in plan.events
            if event.group == self.group and event.after_first_token == after_first_token
        ]

    def prepare(
        self, plan: StepPlan, request_ids: list[str], common: CommonAttentionMetadata
    ) -> StepWork:
        """Prepares everything that the layers of the group share in this step."""
        lengths, blocks = host_lengths(common), common.block_table_tensor
        starts = common.query_start_loc_cpu.numpy()
        self._prepare_reads(plan, request_ids, lengths, np.diff(starts))
        filled = None
        if self.summaries is not None:
            filled = self._filled_blocks(lengths, np.diff(starts), blocks)
        compressed = self.batches.read(request_ids, lengths, common.seq_lens, blocks)
        work = StepWork(compressed=compressed, filled=filled, decodes=self._decodes(common))
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        scored = {name: new.scored_tokens for name, new in plan.requests.items()}
        self.runner.repetitions.register(
            {name: number for name, number in scored.items() if number}
        )
        work.repetitions = self.runner.repetitions.in_step(row_of, starts, lengths, blocks)
        work.events = self.begin_events(plan, request_ids, blocks, after_first_token=False)
        observed = [
            (request_id, int(starts[row_of[request_id]]), observation)
            for request_id, observation in plan.observations.items()
        ]
        if work.decodes:
            self._fill(common, compressed, observed)
        elif observed:
            # Events that read queries of several layers wait for the last of these.
            events = [] if self.sharing else [event.plan for event in work.events]
            work.observed = self.runner.windows.locate(observed, events)
        in_step = () if work.observed is None else work.observed.in_step
        for batch in self.runner.batches(work.events, in_step):
            reads_step = batch.window_size > 0 and batch.events[0].plan.request_id in in_step
            (work.batches if reads_step else work.waiting).append(batch)
        return work

    def _prepare_reads(
        self,
        plan: StepPlan,
        request_ids: list[str],
        lengths: HostNumbers,
        num_queries: HostNumbers,
    ) -> None:
        """Updates the sparse-read state, if there is one."""
        if self.readers is None:
            return
        reads = {name: new.read for name, new in plan.requests.items() if new.read is not None}
        self.readers.register_plans(reads)
        self.readers.admit(request_ids, lengths, num_queries)

    def prepare_dummy(self, common: CommonAttentionMetadata) -> StepWork | None:
        """Prepares a dummy batch, which vLLM may be capturing; None: it needs no work."""
        if not self._decodes(common):
            return None
        self._fill(common, [], [])
        return StepWork(decodes=True)

    def _decodes(self, common: CommonAttentionMetadata) -> bool:
        return self.decode_steps is not None and common.max_query_len == 1

    def _fill(
        self,
        common: CommonAttentionMetadata,
        compressed: list[ResidentBatch],
        observed: list[tuple[str, int, Observation]],
    ) -> None:
        """Writes the buffers from which launches read, in a CUDA graph or not."""
        steps, destinations = self.decode_steps, None
        assert steps is not None
        if observed:
            destinations = self.runner.windows.addresses(observed, steps.like)
        steps.fill(compressed, common.seq_lens, common.block_table_tensor, destinations)

    def run_events(self, events: list[Event], batches: list[EventBatch] | None = None) -> None:
        """Runs batches of events in all layers, then gives requests their kept pages.

        Work is queued on one stream: events read what earlier steps have written, and later steps
        write after them.

        Args:
            events: the events; those that are in no batch have run already.
            batches: what is left to run; None: all of the events.
        """
        if batches is None:
            batches = self.runner.batches(events)
        with torch.inference_mode():  # as the forward pass
            for layer, scale in enumerate(self.scales if batches else ()):
                batches = guard.run_layer(self.runner, batches, layer, scale)
            if self.readers is not None:
                for event in events:
                    for layer in range(self.tables.pool.num_layers):
                        self.readers.summaries.fill(layer, event.kept_pages(layer))
        for event in events:
            self.runner.finish(event)

    def _filled_blocks(
        self, lengths: HostNumbers, num_queries: HostNumbers, block_table: Tensor
    ) -> Tensor | None:
        """Returns [N] int64 blocks whose last token is in this step; None: there are none."""
        size = self.tables.pool.block_size
        first = (lengths - num_queries) // size
        numbers = lengths // size - first
        if not numbers.any():
            return None
        rows: HostNumbers = np.repeat(np.arange(len(lengths)), numbers)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        entries = np.stack((rows, first[rows] + offsets)).astype(np.int64)
        return block_table[*upload(entries, block_table.device)].to(torch.int64)

    def begin_layer(self, work: StepWork, layer: int) -> None:
        """Summarises the blocks that became full, before a layer's attention.

        The step's keys are in the cache; requests may read blocks that others filled in it.
        """
        if self.summaries is not None and work.filled is not None:
            self.summaries.fill_blocks(layer, work.filled)

    def finish_layer(
        self,
        work: StepWork,
        layer: int,
        metadata: Any,
        queries: QueryRows,
        outputs: Tensor | None,
        window: int | None = None,
    ) -> None:
        """Records queries after a layer's attention, and runs the events that read them.

        Args:
            work: the group's work in this step.
            layer: number in the group.
            metadata: vLLM's, of all requests.
            queries: [tokens, num_query_heads, head_size] of all requests.
            outputs: the same, for measuring tools; None: MLA has projected them.
            window: number of the ring buffers for the queries; None: the layer's.
        """
        scale = self.scales[layer]
        if work.decodes:
            return
        if work.observed is not None:
            number = layer if window is None else window
            self.runner.windows.record(number, queries, work.observed)
        for repetition in work.repetitions:
            self.runner.repetitions.observe(layer, repetition, queries, scale)
        work.batches = guard.run_layer(self.runner, work.batches, layer, scale)
