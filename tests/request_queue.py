"""Requests on vLLM's own block pool that step without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.scheduling.rule import PolicyDemand
from vllm_kvcompress.vllm_plugin.compat.scheduler import find_prefix_hit_within
from vllm_kvcompress.vllm_plugin.scheduler_side.block_manager import CompressedBlockManager
from vllm_kvcompress.vllm_plugin.scheduler_side.host_copies import HostCopies
from vllm_kvcompress.vllm_plugin.scheduler_side.integrity import check_integrity
from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable
from vllm_kvcompress.vllm_plugin.scheduler_side.state_reuse import StateReuse
from vllm_kvcompress.vllm_plugin.spec import (
    CompressedAttentionSpec,
    DependentMambaSpec,
    DependentSlidingWindowSpec,
)

BLOCK, WINDOW_BLOCKS = 16, 2
LAYER = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


class Queue:
    """A queue of requests, stepped like vLLM's scheduler would.

    Args:
        num_groups: of compressed layers; two have a group of sliding windows beside them.
        reuse_contexts: contexts outlive their request.
        reuse_conversations: so does what a request leaves at its end.
        asynchronous: a step is processed after the next one was planned.
        num_blocks: of the pool.
        window_size: queries that the policy observes.
        min_window: how many of them are enough behind a prefix-cache hit; None: all.
        budget: kept fraction, or tokens, with which later events are in place.
        ceiling: tokens that a request holds at most; None: any.
        host_slots: blocks of host memory for kept states; 0: there is none.
        split: parts of `BLOCK` tokens in a block.
        recurrent: groups of Mamba layers beside those.
        drafts: blocks of theirs for states of drafts.
    """

    def __init__(
        self,
        num_groups: int,
        reuse_contexts: bool = False,
        asynchronous: bool = False,
        num_blocks: int = 100,
        reuse_conversations: str | None = None,
        window_size: int = 16,
        min_window: int | None = None,
        budget: float | int = 0.25,
        ceiling: int | None = None,
        host_slots: int = 0,
        split: int = 1,
        recurrent: int = 0,
        drafts: int = 0,
    ) -> None:
        self.block_size = size = BLOCK * split
        self.hasher = get_request_block_hasher(size, sha256)
        settings = Settings(
            policy="snapkv",
            budget=budget,
            ceiling=ceiling,
            min_tokens=32,
            trigger="prompt,decode:40,pressure:0.9",
            reuse_contexts=reuse_contexts,
            reuse_conversations=reuse_conversations,
        )
        window_blocks = WINDOW_BLOCKS if window_size else 0
        demand = PolicyDemand(
            window_size=window_size, window_blocks=window_blocks, min_window=min_window
        )
        demands = (("snapkv", demand),)
        spec = CompressedAttentionSpec(
            block_size=size, settings=settings, demands=demands, part_size=BLOCK, **LAYER
        )
        sliding = DependentSlidingWindowSpec(block_size=size, sliding_window=64, **LAYER)
        mamba = DependentMambaSpec(
            block_size=size,
            shapes=((2, 8),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
        )
        groups = [mamba] * (recurrent > 1)  # before the compressed one, and behind it
        groups += [spec] * num_groups + [sliding] * (num_groups > 1) + [mamba] * (recurrent > 0)
        named = [KVCacheGroupSpec([f"layer {i}"], each) for i, each in enumerate(groups)]
        init_none_hash(sha256)
        self.cache = KVCacheManager(
            KVCacheConfig(num_blocks, [], named),
            max_model_len=2048,
            scheduler_block_size=size,
            hash_block_size=size,
        )
        managers = self.cache.coordinator.single_type_managers
        compressed = [each for each in managers if isinstance(each, CompressedBlockManager)]
        self.table = RequestTable(managers, compressed)
        host = HostCopies(host_slots, slot_bytes=1) if host_slots else None
        self.states = StateReuse(self.cache.block_pool, host)
        self.kept = self.states.kept
        for manager in managers:
            manager.table, manager.states, manager.siblings = self.table, self.states, compressed
        self.asynchronous = asynchronous
        self.requests: dict[str, Request] = {}
        self.sent: dict[str, list[int]] = {}
        self.num_in_place = 0

    def add(
        self,
        name: str,
        num_tokens: int,
        context_tokens: int | None = None,
        history: Sequence[int] = (),
        prepares: bool = False,
    ) -> Request:
        params = SamplingParams(max_tokens=1000)
        if context_tokens is not None:
            params.extra_args = {"kv_context_tokens": context_tokens, "kv_prepare": prepares}
        tokens = [*history, *prompt(num_tokens, seed=len(name))]
        request = Request(name, tokens, params, None, block_hasher=self.hasher)
        self.requests[name] = request
        self.table.open(request)
        return request

    def step(self, name: str, num_tokens: int = 64) -> bool:
        """Computes more tokens, up to an event; returns False if there is no room."""
        request, record = self.requests[name], self.table[name]
        self.cache.new_step_starts()
        blocks, num_hit = None, 0
        if request.num_computed_tokens == 0:
            longest = record.longest_hit(request.num_tokens - 1, request.num_tokens, None)
            scheduler = SimpleNamespace(kv_cache_manager=self.cache)
            blocks, num_hit, _ = find_prefix_hit_within(scheduler, request, longest)
            hit = record.reuse.beginning = self.states.find_beginning(request, record, num_hit)
            if hit is not None:
                groups = hit.groups(self.cache.block_pool.null_block)
                blocks = self.cache.create_kv_cache_blocks(groups)
                num_hit = hit.num_tokens
        start = request.num_computed_tokens + num_hit
        end = min(start + num_tokens, request.num_tokens)
        if self.table.others and start % self.block_size:  # as vLLM ends chunks beside states
            end = min(end, -(-start // self.block_size) * self.block_size)
        position = record.ledger.next_position(start)
        end = end if position is None else min(end, position)
        fits = self.cache.allocate_slots(
            request, end - start, num_hit, blocks, full_sequence_must_fit=start == num_hit
        )
        if fits is None:
            return False
        _, copied = self.cache.take_kv_cache_block_copies()
        self.cache.block_pool.free_blocks(copied)
        request.num_computed_tokens = end
        request.num_in_flight_tokens = end - start if self.asynchronous else 0
        if end == request.num_tokens:
            request.append_output_token_ids(7)
        waiting = record.prompt_events(start)  # since the step that sampled the first token
        events = [event.position for event in waiting + record.unsent.events]
        self.num_in_place += sum(event.in_place for event in waiting + record.unsent.events)
        assert events in ([], [start if waiting else end] * len(self.table.managers))
        record.unsent.events.clear()
        self.sent.setdefault(name, []).extend(events[:1])
        return True

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self.cache.free(request)
        self.table.open(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        self.sent[name] = []

    def end(self, name: str) -> None:
        request = self.requests.pop(name)
        record, (manager, *_) = self.table[name], self.table.managers
        self.states.end(request, record, manager, self.table.others)
        self.cache.free(request)

    def check(self) -> None:
        check_integrity(self.table, self.kept, self.requests)
        self.check_ceiling()

    def check_ceiling(self) -> None:
        """Counts the blocks that requests hold beside those of the last queries and of an event.

        After a step a request holds at most its ceiling and a block. What an event replaces is
        freed with the next step.
        """
        ceiling = self.table.spec.settings.ceiling
        for name in self.requests if ceiling is not None else ():
            for manager in self.table.managers:
                held = self.table[name].groups[manager.kv_cache_group_id]
                blocks = manager.req_to_blocks.get(name) or []
                after = held.fresh or held.kept
                if held.event is not None and not held.event.in_place:
                    after = held.fresh
                end = held.event.end_block * BLOCK // self.block_size if held.event else 0
                count = len(after) + sum(not block.is_null for block in blocks[end:])
                assert count <= ceiling // self.block_size + 1
