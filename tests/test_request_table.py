"""The requests' records on vLLM's own block pool: nothing is lost, whatever becomes of requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.tiny_models import prompt
from vllm_kvcompress.config import Settings
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.scheduling.triggers import parse_triggers
from vllm_kvcompress.vllm_plugin.block_manager import CompressedBlockManager
from vllm_kvcompress.vllm_plugin.request_table import RequestTable
from vllm_kvcompress.vllm_plugin.scheduler import CompressionMixin
from vllm_kvcompress.vllm_plugin.spec import (
    CompressedAttentionSpec,
    DependentSlidingWindowSpec,
    PolicyDemand,
)

BLOCK, WINDOW_BLOCKS = 16, 2
LAYER = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
hasher = get_request_block_hasher(BLOCK, sha256)


class Queue:
    """Requests that take steps of their own, as vLLM's scheduler would give them.

    Args:
        num_groups: of compressed layers; two have a group of sliding windows beside them.
        reuse_contexts: contexts outlive their request.
        asynchronous: a step is processed after the next one was planned.
        num_blocks: of the pool.
    """

    def __init__(
        self,
        num_groups: int,
        reuse_contexts: bool = False,
        asynchronous: bool = False,
        num_blocks: int = 100,
    ) -> None:
        settings = Settings(
            policy="snapkv",
            budget=0.25,
            triggers=parse_triggers("prompt,decode:40,pressure:0.9"),
            reuse_contexts=reuse_contexts,
        )
        demand = PolicyDemand("snapkv", 16, least_blocks=1, window_blocks=WINDOW_BLOCKS)
        spec = CompressedAttentionSpec(settings=settings, demands=(demand,), **LAYER)
        sliding = DependentSlidingWindowSpec(sliding_window=64, **LAYER)
        groups = [spec] * num_groups + [sliding] * (num_groups > 1)
        named = [KVCacheGroupSpec([f"layer {i}"], each) for i, each in enumerate(groups)]
        init_none_hash(sha256)
        self.cache = KVCacheManager(
            KVCacheConfig(num_blocks, [], named),
            max_model_len=2048,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        managers = self.cache.coordinator.single_type_managers
        compressed = [each for each in managers if isinstance(each, CompressedBlockManager)]
        self.table = RequestTable(managers, compressed, self.cache.block_pool)
        for manager in managers:
            manager.table = self.table
        self.asynchronous = asynchronous
        self.requests: dict[str, Request] = {}
        self.sent: dict[str, list[int]] = {}

    def add(self, name: str, num_tokens: int, context_tokens: int | None = None) -> Request:
        params = SamplingParams(max_tokens=1000)
        if context_tokens is not None:
            params.extra_args = {"kv_context_tokens": context_tokens}
        tokens = prompt(num_tokens, seed=len(name))
        request = Request(name, tokens, params, None, block_hasher=hasher)
        self.requests[name] = request
        self.table.open(request)
        return request

    def step(self, name: str, num_tokens: int = 64) -> bool:
        """Computes some more tokens, up to an event; False: there is no room for them."""
        request, record = self.requests[name], self.table[name]
        blocks, num_hit = None, 0
        if request.num_computed_tokens == 0:
            hit = record.context_hit = self.table.contexts.find(record.ledger.context_key)
            if hit is not None:
                null = [self.cache.block_pool.null_block] * hit.num_blocks
                blocks, num_hit = self.cache.create_kv_cache_blocks((null,)), len(null) * BLOCK
            else:
                blocks, num_hit, _ = self.cache.get_computed_blocks(request)
        start = request.num_computed_tokens + num_hit
        end = min(start + num_tokens, request.num_tokens)
        position = record.ledger.rule.next_position(record.ledger.compress_at, start)
        end = end if position is None else min(end, position)
        fits = self.cache.allocate_slots(
            request, end - start, num_hit, blocks, full_sequence_must_fit=start == num_hit
        )
        if fits is None:
            return False
        request.num_computed_tokens = end
        request.num_in_flight_tokens = end - start if self.asynchronous else 0
        if end == request.num_tokens:
            request.append_output_token_ids(7)
        events = [event.position for event in record.unsent.events]
        assert events in ([], [end] * len(self.table.managers))
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
        self.cache.free(self.requests.pop(name))

    def check(self) -> None:
        self.table.check_integrity(self.requests)


@given(
    num_groups=st.sampled_from([1, 2]),
    reuse_contexts=st.booleans(),
    asynchronous=st.booleans(),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=120),
)
def test_nothing_is_lost(
    num_groups: int, reuse_contexts: bool, asynchronous: bool, steps: list[tuple[int, int]]
) -> None:
    """Six requests, of which any may step, be compressed for room, be preempted or be aborted."""
    num_blocks = 40 * num_groups  # so that contexts are forgotten, and not everybody is let in
    queue = Queue(num_groups, reuse_contexts and num_groups == 1, asynchronous, num_blocks)
    for number, action in steps:
        name = "r" * (1 + number // 2) + str(number % 2)  # pairs with the same prompt
        if name not in queue.requests:
            queue.add(name, 90 + 130 * (number // 2), 75 if number in (2, 3) else None)
        elif action == 0:
            queue.end(name)
        elif action == 1 and queue.requests[name].num_computed_tokens:
            queue.preempt(name)
        else:
            queue.table[name].selected = action == 2
            queue.step(name)
        queue.check()
    for name in list(queue.requests):
        queue.end(name)
        queue.check()
    assert queue.cache.block_pool.get_num_free_blocks() == num_blocks - 1


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_request_holds(num_groups: int, asynchronous: bool) -> None:
    """Counted by hand: two blocks of queries, one that is being filled, and the others.

    At 300 tokens a quarter of 18 full blocks stays, at 340 a quarter of 21; an event's sources
    are given back with the next token, and where that is planned before the event has been
    processed, with the one after it.
    """
    queue = Queue(num_groups, asynchronous=asynchronous)
    queue.add("a", 300)
    held = {}
    while queue.requests["a"].num_computed_tokens < 350:
        assert queue.step("a")
        queue.check()
        position = queue.requests["a"].num_computed_tokens
        held[position] = queue.table.managers[0].num_blocks_held("a")
    late = asynchronous
    assert [held[position] for position in (256, 300, 301, 302)] == [
        *(2 + 16, 2 + 18 + 1 + 5),
        *(2 + 18 + 1 + 5 if late else 2 + 5 + 1, 2 + 5 + 1),
    ]
    assert [held[position] for position in (339, 340, 341, 342)] == [
        *(2 + 5 + 3 + 1, 2 + 5 + 3 + 1 + 6),
        *(2 + 5 + 3 + 1 + 6 if late else 2 + 6 + 1, 2 + 6 + 1),
    ]
    assert queue.sent["a"] == [300, 340]


class Stock:
    """What vLLM's scheduler does with a preempted request's blocks."""

    def _preempt_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)


class Preempting(CompressionMixin, Stock):
    """The part of a scheduler that preempts."""

    def __init__(self, queue: Queue) -> None:
        self.table, self.kv_cache_manager = queue.table, queue.cache


@pytest.mark.parametrize(
    ("num_prompt_tokens", "position", "skips"),
    [(50, 40, False), (50, 80, True), (300, 256, False), (300, 310, True)],
)
def test_no_hit_hides_the_queries_of_an_event(
    num_prompt_tokens: int, position: int, skips: bool
) -> None:
    """50 tokens are compressed first when 90 are there, and 300 at once.

    A request that generated, and begins anew, would else find what it generated in the cache.
    """
    queue = Queue(1)
    request = queue.add("a", num_prompt_tokens)
    while request.num_computed_tokens < position:
        assert queue.step("a", position - request.num_computed_tokens)
    Preempting(queue)._preempt_request(request)
    queue.check()
    assert request.skip_reading_prefix_cache is skips
    assert queue.table["a"].ledger.last_position == 0


def test_a_context_is_forgotten_with_its_first_block() -> None:
    """vLLM hands out whatever nobody holds; that context is then nowhere to be found."""
    queue = Queue(1, reuse_contexts=True)
    queue.add("a", 200, context_tokens=150)
    while queue.requests["a"].num_computed_tokens < 200:
        assert queue.step("a")
    queue.end("a")
    assert len(queue.table.contexts) == 1
    pool = queue.cache.block_pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    queue.check()
    assert len(queue.table.contexts) == 0


def forget_window(queue: Queue) -> None:
    queue.table["a"].groups[0].window.clear()


def forget_fresh_blocks(queue: Queue) -> None:
    queue.table["a"].groups[0].fresh = []


def forget_event(queue: Queue) -> None:
    queue.table["a"].groups[0].event = None


def free_sources_early(queue: Queue) -> None:
    queue.cache.block_pool.free_blocks(queue.table.managers[0].req_to_blocks["a"][:1])


def share_fresh_block(queue: Queue) -> None:
    (block, *_) = queue.table["a"].groups[0].fresh
    block.ref_cnt += 1
    queue.table["b"].groups[0].kept.append(block)


def take_block(queue: Queue) -> None:
    queue.cache.block_pool.get_new_blocks(1)


def end_without_closing(queue: Queue) -> None:
    del queue.requests["b"]


def preempt_without_opening(queue: Queue) -> None:
    queue.cache.free(queue.requests["a"])


def cache_fresh_block(queue: Queue) -> None:
    queue.table["a"].groups[0].fresh[0]._block_hash = b"hash"


def forget_context_block(queue: Queue) -> None:
    queue.table.contexts._by_block.popitem()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (forget_window, "owners by block"),
        (forget_fresh_blocks, "owners by block"),
        (forget_event, "blocks of a in group 0"),
        (free_sources_early, "owners by block"),
        (share_fresh_block, "blocks of a in group 0"),
        (take_block, "owners by block"),
        (end_without_closing, "requests with a record"),
        (preempt_without_opening, "requests with a record"),
        (cache_fresh_block, "blocks of a in group 0"),
        (forget_context_block, "blocks of contexts"),
    ],
)
def test_damage_is_found(damage: Callable[[Queue], None], message: str) -> None:
    """While one request's event is in flight, another waits, and a context is kept."""
    queue = Queue(1, reuse_contexts=True)
    queue.add("context", 200, context_tokens=150)
    while queue.requests["context"].num_computed_tokens < 200:
        assert queue.step("context")
    queue.end("context")
    assert len(queue.table.contexts) == 1
    queue.add("a", 300)
    while queue.requests["a"].num_computed_tokens < 300:
        assert queue.step("a")
    queue.add("b", 100)
    queue.check()
    damage(queue)
    with pytest.raises(InvariantError, match=message):
        queue.check()
