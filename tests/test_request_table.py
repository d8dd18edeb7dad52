"""The requests' records on vLLM's own block pool: what they hold, and that damage is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.request import Request

from tests.request_queue import Queue
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.vllm_plugin.scheduler import CompressionMixin


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
