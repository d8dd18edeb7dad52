"""Events of dummy requests: to compile kernels before serving, and to measure peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatches
from vllm_kvcompress.attention.biased import biased_attention, query_batches
from vllm_kvcompress.cache.query_windows import ObservedQueries, PagedWindows, window_blocks
from vllm_kvcompress.compression.batch import MAX_HELD_WINDOWS
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

_REQUEST, _PREPARED = "dummy", "dummy context"
SHORT = 256  # tokens of the shortest prompts in a batch: shorter ones are not compressed
SCORING = 512  # queries of a chunk that scores a context; more take no more memory
CHUNK = 32  # queries that select the larger of a kernel's two sizes for every group size


class DummyRuns:
    """Runs events of every policy with a single block as all sources and targets.

    Memory on a GPU does not depend on what the block holds.

    Args:
        runner: a runner without requests.
        num_query_heads: query heads of this rank.
        block: id of a block that no request uses; it is left full of zeros.
    """

    def __init__(self, runner: EventRunner, num_query_heads: int, block: int) -> None:
        self._runner = runner
        self._pool = pool = runner.pool
        self._num_query_heads = num_query_heads
        self._block = block
        self._pages = pool.pages[block * pool.pages_per_block : (block + 1) * pool.pages_per_block]

    def warm_up(self, attends: bool) -> None:
        """Runs the smallest events with a window, a partial block and room for policy state.

        Where a policy may compress a request again, a second event reads what the first has kept.
        If it `attends`, this package's attention over the kept tokens runs as well.
        Kernels for few queries run as well, where a prefix-cache hit may leave few.
        """
        pool = self._pool
        for name, pipeline in self._runner.pipelines.items():
            least = pipeline.least_blocks(self._pool.page_shape)
            num_blocks = max(2 * least, pipeline.needs.window_size // pool.block_size + 2)
            plans = [self._plan(name, 0, num_blocks, 0, least)]
            if pipeline.repeats:
                plans.append(self._plan(name, num_blocks, 2 * num_blocks, least, least))
            self._run(plans, every_layer=True, attends=attends)
            few = pipeline.needs.needed_queries
            if few < plans[0].window_size:
                self._run([replace(plans[0], window_size=few)], every_layer=True)

    def longest(self, num_tokens: int, prepares: bool = False) -> None:
        """Runs the events that take the most memory, in the last layer.

        These are: an event that reads `num_tokens` tokens of each head and keeps them all (half of
        them kept by an earlier event where the policy repeats; once more in place, where tokens are
        copied twice); the largest batch of short
        requests; and as many single events as may hold observed queries. Policies may skip the
        first layers, hence the last one. If it `prepares`, scores of a context are held meanwhile.
        """
        if prepares:
            self._score(num_tokens)
        for name, pipeline in self._runner.pipelines.items():
            num_blocks = ceil_div(num_tokens, self._pool.block_size)
            num_blocks = max(num_blocks, 2 * pipeline.least_blocks(self._pool.page_shape))
            plans = [self._plan(name, 0, num_blocks, 0, num_blocks)]
            if pipeline.repeats:
                half = ceil_div(num_blocks, 2)
                plans = [
                    self._plan(name, 0, half, 0, half),
                    self._plan(name, half, 2 * half, half, 2 * half),
                ]
            self._run(plans)
            if pipeline.repeats and not pipeline.layer_dependent:
                self._run([plans[0], replace(plans[1], fresh_block_ids=())])
            self._run_short(name, batched=True)
            self._run_short(name, batched=False)
        self._runner.repetitions.forget(_PREPARED)

    def _score(self, num_tokens: int) -> None:
        """Scores a context of `num_tokens` tokens in one layer, and keeps the scores."""
        pool, repetitions = self._pool, self._runner.repetitions
        repetitions.register({_PREPARED: num_tokens})
        length = num_tokens + SCORING
        row = self._row(ceil_div(length, pool.block_size))
        starts, lengths = np.array([0, SCORING]), np.array([length])
        (work,) = repetitions.in_step({_PREPARED: 0}, starts, lengths, row[None])
        repetitions.score(pool.num_layers - 1, work, self._queries(SCORING), 1.0)

    def _queries(self, number: int) -> Tensor:
        """Returns [number, num_query_heads, head_size] zeros."""
        shape = (number, self._num_query_heads, self._pool.head_size)
        return self._pool.pages.new_zeros(shape, dtype=self._pool.dtype)

    def _plan(
        self,
        policy: str,
        first_block: int,
        end_block: int,
        resident_blocks: int,
        num_kept: int,
        request_id: str = _REQUEST,
    ) -> EventPlan:
        position = end_block * self._pool.block_size + 1
        return EventPlan(
            request_id=request_id,
            group=0,
            policy=policy,
            trigger="",
            position=position,
            window_size=min(self._runner.pipelines[policy].needs.window_size, position),
            first_block=first_block,
            end_block=end_block,
            resident_blocks=resident_blocks,
            fresh_block_ids=(self._block,) * num_kept,
        )

    def _run(
        self, plans: list[EventPlan], every_layer: bool = False, attends: bool = False
    ) -> None:
        """Runs the events of one request in every layer, or only in the last batch of layers.

        If it `attends`, attention over the kept tokens runs afterwards.
        """
        row = self._row(plans[-1].end_block + 2)
        queries = self._queries(max(CHUNK, plans[0].window_size))
        self._pages.zero_()
        for plan in plans:
            if plan.resident_blocks:
                self._extend_tail(plan.position, row)
            self._step([plan], row, queries, every_layer)
        self._extend_tail(plans[-1].position, row)
        if attends:
            self._attend(plans[-1], row, queries)
        self._release([_REQUEST])

    def _run_short(self, policy: str, batched: bool) -> None:
        """Runs events of short requests in one step, in the last layer.

        They are one batch of `EventRunner.max_tokens` tokens or, unless `batched`, as many single
        events as `MAX_HELD_WINDOWS` allows.
        """
        runner, size = self._runner, self._pool.block_size
        pipeline = runner.pipelines[policy]
        num_tokens = max(SHORT, pipeline.needs.window_size)
        num_blocks = max(
            2 * pipeline.least_blocks(self._pool.page_shape), ceil_div(num_tokens, size)
        )
        at_once = runner.layers_at_once(pipeline, num_blocks * size)
        number = 0
        if batched and pipeline.batches:
            number = runner.max_tokens // (num_blocks * size)
        elif not batched and at_once > 1:
            number = MAX_HELD_WINDOWS // at_once
        if not number:
            return
        names = [f"{_REQUEST} {index}" for index in range(number)]
        plans = [self._plan(policy, 0, num_blocks, 0, num_blocks, name) for name in names]
        self._pages.zero_()
        queries = self._queries(len(plans) * plans[0].window_size)
        self._step(plans, self._row(num_blocks + 1), queries, ending=plans, batched=batched)
        self._release(names)

    def _step(
        self,
        plans: list[EventPlan],
        row: Tensor,
        queries: Tensor,
        every_layer: bool = False,
        ending: Sequence[EventPlan] = (),
        batched: bool = True,
    ) -> None:
        """Runs events of different requests, all with the block ids of `row`, as a step does.

        The windows of `ending` plans are read from `queries`, which hold one window after the
        other; those of other plans come from ring buffers.
        """
        runner = self._runner
        where = self._locate(plans, ending) if plans[0].window_size else None
        events = [runner.begin(plan, row) for plan in plans]
        groups = [events] if batched else [[event] for event in events]
        in_step = () if where is None else where.in_step
        batches = [batch for group in groups for batch in runner.batches(group, in_step)]
        layers = range(self._pool.num_layers) if every_layer else batches[0].layers[-1].layers
        for layer in layers:
            if where is not None:
                runner.windows.record(layer, queries, where)
            for batch in batches:
                runner.run_layer(batch, layer, 1.0)
        for event in events:
            runner.finish(event)

    def _row(self, num_blocks: int) -> Tensor:
        """Returns [num_blocks] int32 block ids, all of the same block."""
        device = self._pool.device
        return torch.full((num_blocks,), self._block, dtype=torch.int32, device=device)

    def _release(self, request_ids: list[str]) -> None:
        """Drops requests, and leaves the block full of zeros."""
        for request_id in request_ids:
            self._runner.tables.release(request_id)
            self._runner.windows.release(request_id)
        self._pages.zero_()

    def _extend_tail(self, num_tokens: int, row: Tensor) -> None:
        """Appends the blocks that the request was given since its last event."""
        tables = self._runner.tables
        slots, rows = np.array([tables.slots[_REQUEST]]), np.array([0])
        tables.extend_tails(slots, rows, row[None], np.array([num_tokens]))

    def _locate(self, plans: list[EventPlan], ending: Sequence[EventPlan]) -> ObservedQueries:
        """Locates the windows of requests, one after the other; `ending` ones need all queries."""
        pool, windows, rows = self._pool, self._runner.windows, []
        for index, plan in enumerate(plans):
            if isinstance(windows, PagedWindows):
                count = window_blocks(
                    windows.window_size,
                    self._num_query_heads,
                    pool.num_heads,
                    pool.queries_per_page,
                )
                windows.hold(plan.request_id, (self._block,) * count)
            size = plan.window_size
            rows.append((plan.request_id, index * size, Observation(0, plan.position - size, size)))
        return windows.locate(rows, ending)

    def _attend(self, plan: EventPlan, row: Tensor, queries: Tensor) -> None:
        """Runs attention for a generated token, a short chunk and a longer chunk."""
        runner = self._runner
        batches = ResidentBatches(runner.tables, runner.read_by_attention)
        num_tokens = plan.position + 1
        lengths = row.new_full((1,), num_tokens)
        (batch,) = batches.read([_REQUEST], np.array([num_tokens]), lengths, row[None])
        for num_queries in (1, 2, CHUNK):
            for part in query_batches(batch, np.array([0, num_queries])):
                rows = queries[:num_queries]
                biased_attention(runner, 0, part, rows, torch.empty_like(rows), 1.0)
