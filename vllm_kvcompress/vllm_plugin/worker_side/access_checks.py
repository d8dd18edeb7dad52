"""Checks of the debug mode in a worker: attention and events touch only their own blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import BlockTags, StepPlan
from vllm_kvcompress.vllm_plugin.compat.worker import host_lengths
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression, StepWork

POISON = 30000.0  # as a value, or the largest that the cache's type has
LARGE = 3e38  # the same as a key that is no NaN, so that scores are infinite


class WorkerChecks:
    """Checks every step of a worker against the blocks' owners; waits for the device."""

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_RAISE_ON_LOGIT_NANS", "1")  # a NaN ends the engine
        self._tags = BlockTags()
        self._are_ours = False

    def begin_step(self, plan: StepPlan, pools: Sequence[PagePool]) -> None:
        """Takes the owner of every block, and poisons the blocks that no request may read.

        Keys become NaN. Values (and keys that are values, too) become large, since vLLM's kernels
        multiply those behind a request's last token, and before a window, by 0. Where windows have
        heads of another size, their values may lie where a key is poisoned: keys become large, too.
        Blocks of draft layers become 0 for the same reason.
        """
        self._tags = plan.tags or BlockTags()
        # vLLM's dummy requests, which warm up its kernels, have no plan.
        self._are_ours = plan.tags is not None
        for pool in pools if self._tags.poisoned else ():
            pages = pool.fresh_pages(torch.tensor(self._tags.poisoned, device=pool.device))
            numbers = (LARGE, LARGE) if self._tags.has_other_pages else (torch.nan, POISON)
            rows = (_filled(pool, number) for number in numbers[-len(pool.stored) :])
            shape = (len(pages), pool.block_size, -1)
            pool.write(pages, *(row.view(pool.pages.dtype).expand(shape) for row in rows))
        for pool in pools if self._tags.cleared else ():
            blocks = torch.tensor(self._tags.cleared, device=pool.device)
            pool.pages.index_fill_(0, pool.fresh_pages(blocks), 0)

    def check(
        self,
        group: GroupCompression,
        work: StepWork,
        request_ids: list[str],
        common: CommonAttentionMetadata,
    ) -> None:
        """Checks one group's step before it runs.

        Raises:
            InvariantError: a request would read or write a block of another one, or two heads
                have the same page.
        """
        if not self._are_ours:
            return
        pool, size = group.tables.pool, group.tables.pool.block_size
        starts = common.query_start_loc_cpu.tolist()
        lengths = host_lengths(common).tolist()
        compressed = {row for batch in work.compressed for row in batch.rows.tolist()}
        writers: dict[int, str] = {}
        for row, request_id in enumerate(request_ids):
            slots = common.slot_mapping[starts[row] : starts[row + 1]]
            self._expect_own(group, request_id, "writes tokens to", slots // size)
            self._expect_only_writer(writers, request_id, slots // size)
            if row not in compressed:
                blocks = common.block_table_tensor[row, : ceil_div(lengths[row], size)]
                self._expect_own(group, request_id, "attends to", blocks)
        for batch in work.compressed:
            tables = batch.page_table.unflatten(1, (-1, pool.num_heads))
            counts = (ceil_div(batch.seq_lens, size)).unflatten(1, (-1, pool.num_heads))
            for index, row in enumerate(batch.rows.tolist()):
                pages = _first(tables[:, index], counts[:, index])
                self._expect_pages(group, request_ids[row], "attends to", pages)
                if batch.policy_state is not None:
                    runs = batch.policy_state
                    ends = (runs.starts + runs.lengths).unflatten(1, (-1, pool.num_heads))
                    used = ceil_div(ends[:, index].amax(1) * 4, pool.page_bytes)
                    state = _first(runs.page_table[:, index], used)
                    self._expect_pages(group, request_ids[row], "reads policy state of", state)
        self.check_events(group, work.events)

    def check_events(self, group: GroupCompression, events: Iterable[Event]) -> None:
        """Checks the blocks of events before they run.

        Raises:
            InvariantError: an event would read or write a block of another request.
        """
        for event in events if self._are_ours else ():
            self._check_event(group, event)

    def _check_event(self, group: GroupCompression, event: Event) -> None:
        """Checks the blocks that an event reads, and that it writes to fresh ones only."""
        tables, plan, pool = group.tables, event.plan, group.tables.pool
        self._expect_own(group, plan.request_id, "compresses", event.blocks)
        sources = set(event.blocks.tolist())
        if plan.resident_blocks:
            counts = tables.counts[:, event.slot] + plan.end_block - plan.first_block
            slot = torch.tensor([event.slot])
            pages = _first(tables.rows.read(slot, int(counts.max()))[:, 0], counts)
            self._expect_pages(group, plan.request_id, "compresses", pages)
            sources |= set((pages // pool.pages_per_block).tolist())
        fresh = torch.tensor(plan.fresh_block_ids)
        self._expect_own(group, plan.request_id, "keeps tokens in", fresh)
        if overlap := sources & set(plan.fresh_block_ids):
            raise InvariantError(
                f"an event of {plan.request_id}: expected fresh blocks, found sources {overlap}."
            )

    def _expect_pages(
        self, group: GroupCompression, request_id: str, does: str, pages: Tensor
    ) -> None:
        """Raises where [n] pages are not the request's, or not all different."""
        if len(pages.unique()) != len(pages):
            raise InvariantError(
                f"{request_id} {does} {len(pages)} pages: expected all different, found "
                f"{len(pages.unique())} different ones; two heads have the same."
            )
        self._expect_own(group, request_id, does, pages // group.tables.pool.pages_per_block)

    def _expect_only_writer(self, writers: dict[int, str], request_id: str, blocks: Tensor) -> None:
        """Raises where another request writes to the same blocks in this step."""
        for block in blocks.unique().tolist():
            if (other := writers.setdefault(block, request_id)) != request_id:
                raise InvariantError(
                    f"block {block}: expected one request to write to it, found {other} and "
                    f"{request_id}."
                )

    def _expect_own(
        self, group: GroupCompression, request_id: str, does: str, blocks: Tensor
    ) -> None:
        """Raises where blocks are not the request's."""
        owned = self._tags.owned.get((group.group, request_id), frozenset())
        if others := set(blocks.tolist()) - owned:
            raise InvariantError(
                f"{request_id} {does} blocks of group {group.group}: expected some of "
                f"{sorted(owned)}, found {sorted(others)} besides."
            )


def _filled(pool: PagePool, number: float) -> Tensor:
    """Returns a [row_size] row of a number, or of the largest one that can be stored."""
    if pool.quantization is not None:
        return pool.quantization.filled(number, pool.row_size).to(pool.device)
    largest = torch.finfo(pool.dtype).max
    row = torch.full((pool.row_size,), number, device=pool.device)
    return row.clamp_max(largest).to(pool.dtype)


def _first(table: Tensor, counts: Tensor) -> Tensor:
    """Returns [sum of counts] the first `counts` [...] entries of each row of [..., width]."""
    return table[torch.arange(table.shape[-1], device=table.device) < counts[..., None]]
