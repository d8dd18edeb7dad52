"""Integrity of the scheduler's bookkeeping: who owns every block, compared with vLLM's counts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.plan import BlockTags, StepPlan, kernel_blocks
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import KeptStates
from vllm_kvcompress.vllm_plugin.scheduler_side.other_managers import DraftBlockManager
from vllm_kvcompress.vllm_plugin.scheduler_side.request_record import block_ids
from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request


def check_integrity(table: RequestTable, kept: KeptStates, request_ids: Iterable[str]) -> None:
    """Compares the records of all unfinished requests with vLLM's bookkeeping, between two steps.

    Raises:
        InvariantError: a record is missing or left over, a block has other owners than its
            count of references says, or a request holds other blocks than its ledger says.
    """
    records, pool = table.records, kept.block_pool
    _expect("requests with a record", set(request_ids), set(records))
    held = [held for record in records.values() for held in record.groups.values()]
    owned = Counter(block for each in held for block in block_ids(each.blocks))
    for manager in table.all_managers:
        unknown = set(manager.req_to_blocks) - set(records)
        _expect("requests without a record that hold blocks", set(), unknown)
        for blocks in manager.req_to_blocks.values():
            owned.update(block.block_id for block in blocks if not block.is_null)
    owned.update(block_ids(table.recurrent.values()))
    in_use = {block.block_id: block for block in pool.blocks if block.ref_cnt and not block.is_null}
    counts = {number: block.ref_cnt for number, block in in_use.items()}
    if table.has_connector:  # it may hold blocks while it copies them
        lost = {number for number, count in owned.items() if counts.get(number, 0) < count}
        _expect("blocks with more owners than they count", set(), lost)
    else:
        _expect("owners by block", counts, dict(owned))
    num_free = pool.num_gpu_blocks - 1 - len(in_use)  # no request owns the null block
    _expect("free blocks", num_free, pool.get_num_free_blocks())
    for request_id, manager in itertools.product(records, table.managers):
        _check_request(table, request_id, manager, kept)
    kept.check_integrity()


def _check_request(
    table: RequestTable, request_id: str, manager: SingleTypeKVCacheManager, states: KeptStates
) -> None:
    """Raises if a request holds other blocks in a group than its ledger and event say."""
    record = table[request_id]
    held, ledger = record.groups[manager.kv_cache_group_id], record.ledger
    blocks, event = manager.req_to_blocks.get(request_id) or [], held.event
    rule = ledger.rule
    num_null, num_kept = ledger.num_freed, ledger.num_kept_allocated
    if event is not None:
        num_null = event.first_block // rule.split
        if not event.in_place:
            num_kept = event.num_freed_blocks - (event.end_block // rule.split - num_null)
    fresh = kernel_blocks(block_ids(held.fresh), rule.split)
    shareable = () if record.reuse.state is None else record.reuse.state.blocks
    num_fresh = 0 if event is None else len(event.fresh_block_ids)
    wrongly_shared = [
        block.block_id
        for block in held.blocks
        if block.block_hash is not None or (block.ref_cnt != 1 and block not in shareable)
    ]
    written = held.kept if event is not None and event.in_place else []
    readable = [block.block_id for block in written if block.ref_cnt != 1 or block in states]
    expected = {
        "null": [number < num_null for number in range(len(blocks))],
        "kept": num_kept,
        "fresh": () if event is None else event.fresh_block_ids,
        "fresh blocks of vLLM's": 0 if event is None else ceil_div(num_fresh, rule.split),
        "window": rule.window_blocks if blocks else 0,
        "shared": [],
        "written though others may read it": [],
    }
    actual = {
        "null": [block.is_null for block in blocks],
        "kept": len(held.kept),
        "fresh": fresh[:num_fresh],
        "fresh blocks of vLLM's": len(held.fresh),
        "window": len(held.window),
        "shared": wrongly_shared,
        "written though others may read it": readable,
    }
    _expect(f"blocks of {request_id} in group {manager.kv_cache_group_id}", expected, actual)
    ceiling = rule.ceiling_blocks
    num_after = ledger.num_kept_allocated + len(blocks) - ledger.num_freed
    if ceiling is not None and num_after > ceiling + 1:
        raise InvariantError(
            f"{request_id} has a ceiling of {ceiling} blocks: expected at most one more after the "
            f"step, found {num_after}."
        )


def _expect(what: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise InvariantError(f"{what}: expected {expected}, found {actual}.")


class SchedulerChecks:
    """Checks of the debug mode: the bookkeeping after every step, and block owners for workers."""

    def __init__(self, table: RequestTable, kept: KeptStates) -> None:
        self._table = table
        managers = table.all_managers
        self._draft_managers = [each for each in managers if isinstance(each, DraftBlockManager)]
        # Their values may lie where compressed layers have keys.
        self._has_other_pages = any(
            isinstance(spec, SlidingWindowSpec) and spec.head_size != table.spec.head_size
            for spec in (manager.kv_cache_spec for manager in table.others)
        )
        self._kept = kept
        self._unreadable: set[int] = set()

    def after_step(self, requests: Mapping[str, Request]) -> None:
        """Raises `InvariantError` where records, pool and vLLM's lists differ."""
        check_integrity(self._table, self._kept, requests)

    def tags(
        self, output: SchedulerOutput, plan: StepPlan, requests: Mapping[str, Request]
    ) -> BlockTags:
        """Returns the owners of all blocks in a planned step, and the blocks to poison.

        They are numbered as attention kernels see them (`kernel_blocks`).
        """
        owned, unwritten, split = {}, set(_event_blocks(plan)), self._table.spec.split
        cleared: set[int] = set()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            start = requests[request_id].num_computed_tokens - num_tokens
            for manager in self._draft_managers:
                blocks = manager.req_to_blocks.get(request_id) or []
                cleared.update(block_ids(blocks[ceil_div(start, manager.block_size) :]))
            for manager in self._table.managers:
                group = manager.kv_cache_group_id
                blocks = manager.req_to_blocks.get(request_id) or []
                new = block_ids(blocks[ceil_div(start, manager.block_size) :])
                unwritten.update(kernel_blocks(new, split))
                own = [block for block in blocks if not block.is_null]
                own += self._table[request_id].groups[group].blocks
                owned[group, request_id] = frozenset(kernel_blocks(block_ids(own), split))
        unreadable = set(kernel_blocks(self._find_unreadable(), split))
        poisoned = unwritten | (unreadable - self._unreadable)
        self._unreadable = unreadable
        return BlockTags(
            owned, tuple(sorted(poisoned)), tuple(sorted(cleared)), self._has_other_pages
        )

    def _find_unreadable(self) -> Iterator[int]:
        """Yields blocks that no request holds and that no cached prefix or kept state has.

        With a KV connector none is: it may still copy what is free.
        """
        if self._table.has_connector:
            return
        for block in self._kept.block_pool.blocks:
            in_use = block.is_null or block.ref_cnt or block.block_hash is not None
            if not in_use and block not in self._kept:
                yield block.block_id


def _event_blocks(plan: StepPlan) -> Iterator[int]:
    """Yields blocks that get their content in this step, besides those for new tokens."""
    for event in plan.events:
        yield from event.fresh_block_ids
    for request in plan.requests.values():
        for window in request.windows.values():
            yield from window
