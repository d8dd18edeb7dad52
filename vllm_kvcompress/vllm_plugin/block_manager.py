"""Blocks of compressed requests, on vLLM's own block pool.

A request's list of blocks stays indexed by logical block, as vLLM expects: compressed blocks
are null in it, and the blocks that hold what was kept are recorded beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvcompress.scheduling.ledger import Decision, RequestLedger
from vllm_kvcompress.scheduling.plan import Adoption, EventPlan
from vllm_kvcompress.scheduling.pressure import Candidate
from vllm_kvcompress.scheduling.rule import CompressionRule
from vllm_kvcompress.vllm_plugin.contexts import CompressedContext, ContextStore
from vllm_kvcompress.vllm_plugin.dependent_blocks import LimitedCaching
from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock


class CompressedBlockManager(LimitedCaching, FullAttentionManager):
    """Allocates the fresh blocks of an event and frees its sources once it has run.

    Attributes:
        ledgers: by request id, for requests that hold blocks or wait for their first.
        selected: requests to be compressed in this step because room is needed.
        plans: events planned since the scheduler last took them, by request id.
        new_windows: blocks for the last queries of requests, since the scheduler last took them.
        contexts: compressed contexts, for later requests.
        adoptions: requests that begin with one, since the scheduler last took them.
        skipped: events that a trigger called for but the rule left out, by policy and reason.
        open_ledger: a new request's ledger, by its id and the length of its prompt; the scheduler
            sets it.
    """

    def __init__(self, kv_cache_spec: CompressedAttentionSpec, *args, **kwargs) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.ledgers: dict[str, RequestLedger] = {}
        self.selected: set[str] = set()
        self.plans: dict[str, EventPlan] = {}
        self.skipped: Counter[tuple[str, str]] = Counter()
        self.open_ledger: Callable[[str, int], RequestLedger]
        self._resident: dict[str, list[KVCacheBlock]] = {}
        self.new_windows: dict[str, tuple[int, ...]] = {}
        self._windows: dict[str, list[KVCacheBlock]] = {}
        self._incoming: dict[str, tuple[EventPlan, list[KVCacheBlock]]] = {}
        self.contexts = ContextStore(self.block_pool)
        self.adoptions: dict[str, Adoption] = {}
        self._wanted_contexts: dict[str, CompressedContext] = {}
        self._held_contexts: dict[str, CompressedContext] = {}

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
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )
        rule = self._ledger(request_id, prefill_end).rule
        if request_id not in self._windows:
            num_blocks += rule.window_blocks
        context = self._wanted_contexts.get(request_id)
        if context is not None:
            # Its blocks leave the free queue, where they are if nobody holds them.
            num_blocks += self._get_num_evictable_blocks(context.blocks)
        if apply_admission_cap:
            promised = self.promised_blocks(request_id)
            if context is None:
                num_blocks += self._blocks_of_events(rule, num_tokens, prefill_end, promised > 0)
            return max(0, num_blocks + promised)
        decision = self._decide(request_id, num_tokens_main_model)
        if decision is None or decision.skipped:
            return num_blocks
        total = num_blocks + decision.num_kept_blocks
        if request_id in self.selected and total > self.block_pool.get_num_free_blocks():
            # An event that is to make room must not make vLLM preempt another request.
            self.selected.discard(request_id)
            return num_blocks
        return total

    def _blocks_of_events(
        self, rule: CompressionRule, num_tokens: int, prefill_end: int, has_others: bool
    ) -> int:
        """What a request needs at its peak, beyond the blocks of its tokens; may be negative."""
        if rule.first_effective_position(prefill_end) is not None:
            return rule.peak_blocks(num_tokens) - -(-num_tokens // self.block_size)
        if rule.pressure_mark is not None and has_others:
            # A pool full of uncompressed requests has no room left to compress any of them in.
            return rule.target_blocks(num_tokens, num_tokens)
        return 0

    def want_context(self, request_id: str, key: Hashable) -> CompressedContext | None:
        """The compressed context that a request, not admitted yet, could begin with."""
        context = None if key is None else self.contexts.find(key)
        if context is None:
            self._wanted_contexts.pop(request_id, None)
        else:
            self._wanted_contexts[request_id] = context
        return context

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args, **kwargs
    ) -> None:
        """Adds a prefix hit; that of a compressed context is null blocks, and what is left."""
        super().add_local_computed_blocks(request_id, new_computed_blocks, *args, **kwargs)
        context = self._wanted_contexts.pop(request_id, None)
        if context is None:
            return
        self.contexts.acquire(context)
        self._held_contexts[request_id] = context
        self._resident[request_id] = list(context.blocks)
        self.ledgers[request_id].adopt(context.num_blocks, len(context.blocks))
        self.adoptions[request_id] = Adoption(
            request_id, self.kv_cache_group_id, context.blocks[0].block_id, context.num_blocks
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Blocks for new tokens; those of an event are allocated too but recorded apart."""
        new_blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        num_window_blocks = self.ledgers[request_id].rule.window_blocks
        if num_window_blocks and request_id not in self._windows:
            blocks = self.block_pool.get_new_blocks(num_window_blocks)
            self._windows[request_id] = blocks
            self.new_windows[request_id] = tuple(block.block_id for block in blocks)
        decision = self._decide(request_id, num_tokens_main_model)
        if decision is not None:
            if decision.skipped:
                self.skipped[self.ledgers[request_id].policy, decision.skipped] += 1
            else:
                self._plan(request_id, num_tokens_main_model, decision)
        return new_blocks

    def cacheable_tokens(self, request_id: str) -> int | None:
        """Tokens that do not depend on any compression; None: all of them."""
        ledger = self.ledgers.get(request_id)
        return ledger.first_event_position if ledger else None

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Frees the sources of an event whose step has been processed.

        vLLM calls this before every allocation; it is also where the prompt's length is learnt.
        """
        if num_prompt_tokens is not None and request_id not in self.ledgers:
            self.ledgers[request_id] = self.open_ledger(request_id, num_prompt_tokens)
        incoming = self._incoming.get(request_id)
        if incoming is not None and incoming[0].position <= processed_computed_tokens:
            self._retire_sources(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """All blocks of a request: its own, what it kept, and what an event was to keep."""
        blocks = super().pop_blocks_for_free(request_id) + self._pop_resident(request_id)
        if request_id in self._incoming:
            blocks = blocks + self._incoming.pop(request_id)[1]
        blocks = blocks + self._windows.pop(request_id, [])
        for records in (self.ledgers, self.plans, self.adoptions, self._wanted_contexts):
            records.pop(request_id, None)
        self.new_windows.pop(request_id, None)
        return blocks

    def _pop_resident(self, request_id: str) -> list[KVCacheBlock]:
        """The blocks of what a request kept, to be freed; a context's are released already."""
        blocks = self._resident.pop(request_id, [])
        context = self._held_contexts.pop(request_id, None)
        if context is None:
            return blocks
        self.contexts.release(context)
        return []

    def num_blocks_held(self, request_id: str) -> int:
        """Blocks that a request holds now; null blocks do not count."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return 0
        plan, fresh = self._incoming.get(request_id, (None, ()))
        ledger = self.ledgers[request_id]
        num_null = ledger.compressed_blocks if plan is None else plan.first_block
        beside = (self._resident.get(request_id, ()), fresh, self._windows.get(request_id, ()))
        return len(blocks) - num_null + sum(map(len, beside))

    def candidate(self, request_id: str, position: int) -> Candidate | None:
        """What compressing a request would give at a position; None: nothing, or not now."""
        ledger = self.ledgers.get(request_id)
        if ledger is None or ledger.rule.pressure_mark is None or request_id in self._incoming:
            return None
        decision = ledger.decide(position, under_pressure=True)
        if decision is None or decision.skipped:
            return None
        return Candidate(request_id, ledger.num_source_blocks(position), decision.num_kept_blocks)

    def coming_blocks(self) -> int:
        """Blocks of events that have run, to be given back with the requests' next tokens."""
        return sum(plan.num_source_blocks for plan, _ in self._incoming.values())

    def promised_blocks(
        self, new_request_id: str = "", ahead: Mapping[str, int] | None = None
    ) -> int:
        """Blocks that the requests which hold some are still going to take.

        A prompt that is being read goes on to its peak. All others grow: a block for each lets a
        new request be read before one of them has to give way.

        Args:
            new_request_id: is not counted.
            ahead: tokens that the others will have after some steps, if only these count.
        """
        promised = 0
        for request_id, ledger in self.ledgers.items():
            blocks = self.req_to_blocks.get(request_id)
            if not blocks or request_id == new_request_id:
                continue
            missing = 1
            if ahead is not None:
                missing = max(0, -(-ahead.get(request_id, 0) // self.block_size) - len(blocks))
            if len(blocks) * self.block_size < ledger.num_read_tokens:
                missing = max(missing, self._blocks_to_peak(request_id))
            promised += missing
        return promised

    def _blocks_to_peak(self, request_id: str) -> int:
        """Blocks that a request which is being read will take at most."""
        rule, num_tokens = self.ledgers[request_id].rule, self.ledgers[request_id].num_read_tokens
        unread = -(-num_tokens // self.block_size) - len(self.req_to_blocks[request_id])
        fresh = rule.target_blocks(num_tokens, num_tokens)
        peak = rule.admission_blocks(num_tokens) - self.num_blocks_held(request_id)
        return min(peak, unread + fresh)

    def _decide(self, request_id: str, position: int) -> Decision | None:
        ledger = self.ledgers.get(request_id)
        return ledger.decide(position, request_id in self.selected) if ledger else None

    def _ledger(self, request_id: str, num_prompt_tokens: int) -> RequestLedger:
        """A request's ledger, also before it holds blocks."""
        ledger = self.ledgers.get(request_id)
        return self.open_ledger(request_id, num_prompt_tokens) if ledger is None else ledger

    def _plan(self, request_id: str, position: int, decision: Decision) -> None:
        """Allocates an event's fresh blocks and records it as happening in this step.

        Under asynchronous scheduling the event before it may not have been processed yet. Workers
        carry steps out in their order, so whoever gets its sources writes to them after it.
        """
        if request_id in self._incoming:
            self._retire_sources(request_id)
        ledger = self.ledgers[request_id]
        fresh = self.block_pool.get_new_blocks(decision.num_kept_blocks)
        plan = EventPlan(
            request_id=request_id,
            group=self.kv_cache_group_id,
            policy=ledger.policy,
            trigger=decision.trigger,
            position=position,
            window_size=ledger.observed_window(position),
            first_block=ledger.compressed_blocks,
            end_block=position // self.block_size,
            resident_blocks=ledger.resident_blocks,
            fresh_block_ids=tuple(block.block_id for block in fresh),
            reusable=ledger.context_key is not None and position == ledger.num_prompt_tokens,
        )
        ledger.commit(position, decision.num_kept_blocks)
        self.plans[request_id] = plan
        self._incoming[request_id] = (plan, fresh)

    def _retire_sources(self, request_id: str) -> None:
        """Gives an event's source blocks back; cached ones stay usable until vLLM reuses them."""
        plan, fresh = self._incoming.pop(request_id)
        self._remove_blocks_in_range(request_id, plan.first_block, plan.end_block)
        self.block_pool.free_blocks(reversed(self._pop_resident(request_id)))
        self._resident[request_id] = fresh
        if plan.reusable:
            key = self.ledgers[request_id].context_key
            self._held_contexts[request_id] = self.contexts.keep(key, plan.end_block, fresh)


KVCacheSpecRegistry.register(
    CompressedAttentionSpec, CompressedBlockManager, uniform_type_base_spec=FullAttentionSpec
)
