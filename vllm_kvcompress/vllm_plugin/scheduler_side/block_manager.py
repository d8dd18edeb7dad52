"""Blocks of compressed requests, on vLLM's own block pool.

A request's list of blocks stays indexed by logical block, as vLLM expects. Compressed blocks are
null in it; the blocks with the kept tokens are recorded beside it (`GroupBlocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.ledger import Decision, RequestLedger
from vllm_kvcompress.scheduling.plan import Adoption, EventPlan, RequestPlan, kernel_blocks
from vllm_kvcompress.scheduling.rule import TRIGGER_PRESSURE
from vllm_kvcompress.vllm_plugin.scheduler_side.other_managers import (
    DependentChunkedLocalManager,
    DependentMambaManager,
    DependentSlidingWindowManager,
    DraftBlockManager,
    LimitedCaching,
)
from vllm_kvcompress.vllm_plugin.scheduler_side.request_record import (
    GroupBlocks,
    RequestCompression,
    block_ids,
)
from vllm_kvcompress.vllm_plugin.spec import (
    CompressedAttentionSpec,
    DependentChunkedLocalSpec,
    DependentMambaSpec,
    DependentSlidingWindowSpec,
    DraftAttentionSpec,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class CompressedBlockManager(LimitedCaching, FullAttentionManager):
    """Allocates the fresh blocks of an event, and frees its sources once it has run.

    Attributes:
        siblings: block managers of all compressed groups, this one among them; set like `table`.
    """

    siblings: Sequence[CompressedBlockManager]

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
        """Counts blocks for new tokens, and those of an event at the end of the step.

        For admission it counts what the prompt needs at its peak, fresh blocks included, and what
        the requests that hold blocks already are still going to take.
        """
        num_blocks: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            self._full_block_tokens(num_local_computed_tokens),
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        record = self.table[request_id]
        beginning = record.reuse.beginning
        if not self._held(request_id).window:
            num_blocks += record.ledger.rule.window_blocks
        if beginning is not None:
            # These blocks leave the free queue, in which they wait if no request holds them.
            num_blocks += sum(block.ref_cnt == 0 for block in beginning.state.kept)
        if apply_admission_cap:
            start = None if beginning is None else beginning.num_tokens
            reserved = self.reserved_blocks(request_id)
            more = self._blocks_of_events(record.ledger, num_tokens, start, reserved > 0)
            if reserved and record.ledger.rule.reserves_growth:
                more = max(more, self._blocks_of_growth(record, num_tokens))
            num_blocks = max(0, num_blocks + more + reserved)
            kept = self.states.kept
            if kept.expected:
                num_blocks += kept.leave_to_others(request_id, num_blocks, self._frees_soon())
            return num_blocks
        if num_tokens_main_model == total_computed_tokens:  # a connector loads the rest
            return num_blocks
        selected = request_id in self.table.selected
        decision = record.ledger.decide(num_tokens_main_model, selected)
        num_with_event = num_blocks + self._fresh_blocks(
            request_id, num_tokens_main_model, decision
        )
        num_free = self.block_pool.get_num_free_blocks()
        makes_room = decision is not None and decision.trigger == TRIGGER_PRESSURE
        if makes_room and num_with_event * len(self.siblings) > num_free:
            # An event that is to make room must not make vLLM preempt another request.
            self.table.selected.remove(request_id)
            return num_blocks
        return num_with_event

    def _frees_soon(self) -> bool:
        """Whether a prompt is being read or an event runs: both free blocks when they are done."""
        if self.table.awaiting_event:
            return True
        for request_id, blocks in self.req_to_blocks.items():
            ledger = self.table[request_id].ledger
            is_read = 0 < len(blocks) * self.block_size < ledger.num_prompt_tokens
            if self._held(request_id).event is not None or (is_read and not ledger.rule.keeps_all):
                return True
        return False

    def _blocks_of_events(
        self, ledger: RequestLedger, num_tokens: int, start: int | None, has_others: bool
    ) -> int:
        """Counts the blocks that a new request needs at its peak, beyond those of its tokens.

        The count may be negative. Under memory pressure it includes room for an event where other
        requests hold blocks: a pool full of uncompressed requests has none left for that.

        Args:
            ledger: the request's ledger.
            num_tokens: tokens of the request.
            start: tokens of the kept state that it begins with; None: it begins with none.
            has_others: whether other requests hold blocks.
        """
        rule = ledger.rule
        under_pressure = rule.pressure_mark is not None and has_others
        if start is not None:
            expects_event = ledger.next_position(start) is not None
            if under_pressure or expects_event:
                return ceil_div(rule.target_blocks(ledger.compress_at, num_tokens), rule.split)
            return 0
        if rule.first_effective_position(num_tokens) is not None:
            return rule.peak_blocks(num_tokens) - ceil_div(num_tokens, self.block_size)
        if not under_pressure:
            return 0
        return ceil_div(rule.target_blocks(num_tokens, num_tokens), rule.split)

    def _blocks_of_growth(self, record: RequestCompression, num_tokens: int) -> int:
        """Counts the blocks that a new request of `num_tokens` tokens takes behind these.

        Beside them is room for the fresh blocks of one event, of any request; other events wait
        until its sources are free (`waits_for_room`). The count may be negative.
        """
        ledger, beginning = replace(record.ledger), record.reuse.beginning
        if beginning is not None:
            ledger.commit(beginning.state.position, beginning.state.resident_blocks)
        num_new = ceil_div(num_tokens, self.block_size) - ledger.num_freed
        running = [self.table[each].ledger for each, blocks in self.req_to_blocks.items() if blocks]
        fresh = max(each.fresh_blocks() for each in [ledger, *running])
        return ledger.most_blocks() - ledger.num_kept_allocated - num_new + fresh

    def waits_for_room(self, request_id: str, num_tokens: int, num_processed: int) -> bool:
        """Whether a running request waits a step, since its blocks are those of a running event.

        Otherwise vLLM would preempt a request for blocks that the next step frees.

        Args:
            request_id: the request.
            num_tokens: its computed tokens at the end of the step.
            num_processed: its computed tokens in steps that have been processed.
        """
        ledger = self.table[request_id].ledger
        for manager in self.siblings:  # so that all that wait, wait for others
            manager.remove_skipped_blocks(request_id, num_processed)
        num_blocks = ceil_div(num_tokens, self.block_size) - len(self.req_to_blocks[request_id])
        num_blocks += self._fresh_blocks(request_id, num_tokens, ledger.decide(num_tokens))
        if num_blocks * len(self.siblings) <= self.block_pool.get_num_free_blocks():
            return False
        # An event behind the first token runs only once its request goes on.
        begun = (each for each in self.req_to_blocks if each not in self.table.awaiting_event)
        return any(self._held(each).event is not None for each in begun)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Adds a prefix hit; that of a kept state is null blocks, its tail and its kept blocks.

        Tokens that a connector loads leave no queries either.
        """
        super().add_local_computed_blocks(
            request_id,
            new_computed_blocks,
            self._full_block_tokens(num_local_computed_tokens),
            num_external_computed_tokens,
        )
        record = self.table[request_id]
        num_hit_tokens = num_local_computed_tokens + num_external_computed_tokens
        record.ledger.num_hit_tokens = num_hit_tokens
        if record.reuse.beginning is not None:
            self.states.begin(record, self.kv_cache_group_id)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Allocates blocks for new tokens; those of an event are recorded beside vLLM's list."""
        new_blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        record, held, group = self.table[request_id], self._held(request_id), self.kv_cache_group_id
        beginning, record.reuse.beginning = record.reuse.beginning, None
        self.states.kept.expected.pop(request_id, None)
        if beginning is not None:
            state = beginning.state
            if beginning.copied_block is not None:
                target = self.req_to_blocks[request_id][beginning.num_tokens // self.block_size]
                self.states.kept.copy_block(beginning.copied_block, target)
                if target.block_id in self.new_block_ids:  # which vLLM zeroes behind the copy
                    self.new_block_ids.remove(target.block_id)
            end_block = record.ledger.compressed_blocks
            adoption = Adoption(request_id, group, state.number, end_block)
            record.unsent.adoptions.append(adoption)
        num_window_blocks = record.ledger.rule.window_blocks
        if num_window_blocks and not held.window:
            held.window = self.block_pool.get_new_blocks(num_window_blocks)
            self.table.written += block_ids(held.window)
            plan = record.unsent.requests.setdefault(request_id, RequestPlan())
            plan.windows[group] = kernel_blocks(block_ids(held.window), record.ledger.rule.split)
        is_loading = num_tokens_main_model == record.ledger.num_hit_tokens
        # The last group plans, so that all have their blocks for new tokens.
        if self is self.siblings[-1] and not is_loading:
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
        if event is not None and event.done_at <= processed_computed_tokens:
            self._free_sources(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Takes all blocks of a request: vLLM's, kept ones, and those of its last event."""
        blocks = super().pop_blocks_for_free(request_id)
        held = self.table.close(request_id, self.kv_cache_group_id)
        self.states.drop_unprocessed(held)
        return self.states.kept.release(blocks + held.blocks)

    def num_blocks_held(self, request_id: str) -> int:
        """Counts the blocks that a request holds now, without null blocks."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return 0
        held = self._held(request_id)
        ledger = self.table[request_id].ledger
        num_null = ledger.num_freed
        if held.event is not None:
            num_null = held.event.first_block // ledger.rule.split
        return len(blocks) - num_null + len(held.blocks)

    def num_pending_frees(self) -> int:
        """Counts sources of events that have run, to be freed with the requests' next tokens."""
        events = [self._held(request_id).event for request_id in self.req_to_blocks]
        return sum(event.num_freed_blocks for event in events if event is not None)

    def reserved_blocks(
        self, new_request_id: str = "", ahead: Mapping[str, int] | None = None
    ) -> int:
        """Counts the blocks that requests which hold some are still going to take.

        A prompt that is being read goes on to its peak. All others grow: under a ceiling as far as
        that or their `max_tokens`; else a block for each lets a new request be read before one of
        them has to be preempted. Nothing is reserved for requests that are never compressed, as in
        stock vLLM.

        Args:
            new_request_id: request that is not counted.
            ahead: if given, only blocks for these tokens count: those that requests will have
                after some steps, by request id.
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
            if ledger.rule.reserves_growth:
                num_own = self.num_blocks_held(request_id)
                if not ledger.last_position:  # others may go on holding blocks of the same prefix
                    num_own = sum(block.ref_cnt == 1 for block in blocks)
                missing = max(missing, ledger.most_blocks() - num_own)
            reserved += missing
        return reserved

    def _blocks_to_peak(self, request_id: str, ledger: RequestLedger) -> int:
        """Counts the most blocks that a request which is being read will still take."""
        rule, num_tokens = ledger.rule, ledger.num_prompt_tokens
        unread = ceil_div(num_tokens, self.block_size) - len(self.req_to_blocks[request_id])
        fresh = ceil_div(rule.target_blocks(num_tokens, num_tokens), rule.split)
        peak = rule.admission_blocks(num_tokens) - self.num_blocks_held(request_id)
        return min(peak, unread + fresh)

    def plan_event(self, request_id: str, position: int) -> None:
        """Decides what happens to a request at the end of this step, in all groups at once.

        Events that run after the first token are sent with the request's next step.
        """
        record = self.table[request_id]
        decision = record.ledger.decide(position, request_id in self.table.selected)
        if decision is None:
            return
        if decision.skipped:
            self.table.skipped[record.ledger.policy, decision.skipped] += 1
            return
        for manager in self.siblings:
            event = manager.begin_event(request_id, position, decision)
            if event.after_first_token:
                self.table.awaiting_event[request_id] = None
            else:
                record.unsent.events.append(event)
        record.ledger.commit(position, decision.num_kept_blocks)

    def begin_event(self, request_id: str, position: int, decision: Decision) -> EventPlan:
        """Allocates the fresh blocks of an event of this step, or right after it.

        Under asynchronous scheduling the former event may not have been processed yet. Its sources
        are freed now: workers run steps in order, so their next owner writes to them later. The
        state that it was to leave is dropped, since the event may have failed.
        """
        record, held = self.table[request_id], self._held(request_id)
        ledger = record.ledger
        if held.event is not None:
            self.states.drop_unprocessed(held)
            self._free_sources(request_id)
            if request_id in self.table.awaiting_event:  # the former event runs in this step
                self.states.kept.suspend_restores()
        rule, num_kept = ledger.rule, decision.num_kept_blocks
        end_block = ledger.end_of_event(position) // rule.block_size
        num_freed = ledger.num_allocated_sources(position)
        beside_tail: tuple[int, ...] = ()
        if self._stays_in_place(request_id, position, decision):
            num_freed -= ledger.num_kept_allocated
        else:
            held.fresh = self.block_pool.get_new_blocks(rule.num_fresh(num_kept, end_block))
            self.table.written += block_ids(held.fresh)
            beside_tail = self._beside_tail(request_id, end_block, num_kept)
        fresh = kernel_blocks(block_ids(held.fresh), rule.split)
        held.event = EventPlan(
            request_id=request_id,
            group=self.kv_cache_group_id,
            policy=ledger.policy,
            trigger=decision.trigger,
            position=position,
            window_size=ledger.observed_window(position),
            first_block=ledger.compressed_blocks,
            end_block=end_block,
            resident_blocks=ledger.resident_blocks,
            fresh_block_ids=fresh[: num_kept - len(beside_tail)],
            kept_as=self.states.number_of_context(record, position),
            after_first_token=ledger.follows_first_token(position),
            protected=ledger.protected_at(position),
            beside_tail=beside_tail,
            num_freed_blocks=num_freed,
        )
        return held.event

    def _beside_tail(self, request_id: str, end_block: int, num_kept: int) -> tuple[int, ...]:
        """Returns the sources that take kept tokens, since vLLM's block goes on with the tail."""
        rule = self.table[request_id].ledger.rule
        number = rule.num_beside_tail(num_kept, end_block)
        if not number:
            return ()
        block = self.req_to_blocks[request_id][end_block // rule.split]
        num_compressed = end_block % rule.split
        return kernel_blocks(block_ids([block]), rule.split)[
            num_compressed - number : num_compressed
        ]

    def _fresh_blocks(self, request_id: str, position: int, decision: Decision | None) -> int:
        """Counts the fresh blocks that a decision takes."""
        if decision is None or decision.skipped:
            return 0
        if self._stays_in_place(request_id, position, decision):
            return 0
        return self.table[request_id].ledger.num_fresh(position, decision.num_kept_blocks)

    def _stays_in_place(self, request_id: str, position: int, decision: Decision) -> bool:
        """Whether an event writes to the blocks of the former one's kept tokens.

        The request alone holds them, no kept state has them, and kept blocks never enter the prefix
        cache: nobody else reads what changes. Workers run steps in order: whatever attends to the
        old content comes before the event, and whoever gets the blocks after a preemption or an
        abort writes later. A request that is computed anew begins with other blocks. Layers must
        keep their shares, since one layer cannot take the pages of another that is still to run.
        """
        record, held = self.table[request_id], self._held(request_id)
        kept, states = held.fresh or held.kept, self.states.kept
        stays = record.ledger.may_stay_in_place(position, decision.num_kept_blocks)
        return stays and all(b.ref_cnt == 1 and b not in states for b in kept)

    def _free_sources(self, request_id: str) -> None:
        """Frees an event's source blocks; cached ones stay usable until vLLM reuses them."""
        record, held = self.table[request_id], self._held(request_id)
        event, held.event = held.event, None
        assert event is not None
        blocks, split = self.req_to_blocks[request_id], record.ledger.rule.split
        sources = range(event.first_block // split, event.end_block // split)
        former = [] if event.in_place else held.kept
        tail = [blocks[number] for number in sources]
        freed = self.states.kept.release([*former, *tail], superseded=True)
        self.block_pool.free_blocks(reversed(freed))
        blocks[sources.start : sources.stop] = [self.block_pool.null_block] * len(sources)
        if not event.in_place:
            held.kept, held.fresh = held.fresh, []
        self.states.supersede(record)
        if event.kept_as is not None:
            assert record.reuse.context_hash is not None
            self.states.keep(
                record,
                event.kept_as,
                hashes=(record.reuse.context_hash,),
                recurrent=self.table.recurrent_of(request_id),
            )

    def _full_block_tokens(self, num_tokens: int) -> int:
        """Counts a hit's tokens in full blocks; vLLM would handle a partial block by itself."""
        block_size: int = self.block_size
        return num_tokens // block_size * block_size

    def _held(self, request_id: str) -> GroupBlocks:
        return self.table[request_id].groups[self.kv_cache_group_id]


for spec, manager, base in (
    (CompressedAttentionSpec, CompressedBlockManager, FullAttentionSpec),
    (DependentSlidingWindowSpec, DependentSlidingWindowManager, SlidingWindowSpec),
    (DependentChunkedLocalSpec, DependentChunkedLocalManager, ChunkedLocalAttentionSpec),
    (DependentMambaSpec, DependentMambaManager, MambaSpec),
    (DraftAttentionSpec, DraftBlockManager, DraftAttentionSpec),
):
    KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=base)
