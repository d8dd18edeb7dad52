"""Records of requests on vLLM's own block pool: what they hold, and that damage is detected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request

from tests.request_queue import Queue
from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import InvariantError, UnsupportedError
from vllm_kvcompress.scheduling.plan import BlockCopy
from vllm_kvcompress.vllm_plugin.scheduler_side import start
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import KeptState
from vllm_kvcompress.vllm_plugin.scheduler_side.scheduler import CompressionMixin


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_request_holds_kept_blocks_a_tail_and_an_event_in_flight(
    num_groups: int, asynchronous: bool
) -> None:
    """Compares with counts by hand: two window blocks, a partial block, and the others.

    At 300 tokens a quarter of 18 full blocks stays, at 340 a quarter of 21; an event's sources
    are given back with the next token, and where that is planned before the event has been
    processed, with the one after it. The prompt's event runs a step behind the first token.
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
    assert [held[position] for position in (256, 300, 301, 302, 303)] == [
        *(2 + 16, 2 + 18 + 1 + 5, 2 + 18 + 1 + 5),
        *(2 + 18 + 1 + 5 if late else 2 + 5 + 1, 2 + 5 + 1),
    ]
    assert [held[position] for position in (339, 340, 341, 342)] == [
        *(2 + 5 + 3 + 1, 2 + 5 + 3 + 1 + 6),
        *(2 + 5 + 3 + 1 + 6 if late else 2 + 6 + 1, 2 + 6 + 1),
    ]
    assert queue.sent["a"] == [300, 340]


def test_conversations_do_not_go_on_by_themselves_where_tokens_of_an_image_see_each_other() -> None:
    """A later turn would read its images behind what was compressed."""
    table, settings = Queue(1).table, Settings(policy="auto", budget=0.25)
    assert table.conversations(settings) == "auto"
    table.whole_images = True
    assert table.conversations(settings) is None


class Stock:
    """Stands in for vLLM's scheduler, which frees a preempted request's blocks."""

    def _preempt_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)


class Preempting(CompressionMixin, Stock):
    """Scheduler that can only preempt."""

    def __init__(self, queue: Queue) -> None:
        self.table, self.kv_cache_manager = queue.table, queue.cache
        self.spec, self.states = queue.table.spec, queue.states
        self.compressed, self._connector = queue.table.managers, None


@pytest.mark.parametrize(
    ("num_prompt_tokens", "position", "skips"),
    [(50, 40, False), (50, 80, True), (300, 256, False), (300, 310, True)],
)
def test_preempted_request_skips_the_prefix_cache_if_a_hit_would_hide_an_events_queries(
    num_prompt_tokens: int, position: int, skips: bool
) -> None:
    """A prompt of 50 tokens is first compressed at 90 tokens, one of 300 at its end.

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


def test_request_preempted_behind_its_first_token_has_its_event_later() -> None:
    """What the event would have written is given back, and the prompt is read again."""
    queue = Queue(1)
    request = queue.add("a", 300)
    for _ in range(2):
        while request.num_computed_tokens < 300:
            assert queue.step("a")
            queue.check()
        assert queue.sent["a"] == []
        assert [event.position for event in queue.table["a"].prompt_events(300)] == [300]
        queue.preempt("a")
        queue.check()
        assert queue.cache.block_pool.get_num_free_blocks() == 99
    while request.num_computed_tokens < 302:
        assert queue.step("a")
        queue.check()
    assert queue.sent["a"] == [300]


def test_no_request_waits_for_an_event_that_waits_for_a_request() -> None:
    """Events behind first tokens run once their requests go on; others free blocks by themselves.

    In a full pool both requests need a block for their next token.
    """
    queue = Queue(1, num_blocks=40)
    manager, names = queue.table.managers[0], ("a", "bb")
    for name in names:
        request = queue.add(name, 64)
        assert queue.step(name)
        assert queue.sent[name] == []  # the event comes behind the first token
        assert request.num_tokens == 65
    queue.cache.block_pool.get_new_blocks(queue.cache.block_pool.get_num_free_blocks())
    assert not any(manager.waits_for_room(name, 65, 64) for name in names)
    queue.table.awaiting_event.pop("a")  # its step has been planned
    assert manager.waits_for_room("bb", 65, 64)
    assert not manager.waits_for_room("bb", 64, 64)  # needs no block
    assert not manager.waits_for_room("a", 65, 65)  # whose own event has been processed


def test_window_holds_the_queries_behind_the_hit_that_a_request_was_admitted_with() -> None:
    """A preempted request begins anew with a hit of its own."""
    queue = Queue(1, window_size=64, min_window=16)
    history = queue.add("a", 300).all_token_ids
    while queue.requests["a"].num_computed_tokens < 300:
        assert queue.step("a")
    queue.end("a")
    queue.add("b", 20, history=history[:300])
    assert queue.step("b", 10)
    assert queue.table["b"].ledger.num_hit_tokens == 288  # of 300, in full blocks
    assert queue.table["b"].ledger.observed_window(320) == 32
    queue.preempt("b")
    assert queue.cache.reset_prefix_cache()
    assert queue.step("b", 10)
    assert queue.table["b"].ledger.num_hit_tokens == 0
    assert queue.table["b"].ledger.observed_window(320) == 64
    queue.check()


def test_context_is_forgotten_when_vllm_reuses_one_of_its_blocks() -> None:
    """Takes all free blocks once, which are those that no request holds."""
    queue = Queue(1, reuse_contexts=True)
    queue.add("a", 200, context_tokens=150)
    while queue.requests["a"].num_computed_tokens < 200:
        assert queue.step("a")
    queue.end("a")
    assert len(queue.kept) == 1
    pool = queue.cache.block_pool
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    queue.check()
    assert len(queue.kept) == 0


CONTEXT = prompt(160, seed=9)


def ask(queue: Queue, name: str) -> Request:
    """Adds a request that names the context, and has it take its first step."""
    request = queue.add(name, 30, context_tokens=160, history=CONTEXT)
    assert queue.step(name)
    return request


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prepared_context_is_found_before_an_ordinary_one(asynchronous: bool) -> None:
    """Held while it is read: everything, and at its end what is kept. Then nobody holds it.

    It leaves what it has prepared in the step that ends it, and reads no compressed context; blocks
    of the prefix cache it does.
    """
    queue = Queue(1, reuse_contexts=True, asynchronous=asynchronous)
    ask(queue, "ordinary")
    while queue.requests["ordinary"].num_computed_tokens < 192:
        assert queue.step("ordinary")
    queue.end("ordinary")
    request = queue.add("preparing", 170, context_tokens=160, history=CONTEXT, prepares=True)
    assert queue.step("preparing")
    assert request.num_computed_tokens == 144 + 64  # the context's last token is computed
    assert queue.table.managers[0].num_blocks_held("preparing") == 13
    while request.num_computed_tokens < 330:
        assert queue.step("preparing")
        queue.check()
    assert queue.sent["preparing"] == [330]
    held = queue.table.managers[0].num_blocks_held("preparing")
    assert held == 21 + 3  # a quarter of ten blocks, not of twenty
    request.num_in_flight_tokens = 0  # its last step has been processed
    queue.end("preparing")
    queue.check()
    assert len(queue.kept) == 2
    ask(queue, "asking")
    state = queue.table["asking"].reuse.state
    assert (state.number, state.position, len(state.kept), state.tail) == (1, 160, 3, ())
    queue.check()


def test_preparation_that_ends_before_its_event_leaves_no_state() -> None:
    """Ends before the event, and in the event's step before that is processed."""
    for num_tokens in (250, 330):
        queue = Queue(1, reuse_contexts=True, asynchronous=True)
        request = queue.add("a", 170, context_tokens=160, history=CONTEXT, prepares=True)
        while request.num_computed_tokens < num_tokens:
            assert queue.step("a")
        queue.end("a")
        queue.check()
        assert len(queue.kept) == 0


def test_preempted_preparation_begins_anew() -> None:
    queue = Queue(1, reuse_contexts=True)
    request = queue.add("a", 170, context_tokens=160, history=CONTEXT, prepares=True)
    while request.num_computed_tokens < 250:
        assert queue.step("a")
    queue.table["a"].unsent.requests.clear()  # workers have been told
    queue.preempt("a")
    assert queue.table["a"].unsent.requests["a"].scored_tokens == 160
    while request.num_computed_tokens < 330:
        assert queue.step("a")
    queue.end("a")
    assert len(queue.kept) == 1


def test_kv_prepare_is_ignored_without_tokens_behind_the_context_or_a_full_block() -> None:
    """Names contexts of the prompt's length, of more, and of less than a block."""
    queue = Queue(1, reuse_contexts=True)
    for name, context_tokens in (("a", 170), ("bb", 500), ("ccc", 15)):
        queue.add(name, 170, context_tokens=context_tokens, prepares=True)
        assert not queue.table[name].unsent.requests


def end_after(queue: Queue, name: str, num_reply_tokens: int) -> list[int]:
    """Has a request read its prompt, generate and end, and returns all of its tokens."""
    request = queue.requests[name]
    while request.num_output_tokens < num_reply_tokens:
        assert queue.step(name)
        queue.check()
    queue.end(name)
    queue.check()
    return list(request.all_token_ids)


def test_conversation_continues_from_its_kept_state() -> None:
    """Two branches share what is kept; the block that both write to is copied for each."""
    queue = Queue(1, reuse_conversations="reuse")
    queue.add("a", 300)
    history = end_after(queue, "a", 25)
    (state,) = queue.kept.find(queue.add("b", 100, history=history), _use(queue, "b"))
    assert state[1] == 324  # the last token was not computed
    queue.add("cc", 90, history=history)
    for name in ("b", "cc"):
        assert queue.step(name)
        assert queue.requests[name].num_computed_tokens == 324 + 64
        queue.check()
    ours, theirs = (
        queue.cache.coordinator.single_type_managers[0].req_to_blocks[n] for n in ("b", "cc")
    )
    assert [block.is_null for block in ours] == [n < 18 for n in range(25)]
    assert ours[18:20] == theirs[18:20]
    assert ours[20] is not theirs[20]
    copied = state[0].tail[2].block_id
    copies = queue.kept.take_transfers()
    assert copies == [BlockCopy(copied, one[20].block_id) for one in (ours, theirs)]
    for name in ("b", "cc"):
        end_after(queue, name, 3)
    assert len(queue.kept) == 3


def test_longer_state_of_an_event_replaces_a_shorter_one() -> None:
    queue = Queue(1, reuse_conversations="reuse")
    queue.add("a", 300)
    history = end_after(queue, "a", 25)
    queue.add("b", 30, history=history)
    while queue.requests["b"].num_computed_tokens < 340:
        assert queue.step("b", 10)
    queue.end("b")
    queue.check()
    assert len(queue.kept) == 1
    assert queue.kept.stats.forgotten == {"extended": 1}


@pytest.mark.parametrize(("num_blocks", "first_to_go"), [(30, "a"), (100, "other")])
def test_former_turns_are_evicted_first_if_states_fill_half_of_the_pool(
    num_blocks: int, first_to_go: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the state goes first that has been idle for longer, of another conversation."""
    queue = Queue(1, reuse_conversations="reuse")
    pool, states = queue.cache.block_pool, queue.kept
    kept: dict[str, KeptState] = {}
    for name in ("other", "a"):
        queue.add(name, 300)
        history = end_after(queue, name, 30)
        known = {state for of_block in states._by_block.values() for state in of_block}
        (kept[name],) = known - set(kept.values())
    queue.add("b", 40, history=history)
    assert queue.step("b")
    with monkeypatch.context() as patch:
        patch.setattr(pool, "num_gpu_blocks", num_blocks)  # 16 of them are states'
        assert queue.step("b")  # the event
        assert queue.step("b")
    queue.end("b")
    queue.check()
    assert len(states) == 3
    while len(states) == 3:
        pool.touch(pool.get_new_blocks(1))
    assert states.take_dropped() == [kept[first_to_go].number]


@pytest.mark.parametrize(
    ("how", "window_size", "evicted", "question", "cached"),
    [
        *[("reuse", 16, False, 100, 324), ("anew", 16, False, 100, 288)],
        *[("anew", 16, True, 100, 324), ("auto", 16, False, 100, 288)],
        *[("auto", 16, True, 100, 324), ("auto", 0, False, 100, 324)],
        *[("reuse", 48, False, 5, 300), ("anew", 48, False, 5, 272), ("anew", 48, True, 5, 300)],
    ],
)
def test_turn_begins_with_the_kept_state_or_with_the_prefix_cache(
    how: str, window_size: int, evicted: bool, question: int, cached: int
) -> None:
    """Turns are compressed anew if the prefix cache has the history, and the option says so.

    `auto` says so if the policy observes queries. The last 48 queries before an event count as
    cached, since they are computed anew in any case.
    """
    queue = Queue(1, reuse_conversations=how, window_size=window_size)
    queue.add("a", 300)
    history = end_after(queue, "a", 25)
    if evicted:
        for block in queue.cache.block_pool.blocks:
            queue.cache.block_pool.evict_blocks({block.block_id})
    queue.add("b", question, history=history)
    assert queue.step("b", 1)
    assert queue.requests["b"].num_computed_tokens == cached + 1


@pytest.mark.parametrize(
    ("how", "window_size", "said"),
    [
        ("auto", 16, "auto = anew while the whole history is cached, since the policy looks at"),
        ("auto", 0, "auto = reuse, since the policy does not look at queries)."),
        ("reuse", 16, "reuse; events look at new queries, so a turn of fewer than 16 tokens reads"),
    ],
)
def test_start_up_log_says_how_conversations_continue(
    how: str, window_size: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def info(text: str, *values: Any) -> None:
        lines.append(text % values)

    monkeypatch.setattr(start.logger, "info", info)
    queue = Queue(1, reuse_conversations=how, window_size=window_size)
    start.announce(queue.table, queue.states, max_model_len=512)
    assert said in lines[1]


@pytest.mark.parametrize("option", ["contexts", "conversations"])
def test_reuse_is_refused_beside_layers_of_other_kinds(option: str) -> None:
    wanted = {"reuse_contexts": True} if option == "contexts" else {"reuse_conversations": "auto"}
    with pytest.raises(UnsupportedError, match=f"--kv-reuse-{option} needs a model of full-att"):
        start.check_reuse(Queue(2, **wanted).table)


@pytest.mark.parametrize("option", ["contexts", "conversations"])
def test_reuse_is_refused_beside_recurrent_states_of_drafts(option: str) -> None:
    wanted = {"reuse_contexts": True} if option == "contexts" else {"reuse_conversations": "auto"}
    start.check_reuse(Queue(1, recurrent=1, **wanted).table)
    with pytest.raises(UnsupportedError, match="linear-attention layers at most, and no drafts"):
        start.check_reuse(Queue(1, recurrent=1, drafts=1, **wanted).table)


@pytest.mark.parametrize("recurrent", [1, 2])
@pytest.mark.parametrize("num_reply_tokens", [25, 21])
def test_conversation_goes_on_from_all_of_a_state_with_recurrent_ones(
    recurrent: int, num_reply_tokens: int
) -> None:
    """Its end lies within a block of 64 tokens, where each branch has a copy, or at its end.

    Without the end of the reply nothing of it serves.
    """
    queue = Queue(1, reuse_conversations="reuse", recurrent=recurrent, split=4)
    queue.add("a", 300)
    history = end_after(queue, "a", num_reply_tokens)
    end = 300 + num_reply_tokens - 1
    for name, past in (("b", history), ("cc", history), ("ddd", history[: end - 1])):
        request = queue.add(name, 100, history=past)
        assert queue.step(name, 1)
        queue.check()
        goes_on = name != "ddd"
        assert (queue.table[name].reuse.state is not None) == goes_on
        assert (request.num_computed_tokens == end + 1) == goes_on
    state = queue.table["b"].reuse.state
    assert state is not None
    assert len(state.recurrent) == recurrent
    for group, block in state.recurrent:
        blocks = queue.table.all_managers[group].req_to_blocks
        current = [blocks[name][end // queue.block_size] for name in ("b", "cc")]
        assert len({each.block_id for each in [block, *current]}) == 3
        assert block.ref_cnt == 2 + (end % queue.block_size == 0) * 2
    for name in ("b", "cc"):
        end_after(queue, name, 3)
    assert len(queue.kept) == 3


def test_context_leaves_the_recurrent_state_at_its_end() -> None:
    """Others hold it until they end, though they have gone on to the next blocks."""
    queue = Queue(1, reuse_contexts=True, recurrent=1, split=4)
    queue.add("a", 60, context_tokens=170, history=CONTEXT)
    while queue.requests["a"].num_computed_tokens < 220:
        assert queue.step("a")
        queue.check()
    queue.end("a")
    queue.check()
    request = queue.add("b", 90, context_tokens=170, history=CONTEXT)
    while request.num_computed_tokens < 250:
        assert queue.step("b")
        queue.check()
    state = queue.table["b"].reuse.state
    assert state is not None
    assert (state.num_tokens, state.tail) == (128, ())
    assert [block.ref_cnt for _, block in state.recurrent] == [1]
    queue.end("b")
    queue.check()
    assert len(queue.kept) == 1


def _use(queue: Queue, name: str) -> object:
    return queue.table[name].reuse.key


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
    queue.kept._by_block.popitem()


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
        (forget_context_block, "blocks of kept states"),
    ],
)
def test_integrity_check_detects_damage(damage: Callable[[Queue], None], message: str) -> None:
    """Damages a table with an event in flight, a waiting request and a kept context."""
    queue = Queue(1, reuse_contexts=True)
    queue.add("context", 200, context_tokens=150)
    while queue.requests["context"].num_computed_tokens < 200:
        assert queue.step("context")
    queue.end("context")
    assert len(queue.kept) == 1
    queue.add("a", 300)
    while queue.requests["a"].num_computed_tokens < 300:
        assert queue.step("a")
    queue.add("b", 100)
    queue.check()
    damage(queue)
    with pytest.raises(InvariantError, match=message):
        queue.check()
