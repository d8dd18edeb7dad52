"""Whose every block is, as the scheduler knows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import BlockTags, StepPlan
from vllm_kvcompress.vllm_plugin.scheduler_side.request_records import block_ids
from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerChecks:
    """Checks the scheduler's bookkeeping, and tells workers what it says.

    Args:
        table: the requests' records.
        block_pool: vLLM's.
    """

    def __init__(self, table: RequestTable, block_pool: BlockPool) -> None:
        self._table = table
        self._pool = block_pool
        self._dead: set[int] = set()

    def after_step(self, requests: Mapping[str, Request]) -> None:
        """Raises `InvariantError` where records, pool and vLLM's lists differ."""
        self._table.check_integrity(requests)

    def tags(
        self, output: SchedulerOutput, plan: StepPlan, requests: Mapping[str, Request]
    ) -> BlockTags:
        """Of all requests in a step, once it is planned.

        Args:
            output: the step.
            plan: what workers do in it besides.
            requests: of the scheduler.
        """
        owned, unwritten = {}, set(self._unwritten(plan))
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            start = requests[request_id].num_computed_tokens - num_tokens
            for manager in self._table.managers:
                blocks = manager.req_to_blocks.get(request_id) or []
                unwritten.update(block_ids(blocks[ceil_div(start, manager.block_size) :]))
                part = self._table[request_id].groups[manager.kv_cache_group_id]
                mine = [block for block in blocks if not block.is_null] + part.blocks
                owned[manager.kv_cache_group_id, request_id] = frozenset(block_ids(mine))
        dead = set(self._unreadable())
        poisoned, self._dead = unwritten | (dead - self._dead), dead
        return BlockTags(owned, tuple(sorted(poisoned)))

    def _unwritten(self, plan: StepPlan) -> Iterator[int]:
        """Blocks that get their content in this step, besides those for new tokens."""
        for event in plan.events:
            yield from event.fresh_block_ids
        for window in plan.windows.values():
            yield from window

    def _unreadable(self) -> Iterator[int]:
        """Blocks that nobody holds, and that neither the prefix cache nor a kept state knows."""
        for block in self._pool.blocks:
            in_use = block.is_null or block.ref_cnt or block.block_hash is not None
            if not in_use and not self._table.states.knows(block):
                yield block.block_id
