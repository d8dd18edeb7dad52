"""Blocks of compressed requests, on vLLM's own block pool.

A request's list of blocks stays indexed by logical block, as vLLM expects: compressed blocks
are null in it, and the blocks that hold what was kept are recorded beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.ledger import Decision, RequestLedger
from vllm_kvcompress.scheduling.plan import Adoption, BlockCopy, EventPlan
from vllm_kvcompress.scheduling.rule import CompressionRule
from vllm_kvcompress.vllm_plugin.scheduler_side.dependent_blocks import LimitedCaching
from vllm_kvcompress.vllm_plugin.scheduler_side.request_records import GroupBlocks, block_ids
from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock


class CompressedBlockManager(LimitedCaching, FullAttentionManager):
    """Allocates the fresh blocks of an event and frees its sources once it has run."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: CompressedAttentionSpec,
        *args,
        **kwargs,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """As full attention, but leaves the observation window of the first event to compute.

        `max_length` is one less than the prompt, since vLLM always computes the last token.
        """
        limit = kv_cache_spec.max_prefix_hit(max_length + 1)
        return super().find_longest_cache_hit(
            block_hashes,
            min(max_length, limit),
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            *args,
            **kwargs,
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks for new tokens, plus those of an event at the end of the step.

        For admission: what the whole prompt needs at its peak, fresh blocks included, and what
        the requests that hold blocks already are still going to take.
        """
        num_blocks = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            self._whole_blocks(num_local_computed_tokens),
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        record = self.table[request_id]
        rule, beginning = record.ledger.rule, record.beginning
        if not self._held(request_id).window:
            num_blocks += rule.window_blocks
        if beginning is not None:
            # Its blocks leave the free queue, where they are if nobody holds them.
            num_blocks += self._get_num_evictable_blocks(beginning.state.kept)
        if apply_admission_cap:
            reserved = self.reserved_blocks(request_id)
            if beginning is None:
                num_blocks += self._blocks_of_events(rule, num_tokens, reserved > 0)
            elif self._expects_event(record.ledger, beginning.num_tokens, reserved > 0):
                num_blocks += rule.target_blocks(record.ledger.compress_at, num_tokens)
            return max(0, num_blocks + reserved)
        decision = record.decide(num_tokens_main_model)
        if decision is None or decision.skipped:
            return num_blocks
        total = num_blocks + decision.num_kept_blocks
        num_free = self.block_pool.get_num_free_blocks()
        if record.selected and total * len(self.table.managers) > num_free:
            # An event that is to make room must not make vLLM preempt another request.
            record.selected = False
            return num_blocks
        return total

    def _expects_event(self, ledger: RequestLedger, position: int, has_others: bool) -> bool:
        """Whether a request that begins at a position will need room for what an event keeps."""
        under_pressure = ledger.rule.pressure_mark is not None and has_others
        next_position = ledger.rule.next_position(ledger.compress_at, position)
        return under_pressure or next_position is not None

    def _blocks_of_events(self, rule: CompressionRule, num_tokens: int, has_others: bool) -> int:
        """What a request needs at its peak, beyond the blocks of its tokens; may be negative."""
        if rule.first_effective_position(num_tokens) is not None:
            return rule.peak_blocks(num_tokens) - ceil_div(num_tokens, self.block_size)
        if rule.pressure_mark is not None and has_others:
            # A pool full of uncompressed requests has no room left to compress any of them in.
            return rule.target_blocks(num_tokens, num_tokens)
        return 0

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        *args,
        **kwargs,
    ) -> None:
        """Adds a prefix hit; that of a kept state is null blocks, its tail, and what is left."""
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            self._whole_blocks(num_local_computed_tokens),
            *args,
            **kwargs,
        )
        record = self.table[request_id]
        if record.beginning is None:
            return
        state = record.state = record.beginning.state
        record.began_with = state.number
        self.table.states.begin(record.beginning, is_context=record.context_hash is not None)
        self._held(request_id).kept = list(state.kept)
        record.ledger.adopt(state.position, len(state.kept))
        record.unsent.adoptions.append(
            Adoption(request_id, self.kv_cache_group_id, state.number, state.first_block)
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Blocks for new tokens; those of an event are allocated too but recorded apart."""
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        record, held = self.table[request_id], self._held(request_id)
        beginning, record.beginning = record.beginning, None
        if beginning is not None and beginning.copied_block is not None:
            # Only read in this step, before anybody writes; so nobody has to hold it.
            source = beginning.copied_block.block_id
            target = self.req_to_blocks[request_id][beginning.num_tokens // self.block_size]
            record.unsent.copies.append(BlockCopy(self.kv_cache_group_id, source, target.block_id))
        num_window_blocks = record.ledger.rule.window_blocks
        if num_window_blocks and not held.window:
            held.window = self.block_pool.get_new_blocks(num_window_blocks)
            record.unsent.windows[self.kv_cache_group_id, request_id] = block_ids(held.window)
        if self is self.table.managers[-1]:  # so that all have their blocks for new tokens
            self.plan_event(request_id, num_tokens_main_model)
        return new_blocks

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Frees the sources of an event whose step has been processed.

        vLLM calls this before every allocation.
        """
        event = self._held(request_id).event
        if event is not None and event.position <= processed_computed_tokens:
            self._free_sources(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """All blocks of a request: its own, what it kept, and what an event was to keep."""
        own = super().pop_blocks_for_free(request_id)
        own += self.table.pop_blocks(request_id, self.kv_cache_group_id)
        return self.table.states.release(own)

    def num_blocks_held(self, request_id: str) -> int:
        """Blocks that a request holds now; null blocks do not count."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return 0
        held = self._held(request_id)
        num_null = self.table[request_id].ledger.compressed_blocks
        if held.event is not None:
            num_null = held.event.first_block
        return len(blocks) - num_null + len(held.blocks)

    def num_pending_frees(self) -> int:
        """Blocks of events that have run, to be given back with the requests' next tokens."""
        events = [self._held(request_id).event for request_id in self.req_to_blocks]
        return sum(event.num_source_blocks for event in events if event is not None)

    def reserved_blocks(
        self, new_request_id: str = "", ahead: Mapping[str, int] | None = None
    ) -> int:
        """Blocks that the requests which hold some are still going to take.

        A prompt that is being read goes on to its peak. All others grow: a block for each lets a
        new request be read before one of them has to be preempted. For those that are never
        compressed nothing is reserved, as in stock vLLM.

        Args:
            new_request_id: is not counted.
            ahead: tokens that the others will have after some steps, if only these count.
        """
        reserved = 0
        for request_id, blocks in self.req_to_blocks.items():
            if not blocks or request_id == new_request_id:
                continue
            ledger = self.table[request_id].ledger
            if ledger.rule.keeps_all:
                continue
            missing = 1
            if ahead is not None:
                missing = max(0, ceil_div(ahead.get(request_id, 0), self.block_size) - len(blocks))
            if len(blocks) * self.block_size < ledger.num_prompt_tokens:
                missing = max(missing, self._blocks_to_peak(request_id, ledger))
            reserved += missing
        return reserved

    def _blocks_to_peak(self, request_id: str, ledger: RequestLedger) -> int:
        """Blocks that a request which is being read will take at most."""
        rule, num_tokens = ledger.rule, ledger.num_prompt_tokens
        unread = ceil_div(num_tokens, self.block_size) - len(self.req_to_blocks[request_id])
        fresh = rule.target_blocks(num_tokens, num_tokens)
        peak = rule.admission_blocks(num_tokens) - self.num_blocks_held(request_id)
        return min(peak, unread + fresh)

    def plan_event(self, request_id: str, position: int) -> None:
        """Decides what happens to a request at the end of this step, in all groups at once."""
        record = self.table[request_id]
        decision = record.decide(position)
        if decision is None:
            return
        if decision.skipped:
            self.table.skipped[record.ledger.policy, decision.skipped] += 1
            return
        for manager in self.table.managers:
            record.unsent.events.append(manager.begin_event(request_id, position, decision))
        record.ledger.commit(position, decision.num_kept_blocks)

    def begin_event(self, request_id: str, position: int, decision: Decision) -> EventPlan:
        """Allocates an event's fresh blocks; it happens in this step.

        Under asynchronous scheduling the event before it may not have been processed yet. Workers
        carry steps out in their order, so whoever gets its sources writes to them after it. What
        it leaves is for no later request: it may have failed.
        """
        ledger, held = self.table[request_id].ledger, self._held(request_id)
        if held.event is not None:
            self.table.drop_state(held)
            self._free_sources(request_id)
        held.fresh = self.block_pool.get_new_blocks(decision.num_kept_blocks)
        held.event = EventPlan(
            request_id=request_id,
            group=self.kv_cache_group_id,
            policy=ledger.policy,
            trigger=decision.trigger,
            position=position,
            window_size=ledger.observed_window(position),
            first_block=ledger.compressed_blocks,
            end_block=ledger.end_of_event(position) // self.block_size,
            resident_blocks=ledger.resident_blocks,
            fresh_block_ids=block_ids(held.fresh),
            kept_as=self._number_of_context(request_id, position),
        )
        return held.event

    def _number_of_context(self, request_id: str, position: int) -> int | None:
        """For what an event leaves at the end of a context that others share; else None."""
        record = self.table[request_id]
        if record.context_hash is None or position != record.ledger.compress_at:
            return None
        return self.table.states.next_number()

    def _free_sources(self, request_id: str) -> None:
        """Gives an event's source blocks back; cached ones stay usable until vLLM reuses them."""
        record, held = self.table[request_id], self._held(request_id)
        event, held.event = held.event, None
        blocks, sources = self.req_to_blocks[request_id], slice(event.first_block, event.end_block)
        freed = self.table.states.release([*held.kept, *blocks[sources]], superseded=True)
        self.block_pool.free_blocks(reversed(freed))
        blocks[sources] = [self._null_block] * event.num_tail_blocks
        held.kept, held.fresh, record.state = held.fresh, [], None
        if event.kept_as is not None:
            self.table.keep(request_id, event.kept_as, hashes=(record.context_hash,))

    def _whole_blocks(self, num_tokens: int) -> int:
        """Tokens of a hit that lie in whole blocks; vLLM has a way of its own for the rest."""
        return num_tokens // self.block_size * self.block_size

    def _held(self, request_id: str) -> GroupBlocks:
        return self.table[request_id].groups[self.kv_cache_group_id]


KVCacheSpecRegistry.register(
    CompressedAttentionSpec, CompressedBlockManager, uniform_type_base_spec=FullAttentionSpec
)
