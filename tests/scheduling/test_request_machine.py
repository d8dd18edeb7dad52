"""Records of requests under random schedules: hypothesis finds a minimal one that loses a block."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.request_queue import Queue
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.vllm_plugin.scheduler_side.block_manager import CompressedBlockManager

# Names of equal length have the same prompt, and so hit each other's prefixes.
NAMES = ("a", "b", "cc", "dd", "eee", "fff")
LENGTHS = {1: 90, 2: 220, 3: 350}
CONTEXT = 75


class Schedules(RuleBasedStateMachine):
    """Schedules of six requests in a pool that is too small for them."""

    histories: dict[int, list[int]]

    @initialize(
        num_groups=st.sampled_from([1, 2]),
        reuses=st.booleans(),
        conversations=st.sampled_from([None, "reuse", "anew"]),
        asynchronous=st.booleans(),
        budget=st.sampled_from([0.25, 48]),
        ceiling=st.sampled_from([None, 40, 96, 230]),
        split=st.sampled_from([1, 1, 4]),
        recurrent=st.sampled_from([0, 1, 2]),
    )
    def start(
        self,
        num_groups: int,
        reuses: bool,
        conversations: str | None,
        asynchronous: bool,
        budget: float | int,
        ceiling: int | None,
        split: int,
        recurrent: int,
    ) -> None:
        self.num_blocks, self.histories = 40 * num_groups, {}
        if num_groups > 1:
            reuses, conversations = False, None
            recurrent = 0
        if split > 1:
            self.num_blocks = 14 * num_groups
            ceiling = None if ceiling is None else max(160, ceiling)
        self.num_blocks += 12 * recurrent
        self.queue = Queue(
            num_groups,
            reuses,
            asynchronous,
            self.num_blocks,
            conversations,
            budget=budget,
            ceiling=ceiling,
            split=split,
            recurrent=recurrent,
        )

    def some(self, data: st.DataObject, *, running: bool | None = None) -> str:
        """Draws a queued or running request, or one of the given kind."""
        requests = self.queue.requests.items()
        fit = [n for n, r in requests if running in (None, bool(r.num_computed_tokens))]
        return data.draw(st.sampled_from(sorted(fit)))

    def has(self, running: bool) -> bool:
        """Whether any request has begun, or has not."""
        requests = self.queue.requests.values()
        return any(bool(request.num_computed_tokens) == running for request in requests)

    @precondition(lambda self: len(self.queue.requests) < len(NAMES))
    @rule(data=st.data(), names_context=st.booleans(), goes_on=st.booleans())
    def admit(self, data: st.DataObject, names_context: bool, goes_on: bool) -> None:
        """Queues a request; requests of one length may share a context or a history."""
        name = data.draw(st.sampled_from(sorted(set(NAMES) - set(self.queue.requests))))
        past = self.histories.get(len(name), []) if goes_on else []
        self.queue.add(name, LENGTHS[len(name)], CONTEXT if names_context else None, past)

    @precondition(lambda self: self.has(running=False))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """Takes a request's first step, with the prefix or the kept state that it hits."""
        name = self.some(data, running=False)
        request = self.queue.requests[name]
        _, num_hit, _ = self.queue.cache.get_computed_blocks(request)
        known = self.queue.states.find_beginning(request, self.queue.table[name], num_hit)
        if self.queue.step(name) and known is not None:
            assert request.num_computed_tokens > known.num_tokens
            assert self.queue.table[name].reuse.state is known.state

    @precondition(lambda self: self.has(running=True))
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 16, 40, 64]))
    def chunk(self, data: st.DataObject, num_tokens: int) -> None:
        """Computes some more of a prompt, or a token of an answer."""
        self.queue.step(self.some(data, running=True), num_tokens)

    @precondition(lambda self: self.has(running=True))
    @rule(data=st.data(), number=st.integers(1, 50))
    def decode(self, data: st.DataObject, number: int) -> None:
        """Generates tokens of an answer, one a step, as long as there is room."""
        name = self.some(data, running=True)
        for _ in range(number):
            if not self.queue.step(name, 1):
                break
            self.queue.check()

    @precondition(lambda self: self.has(running=True))
    @rule(data=st.data())
    def event(self, data: st.DataObject) -> None:
        """Selects a request because of memory pressure."""
        name = self.some(data, running=True)
        self.queue.table.selected.add(name)
        self.queue.step(name, 1)
        self.queue.table.selected.discard(name)

    @precondition(lambda self: self.has(running=True))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.queue.preempt(self.some(data, running=True))

    @precondition(lambda self: bool(self.queue.requests))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = self.some(data)
        tokens = list(self.queue.requests[name].all_token_ids)
        self.histories[len(name)] = tokens if len(tokens) < 500 else []
        self.queue.end(name)

    @rule(share=st.sampled_from([0.3, 1.0]))
    def evict(self, share: float) -> None:
        """Takes blocks for a moment, so that prefixes and states in them are forgotten."""
        pool = self.queue.cache.block_pool
        taken = pool.get_new_blocks(int(share * pool.get_num_free_blocks()))
        assert not any(block in self.queue.kept for block in taken)
        pool.free_blocks(taken)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.queue.check()

    def teardown(self) -> None:
        queue = getattr(self, "queue", None)
        if queue is None:
            return
        for name in list(queue.requests):
            queue.end(name)
            queue.check()
        assert queue.cache.block_pool.get_num_free_blocks() == self.num_blocks - 1


BRIEF = settings(
    max_examples=200,
    stateful_step_count=10,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    derandomize=True,
)
TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_forgotten_event_is_found_with_a_minimal_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks the block manager: it forgets an event instead of freeing its sources."""

    def forgetful(self: CompressedBlockManager, request_id: str) -> None:
        self.table[request_id].groups[self.kv_cache_group_id].event = None

    monkeypatch.setattr(CompressedBlockManager, "_free_sources", forgetful)
    with pytest.raises(InvariantError) as raised:
        run_state_machine_as_test(Schedules, settings=BRIEF)
    steps = "\n".join(raised.value.__notes__)
    assert "state.admit(" in steps
    rules = [line for line in steps.splitlines() if line.startswith("state.")]
    rules = [line for line in rules if "nothing_is_lost" not in line]
    assert len(rules) <= 8, steps  # the first and last are the start and the end
