"""Events of requests that nobody has sent.

Small ones run every kernel once, so that none is compiled while requests wait. The longest ones
take as much memory as an event can.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatches
from vllm_kvcompress.attention.biased import biased_attention, query_batches
from vllm_kvcompress.cache.query_windows.paged import PagedWindows, window_blocks
from vllm_kvcompress.cache.query_windows.rings import Located
from vllm_kvcompress.compression.batch import MOST_WINDOWS
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import EventPlan, Observation

_REQUEST, _PREPARED = "dummy", "dummy context"
SHORT = 64  # tokens of the shortest prompts that are compressed together
SCORING = 512  # queries of a chunk that scores a context: more take no more memory
CHUNK = 32  # queries that take the larger of a kernel's two sizes, however many heads share a key


class DummyRuns:
    """Runs events of every policy on one block, which is all their sources and targets.

    What an event computes depends on the block's tokens, and on a GPU how much memory it takes
    does not.

    Args:
        runner: with no requests yet.
        num_query_heads: of this rank.
        block: that nobody reads; it is left full of zeros.
    """

    def __init__(self, runner: EventRunner, num_query_heads: int, block: int) -> None:
        self._runner = runner
        self._pool = pool = runner.pool
        self._num_query_heads = num_query_heads
        self._block = block
        self._pages = pool.pages[block * pool.pages_per_block : (block + 1) * pool.pages_per_block]

    def warm_up(self, attends: bool) -> None:
        """The smallest events that have everything: a window, a partial block, room for state.

        A second one, which finds what the first has left, where requests are compressed again.

        Args:
            attends: whether this package's attention runs too, over what they keep.
        """
        pool = self._pool
        for name, pipeline in self._runner.pipelines.items():
            least = self._least_blocks(pipeline)
            num_blocks = max(2 * least, pipeline.needs.window_size // pool.block_size + 2)
            plans = [self._plan(name, 0, num_blocks, 0, least)]
            if pipeline.repeats:
                plans.append(self._plan(name, num_blocks, 2 * num_blocks, least, least))
            self._run(plans, every_layer=True, attends=attends)

    def longest(self, num_tokens: int, prepares: bool = False) -> None:
        """Events that read `num_tokens` per head and keep them all, in the last layer.

        Policies may leave the first layers alone. Where requests are compressed again, half of the
        tokens were kept by an event before. Then as many short ones as may run together, which
        observe more queries, and as many alone as may hold theirs until later layers.

        Args:
            num_tokens: of the longest request.
            prepares: contexts may be scored, as many tokens at once as that request has; these
                scores are there while events run.
        """
        if prepares:
            self._score(num_tokens)
        for name, pipeline in self._runner.pipelines.items():
            num_blocks = ceil_div(num_tokens, self._pool.block_size)
            num_blocks = max(num_blocks, 2 * self._least_blocks(pipeline))
            plans = [self._plan(name, 0, num_blocks, 0, num_blocks)]
            if pipeline.repeats:
                half = ceil_div(num_blocks, 2)
                plans = [
                    self._plan(name, 0, half, 0, half),
                    self._plan(name, half, 2 * half, half, 2 * half),
                ]
            self._run(plans)
            self._run_short(name, together=True)
            self._run_short(name, together=False)
        self._runner.repetitions.forget(_PREPARED)

    def _score(self, num_tokens: int) -> None:
        """Scores that stay, and what a chunk behind such a context takes in a layer."""
        pool, repetitions = self._pool, self._runner.repetitions
        repetitions.tell({_PREPARED: num_tokens})
        length = num_tokens + SCORING
        blocks = (1, ceil_div(length, pool.block_size))
        row = torch.full(blocks, self._block, dtype=torch.int32, device=pool.device)
        starts, lengths = np.array([0, SCORING]), np.array([length])
        (work,) = repetitions.of_step({_PREPARED: 0}, starts, lengths, row)
        queries = self._queries(SCORING)
        repetitions.score(pool.num_layers - 1, work, queries, 1.0)

    def _queries(self, number: int) -> Tensor:
        """[number, num_query_heads, head_size] zeros."""
        shape = (number, self._num_query_heads, self._pool.head_size)
        return self._pool.pages.new_zeros(shape, dtype=self._pool.dtype)

    def _least_blocks(self, pipeline: Pipeline) -> int:
        pool = self._pool
        return pipeline.least_blocks(
            pool.num_heads, pool.head_size, pool.block_size, pool.page_bytes
        )

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
        """One request's events, and attention to what the last one has left.

        Args:
            plans: of the events.
            every_layer: and not the last alone, or as many as run with it.
            attends: what is left is attended to.
        """
        runner, pool = self._runner, self._pool
        row = torch.full(
            (plans[-1].end_block + 2,), self._block, dtype=torch.int32, device=pool.device
        )
        most = max(CHUNK, plans[0].window_size)
        queries = self._queries(most)
        self._pages.zero_()
        for plan in plans:
            self._compress(plan, every_layer, row, queries)
        self._extend_tail(plans[-1].position, row)
        if attends:
            self._attend(plans[-1], row, queries)
        self._pages.zero_()
        runner.tables.release(_REQUEST)
        runner.windows.release(_REQUEST)

    def _run_short(self, policy: str, together: bool) -> None:
        """Short requests' events in one step, in the last layer.

        Args:
            policy: of all.
            together: as many as `EventRunner.most_tokens` allows; else as many as `MOST_WINDOWS`
                allows to hold queries.
        """
        runner, size = self._runner, self._pool.block_size
        pipeline = runner.pipelines[policy]
        num_tokens = max(SHORT, pipeline.needs.window_size)
        num_blocks = max(2 * self._least_blocks(pipeline), ceil_div(num_tokens, size))
        at_once = runner.layers_at_once(pipeline, num_blocks * size)
        number = 0
        if together and pipeline.batches:
            number = runner.most_tokens // (num_blocks * size)
        elif not together and at_once > 1:
            number = MOST_WINDOWS // at_once
        if not number:
            return
        names = [f"{_REQUEST} {nth}" for nth in range(number)]
        plans = [self._plan(policy, 0, num_blocks, 0, num_blocks, name) for name in names]
        device, window = self._pool.device, plans[0].window_size
        row = torch.full((num_blocks + 1,), self._block, dtype=torch.int32, device=device)
        self._pages.zero_()
        queries, where = self._queries(len(plans) * window), None
        events = [runner.begin(plan, row) for plan in plans]
        if window:
            where = self._locate(plans, plans)
        groups = [events] if together else [[event] for event in events]
        whole = () if where is None else where.whole
        batches = [batch for some in groups for batch in runner.batches(some, whole)]
        for layer in batches[0].layers[-1].layers:
            if where is not None:
                runner.windows.record(layer, queries, where)
            for batch in batches:
                runner.run_layer(batch, layer, 1.0)
        for event in events:
            runner.finish(event)
        for name in names:
            runner.tables.release(name)
            runner.windows.release(name)
        self._pages.zero_()

    def _extend_tail(self, num_tokens: int, row: Tensor) -> None:
        """Appends the blocks that the request was given since its last event."""
        tables = self._runner.tables
        slots, rows = np.array([tables.slots[_REQUEST]]), np.array([0])
        tables.extend_tails(slots, rows, row[None], np.array([num_tokens]))

    def _compress(self, plan: EventPlan, every_layer: bool, row: Tensor, queries: Tensor) -> None:
        """One event, as a step runs it; its queries come from a ring."""
        runner = self._runner
        if plan.resident_blocks:
            self._extend_tail(plan.position, row)
        where = self._locate([plan]) if plan.window_size else None
        event = runner.begin(plan, row)
        (batch,) = runner.batches([event])
        layers = range(self._pool.num_layers) if every_layer else batch.layers[-1].layers
        for layer in layers:
            if where is not None:
                runner.windows.record(layer, queries, where)
            runner.run_layer(batch, layer, 1.0)
        runner.finish(event)

    def _locate(self, plans: Sequence[EventPlan], ending: Sequence[EventPlan] = ()) -> Located:
        """Where requests' windows are, one behind the other; of those that are `ending`, whole."""
        pool, windows, rows = self._pool, self._runner.windows, []
        for nth, plan in enumerate(plans):
            if isinstance(windows, PagedWindows):
                count = window_blocks(
                    windows.window_size,
                    self._num_query_heads,
                    pool.num_heads,
                    pool.queries_per_page,
                )
                windows.hold(plan.request_id, (self._block,) * count)
            size = plan.window_size
            rows.append((plan.request_id, nth * size, Observation(0, plan.position - size, size)))
        return windows.locate(rows, ending)

    def _attend(self, plan: EventPlan, row: Tensor, queries: Tensor) -> None:
        """Attention of a generated token, and of a short and a longer chunk."""
        runner = self._runner
        batches = ResidentBatches(runner.tables, runner.read_by_attention)
        num_tokens = plan.position + 1
        lengths = row.new_full((1,), num_tokens)
        (batch,) = batches.read([_REQUEST], np.array([num_tokens]), lengths, row[None])
        for num_queries in (1, 2, CHUNK):
            for some in query_batches(batch, np.array([0, num_queries])):
                rows = queries[:num_queries]
                biased_attention(runner, 0, some, rows, torch.empty_like(rows), 1.0)
