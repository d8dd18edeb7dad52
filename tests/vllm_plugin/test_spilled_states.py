"""States in host memory: every order of keeping, evicting and restoring, on plain lists."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from tests.request_queue import BLOCK, Queue
from vllm_kvcompress.scheduling.plan import BlockCopy, HostTransfer
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import KeptState

SLOTS = 6
Content = dict[int, object]  # what is in each block


class Model:
    """A pool of 12 blocks and host memory of 6, whose contents are labels."""

    def __init__(self) -> None:
        self.queue = Queue(1, num_blocks=12 + 1, reuse_conversations="reuse", host_slots=SLOTS)
        self.kept, self.pool = self.queue.kept, self.queue.cache.block_pool
        self.device: Content = {}
        self.host: Content = {}
        self.taken: list[KVCacheBlock] = []  # blocks that the step writes to
        self.copied: list[object] = []  # what the step copies to blocks of requests, in order

    @property
    def states(self) -> list[KeptState]:
        return [state for states in self.kept._by_hash.values() for state in states]

    def keep(self, num_kept: int, num_tail: int) -> None:
        """A request leaves a state, whose content is written in earlier steps."""
        if num_kept + num_tail > self.pool.get_num_free_blocks():
            return
        blocks = self.pool.get_new_blocks(num_kept + num_tail)
        number, tokens = self.kept.next_number(), tuple(range(num_tail * BLOCK))
        kept, tail = tuple(blocks[:num_kept]), tuple(blocks[num_kept:])
        hashes = (f"hash {number}".encode(),)
        state = KeptState(number, "key", BLOCK, 4 * BLOCK, num_kept, kept, hashes, tail, tokens)
        self.end_step()
        for index, block in enumerate(blocks):
            self.device[block.block_id] = (number, index)
        self.kept.keep(state)
        self.pool.unpin_blocks(blocks, self.kept._evict)

    def evict(self, count: int) -> None:
        """A request takes blocks, writes to them, and ends with the step."""
        blocks = self.pool.get_new_blocks(min(count, self.pool.get_num_free_blocks()))
        self.taken += blocks

    def restore(self, index: int) -> None:
        """A request continues a state, and copies its last block to one of its own."""
        spilled = [state for state in self.states if state.is_spilled]
        if not spilled:
            return
        state = self.kept.restore(spilled[index % len(spilled)], spare=1)
        if state is not None:
            self.continue_with(state)

    def resume(self, index: int) -> None:
        """The same, of a state in the pool."""
        resident = [state for state in self.states if not state.is_spilled]
        if resident and self.pool.get_num_free_blocks() > 1:
            self.continue_with(resident[index % len(resident)])

    def continue_with(self, state: KeptState) -> None:
        (target,) = self.pool.get_new_blocks(1)
        self.kept.copy_block(state.blocks[-1], target)
        self.copied.append((state.number, len(state.blocks) - 1))
        self.taken.append(target)

    def supersede(self, index: int) -> None:
        if self.states:
            self.kept.supersede(self.states[index % len(self.states)])

    def end_step(self) -> None:
        """Workers do all copies in their order, then write; then everything is where it belongs."""
        for each in self.kept.take_transfers():
            if isinstance(each, BlockCopy):
                assert self.device[each.source] == self.copied.pop(0)
                self.device[each.target] = "copy"
            elif each.to_host:
                for block, slot in zip(each.blocks, each.slots, strict=True):
                    self.host[slot] = self.device[block]
            else:
                for block, slot in zip(each.blocks, each.slots, strict=True):
                    self.device[block] = self.host[slot]
                self.expect_restored(each)
        for block in self.taken:
            self.device[block.block_id] = "other"
        self.pool.free_blocks(self.taken)
        self.taken = []
        self.check()

    def expect_restored(self, each: HostTransfer) -> None:
        content = [self.device[block] for block in each.blocks]
        assert content == [(each.state, index) for index in range(len(content))]

    def check(self) -> None:
        self.kept.check_integrity()
        copies = {copy.number: copy for copy in self.kept.host}
        for state in self.states:
            labels = [(state.number, index) for index in range(len(state.blocks))]
            if not state.is_spilled:
                assert [self.device[block.block_id] for block in state.blocks] == labels
            if copy := copies.get(state.number):
                assert [self.host[slot] for slot in copy.slots] == labels


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.integers(1, 2), st.integers(1, 3)),
        st.tuples(st.just("evict"), st.integers(1, 12)),
        st.tuples(st.sampled_from(["restore", "resume", "supersede"]), st.integers(0, 5)),
        st.just(("end_step",)),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_states_are_what_they_were_in_any_order_of_events(steps: list[tuple[Any, ...]]) -> None:
    """Also where a state is restored, continued and evicted in one step."""
    model = Model()
    for name, *arguments in steps:
        getattr(model, name)(*arguments)
        model.kept.check_integrity()
    model.end_step()


def evicted(queue: Queue, sizes: list[int]) -> list[int]:
    """Keeps states of so many blocks, all of which are evicted, in their order."""
    model = Model()
    model.queue, model.kept, model.pool = queue, queue.kept, queue.cache.block_pool
    for size in sizes:
        model.keep(1, size - 1)
    model.evict(12)
    queue.cache.block_pool.free_blocks(model.taken)
    return [state.number for state in model.states]


def test_least_recently_used_state_leaves_full_host_memory() -> None:
    queue = Queue(1, num_blocks=12 + 1, reuse_conversations="reuse", host_slots=SLOTS)
    assert evicted(queue, [3, 3, 3]) == [1, 2]
    assert queue.kept.stats.forgotten == {"host_full": 1}
    assert queue.kept.stats.states_spilled == 3
    assert len(queue.kept.host) == 2
    assert queue.kept.host.num_bytes == SLOTS
    assert queue.kept.host.num_tokens == 2 * (4 + 2) * BLOCK
    assert queue.kept.take_dropped() == [0]


def test_state_that_host_memory_never_holds_is_evicted() -> None:
    """Others stay in host memory."""
    queue = Queue(1, num_blocks=12 + 1, reuse_conversations="reuse", host_slots=SLOTS)
    assert evicted(queue, [3, SLOTS + 1]) == [0]
    assert queue.kept.stats.forgotten == {"evicted": 1}


def test_state_that_comes_back_and_goes_in_one_step_is_copied_once() -> None:
    """Its page table stays in step with the blocks that it came back to."""
    queue = Queue(1, num_blocks=12 + 1, reuse_conversations="reuse", host_slots=SLOTS)
    evicted(queue, [3])
    (out,) = queue.kept.take_transfers()
    (state,) = queue.kept._by_hash[b"hash 0"]
    back = queue.kept.restore(state, spare=0)
    queue.cache.block_pool.free_blocks(queue.cache.block_pool.get_new_blocks(12))
    (again,) = queue.kept._by_hash[b"hash 0"]
    assert again.is_spilled
    first, second = queue.kept.restore(again, spare=0), queue.kept.take_transfers()
    assert [each.to_host for each in second] == [False, False]
    assert [each.former for each in second] == [out.blocks, second[0].blocks]
    assert [each.slots for each in second] == [out.slots] * 2
    assert tuple(block.block_id for block in first.blocks) == second[1].blocks
    assert back is not None


def test_turn_continues_a_spilled_state_unless_blocks_are_short() -> None:
    queue = Queue(1, reuse_conversations="reuse", host_slots=50)
    pool = queue.cache.block_pool
    request = queue.add("a", 300)
    while request.num_computed_tokens < 320:
        assert queue.step("a", 10)
    history = list(request.all_token_ids)
    queue.end("a")
    pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))
    ((state,),) = queue.kept._by_hash.values()
    assert state.is_spilled
    num_needed = len(state.blocks) + 7  # tokens 320 to 420 or 421, beside one of the state's
    for name, num_free, cached in (("b", num_needed - 1, 0), ("c", num_needed, 320)):
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - num_free)
        record = queue.table[queue.add(name, 100, history=history).request_id]
        beginning = queue.states.find_beginning(queue.requests[name], record)
        assert (beginning.num_tokens if beginning else 0) == cached
        pool.free_blocks(taken)
    queue.kept.check_integrity()


def test_reset_forgets_what_host_memory_has() -> None:
    queue = Queue(1, num_blocks=12 + 1, reuse_conversations="reuse", host_slots=50)
    evicted(queue, [3, 4])
    assert len(queue.kept) == 2
    queue.kept.forget_spilled()
    assert len(queue.kept) == len(queue.kept.host) == 0
    assert queue.kept.host.num_free == 50
