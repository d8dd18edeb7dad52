"""Compressed states that outlive their request, so that later requests need not read them again.

What an event kept, and what was computed behind it, is the same for every request that begins with
the same tokens. The blocks of a state stay readable while no request holds them: they wait at the
end of vLLM's free queue, as cached prefixes do. A state is forgotten once vLLM hands out one of its
blocks, or with `--kv-spill` copied to host memory, from where it comes back to other blocks.

    tokens    0 ........... first_block .. position ............. end
    blocks    [ kept: what the last event left ][ tail: ordinary blocks, the last one partial ]
    recurrent                                                    [ ] per group of Mamba layers

A state that was kept right behind an event, for others with the same context, has no tail. The
recurrent state of Mamba and linear-attention layers at its end is a block of each of their groups.
It cannot be cut, so such a kept state serves only prompts that begin with all of its tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.metrics.stats import EVICTED, EXTENDED, HOST_FULL, StepStats
from vllm_kvcompress.scheduling.plan import BlockCopy, HostTransfer

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

    from vllm_kvcompress.vllm_plugin.scheduler_side.host_copies import HostCopies

Key = TypeVar("Key", bound=Hashable)

# Tokens that are read in the time of a decode step: about 50 on two CPU cores, more on GPUs.
TOKENS_PER_STEP = 64


@dataclass(frozen=True, eq=False)
class KeptState:
    """Blocks that a request left behind, and the tokens that they stand for.

    Of a state in host memory alone, all blocks are vLLM's null block.

    Attributes:
        number: number by which workers know its page tables.
        key: policy, rule and named context that a request must share to begin with it.
        block_size: tokens of a block.
        position: computed tokens at its last event, which saw all of them.
        resident_blocks: blocks of attention kernels that `kept` holds kept tokens in.
        kept: blocks with the kept tokens of the compressed logical blocks.
        hashes: hash of the last compressed block, then those of the tail's full blocks.
        tail: ordinary blocks behind the compressed ones.
        tokens: token ids of the tail.
        recurrent: group and block of the recurrent states of Mamba layers at its end.
    """

    number: int
    key: Hashable
    block_size: int
    position: int
    resident_blocks: int
    kept: tuple[KVCacheBlock, ...]
    hashes: tuple[BlockHash, ...]
    tail: tuple[KVCacheBlock, ...] = ()
    tokens: tuple[int, ...] = ()
    recurrent: tuple[tuple[int, KVCacheBlock], ...] = ()

    @property
    def first_block(self) -> int:
        """Number of logical blocks that were compressed completely."""
        return self.position // self.block_size

    @property
    def blocks(self) -> tuple[KVCacheBlock, ...]:
        """All blocks, kept ones, tail and those of other groups."""
        return self.kept + self.tail + tuple(block for _, block in self.recurrent)

    @property
    def is_spilled(self) -> bool:
        """Whether only host memory holds it."""
        return any(block.is_null for block in self.blocks[:1])

    @property
    def num_tokens(self) -> int:
        """Tokens that it stands for."""
        return self.first_block * self.block_size + len(self.tokens)

    @property
    def fewest_tokens(self) -> int:
        """Tokens that a request which begins with it takes at least."""
        return self.num_tokens if self.recurrent else self.position

    def num_common_tokens(self, request: Request) -> int:
        """Counts the leading tokens shared with a request that has the same compressed blocks.

        Full blocks are compared by hash, which covers images and adapters. The rest is compared
        token by token, if the request is nothing but tokens.
        """
        hashes = request.block_hashes[self.first_block - 1 :]
        num_equal = _num_equal(self.hashes, hashes)
        end = (self.first_block - 1 + num_equal) * self.block_size
        if not has_only_tokens(request):
            return end
        rest = self.tokens[(num_equal - 1) * self.block_size :]
        return end + _num_equal(rest, request.all_token_ids[end : end + self.block_size])

    def extends(self, other: KeptState) -> bool:
        """Whether it serves every request that the other serves: the same event and more tail.

        A state without a tail is not replaced: it lasts longer than what came behind it.
        """
        same_event = self.key == other.key and self.kept == other.kept
        is_longer = self.tokens[: len(other.tokens)] == other.tokens
        if self.recurrent:
            is_longer = self.tokens == other.tokens
        return same_event and is_longer and bool(other.tail)


@dataclass(frozen=True)
class Beginning:
    """Leading tokens that a request need not read, since it begins with a kept state.

    Attributes:
        state: the state, left by an earlier request.
        num_tokens: tokens taken from it, at least those that its event saw.
    """

    state: KeptState
    num_tokens: int

    @property
    def tail(self) -> tuple[KVCacheBlock, ...]:
        """Full blocks of the state's tail, which the request only reads."""
        num_full = self.num_tokens // self.state.block_size - self.state.first_block
        return self.state.tail[:num_full]

    @property
    def copied_block(self) -> KVCacheBlock | None:
        """Partial block that the request goes on writing to, in a copy; None: there is none."""
        if self.num_tokens % self.state.block_size == 0:
            return None
        return self.state.tail[len(self.tail)]

    def groups(self, null_block: KVCacheBlock) -> tuple[list[KVCacheBlock], ...]:
        """Returns the blocks of each cache group, as vLLM takes a prefix hit."""
        state = self.state
        attended = [null_block] * state.first_block + [*self.tail]
        groups = [attended for _ in range(1 + len(state.recurrent))]
        for group, block in state.recurrent:
            groups[group] = [null_block] * ((self.num_tokens - 1) // state.block_size) + [block]
        return tuple(groups)


@dataclass
class StateUse:
    """How one request uses kept states.

    Attributes:
        key: key of the states that it may begin with and leaves; None: it does neither.
        how: how its conversation goes on, as in `--kv-reuse-conversations`; None: it does not.
        context_hash: hash of its context's last block, if the event there leaves a state.
        begins_anew: whether it must begin without a state.
        beginning: state that it can begin with, until it is admitted.
        state: last state that it began with or left, whose blocks it may share with others.
    """

    key: Hashable = None
    how: str | None = None
    context_hash: BlockHash | None = None
    begins_anew: bool = False
    beginning: Beginning | None = None
    state: KeptState | None = None


class KeptStates:
    """Kept states of one cache group, found by the hash of their last compressed block.

    Attributes:
        block_pool: vLLM's block pool.
        host: copies in host memory; None: evicted states are forgotten.
        stats: where states are counted.
        expected: states that waiting requests can begin with, by request id, in their order.
    """

    def __init__(self, block_pool: BlockPool, host: HostCopies | None = None) -> None:
        self.block_pool = block_pool
        self.host = host
        self.stats = StepStats()
        self.expected: dict[str, KeptState] = {}
        self._transfers: list[HostTransfer | BlockCopy] = []
        self._may_restore = True
        self._is_short = False  # whether the last new request found too little beside expected ones
        self._num_waits = 0  # steps that the first in the queue has waited for others' ends
        self._num_ahead = 0  # blocks that vLLM hands out before it comes to expected ones
        self._superseded: set[int] = set()
        self._by_hash: dict[Hashable, list[KeptState]] = {}
        self._by_block: dict[int, list[KeptState]] = {}
        self._numbers = itertools.count()
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._by_hash.values()))

    def __contains__(self, block: KVCacheBlock) -> bool:
        """Whether a block is part of a state that a request may begin with."""
        return block.block_id in self._by_block

    def next_number(self) -> int:
        """Returns the number of a state that is about to be kept."""
        return next(self._numbers)

    def find(self, request: Request, key: Hashable) -> Iterator[tuple[KeptState, int]]:
        """Yields states that a request may begin with, and how many tokens it shares with each.

        The request's prompt has all tokens that the state's event saw, and at least one more.
        Later states come first: a prepared context before an ordinary one.
        """
        for block_hash in reversed(request.block_hashes if self._by_hash else ()):
            for state in reversed(self._by_hash.get(block_hash, ())):
                if state.key == key and state.position < request.num_prompt_tokens:
                    num_common = state.num_common_tokens(request)
                    num_tokens = min(num_common, request.num_prompt_tokens - 1)
                    if num_tokens >= state.fewest_tokens:
                        yield state, num_tokens

    def keep(self, state: KeptState) -> None:
        """Adds a state whose blocks a request holds, and drops the states that it extends."""
        known = self._by_hash.setdefault(state.hashes[0], [])
        for other in [other for other in known if state.extends(other)]:
            self._forget(other, EXTENDED)
        self._by_hash.setdefault(state.hashes[0], []).append(state)
        for block in state.blocks:
            self._by_block.setdefault(block.block_id, []).append(state)

    def drop(self, number: int) -> None:
        """Has workers forget a state that was never added."""
        self._dropped.append(number)

    def release(
        self, blocks: Iterable[KVCacheBlock], superseded: bool = False
    ) -> list[KVCacheBlock]:
        """Ends a request's hold of blocks; those of states stay readable until they are reused.

        Args:
            blocks: blocks that the request holds.
            superseded: whether the request has compressed them, so that only a branch of its
                conversation would begin with them. Where states take more than half of the pool,
                or a request has waited for others', these blocks go first; else they wait their
                turn.

        Returns:
            The blocks that the caller frees.
        """
        held = list(blocks)
        kept = [block for block in held if block in self]
        self.block_pool.unpin_blocks(kept, self._evict)
        freed = [block for block in held if block not in self]
        is_crowded = 2 * len(self._by_block) > self.block_pool.num_gpu_blocks
        if superseded and (is_crowded or (self.expected and self._is_short)):
            freed += self._take_idle(kept)
        return freed

    def expect(self, request_id: str, state: KeptState) -> None:
        """Notes the state that a waiting request can begin with; vLLM reuses its blocks last."""
        self.expected[request_id] = state
        self._move_to_end(state)

    def leave_to_others(self, request_id: str, num_blocks: int, frees_soon: bool) -> int:
        """Has vLLM give a new request other blocks than those of expected states, if there are any.

        Without its state a conversation is read again, in several times as many blocks, which
        evict further states. So the request waits while blocks are about to be freed, and while
        others run for as many steps as reading one state again would take. Then it takes the blocks
        of the states that are expected last.

        Args:
            request_id: the new request.
            num_blocks: blocks that it needs.
            frees_soon: whether a prompt or an event is about to free blocks.

        Returns:
            Number of blocks that must be free beside those that it needs.
        """
        others = self._expected_by_others(request_id)
        num_expected = sum(len(state.blocks) for state in others)
        num_free = self.block_pool.get_num_free_blocks()
        shortage = num_blocks + num_expected - num_free
        self._is_short = shortage > 0
        if self._is_short and others:
            if frees_soon:
                return num_expected
            others_run = num_free < self.block_pool.num_gpu_blocks - 1  # all but the null block
            if others_run and self._num_waits < others[-1].num_tokens // TOKENS_PER_STEP:
                self._num_waits += 1
                return num_expected
        self._num_waits = 0
        while shortage > 0 and others:
            state = others.pop()
            self.expected = {each: s for each, s in self.expected.items() if s is not state}
            self.block_pool.free_blocks(self._take_idle(state.blocks))
            shortage -= len(state.blocks)
        self._num_ahead -= num_blocks
        if self._num_ahead < 0:
            for state in others:
                self._move_to_end(state)
            self._num_ahead = -shortage
        return 0

    def _expected_by_others(self, request_id: str) -> list[KeptState]:
        """Returns the expected states whose kept blocks no request holds, each once, in order."""
        for each, state in list(self.expected.items()):
            if self._current(state.number, state.hashes[0]) is not state:
                del self.expected[each]  # it has been forgotten
        own = self.expected.get(request_id)
        idle = (state for state in self.expected.values() if state.kept[0].ref_cnt == 0)
        return list(dict.fromkeys(state for state in idle if state is not own))

    def _move_to_end(self, state: KeptState) -> None:
        """Moves a state's blocks to the end of the free queue, behind what was freed since."""
        self.block_pool.unpin_blocks(self._take_idle(state.blocks), self._evict)

    def _take_idle(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        """Holds those of the blocks that no request holds.

        Freed again they go to the front of vLLM's free queue, unpinned to its end.
        """
        idle = [block for block in blocks if block.ref_cnt == 0]
        self.block_pool.touch(idle)
        return idle

    def begin(self, beginning: Beginning, is_context: bool) -> None:
        """Holds a state's kept blocks for a request; block managers hold the others."""
        self.block_pool.touch(beginning.state.kept)
        if is_context and not beginning.state.tail:
            self.stats.contexts_reused += 1
        else:
            self.stats.conversations_continued += 1
            self.stats.continued_tokens += beginning.num_tokens

    def supersede(self, state: KeptState) -> None:
        """Keeps a state out of host memory whose conversation has been compressed further.

        Only a branch of the conversation would begin with it. Contexts have no tail, and stay.
        """
        current = self._current(state.number, state.hashes[0])
        if self.host is None or current is None or not state.tail:
            return
        self._superseded.add(state.number)
        if current.is_spilled:
            self._forget(current, EXTENDED)
        else:
            self.host.drop(state.number)

    def restore(self, state: KeptState, spare: int) -> KeptState | None:
        """Brings a state back from host memory into blocks that no request holds.

        Args:
            state: a spilled state.
            spare: blocks that must be free beside its own.

        Returns:
            The state in its new blocks; None: there are not enough free ones.
        """
        count = len(state.blocks)
        has_room = count + spare <= self.block_pool.get_num_free_blocks()
        if self.host is None or not has_room or not self._may_restore:
            return None
        self.host.use(state.number)  # so that it goes last, if others need its host blocks
        blocks = self.block_pool.get_new_blocks(count)
        copy = self.host.use(state.number)
        if copy is None:
            self.block_pool.free_blocks(blocks)
            return None
        num_kept, ids = len(state.kept), tuple(block.block_id for block in blocks)
        restored = replace(state, kept=tuple(blocks[:num_kept]), tail=tuple(blocks[num_kept:]))
        back = HostTransfer(state.number, False, ids, copy.slots, num_kept, copy.block_ids)
        self._transfers.append(back)
        copy.block_ids = ids
        self._replace(state, restored)
        self.block_pool.unpin_blocks(blocks, self._evict)
        self.stats.states_restored += 1
        return restored

    def forget_spilled(self) -> None:
        """Forgets all states that only host memory holds."""
        for state in list(itertools.chain.from_iterable(self._by_hash.values())):
            if state.is_spilled:
                self._forget(state, EVICTED)

    def copy_block(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Has workers copy a state's partial block, which nobody has to hold until they do.

        Whoever is given the source later in this step writes to it after the copy.
        """
        self._transfers.append(BlockCopy(source.block_id, target.block_id))

    def suspend_restores(self) -> None:
        """Restores nothing in this step: blocks are free that workers still read in it."""
        self._may_restore = False

    def restored_blocks(self) -> list[int]:
        """Returns the blocks that copies from host memory write, of those decided so far."""
        back = [e for e in self._transfers if isinstance(e, HostTransfer) and not e.to_host]
        return [block for each in back for block in each.blocks]

    def take_transfers(self) -> list[HostTransfer | BlockCopy]:
        """Returns the copies that were decided since the last call."""
        transfers, self._transfers = self._transfers, []
        self._may_restore = True
        return transfers

    def take_dropped(self) -> list[int]:
        """Returns the numbers of states that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        """Checks that the index by block and the states agree.

        Raises:
            InvariantError: a block is indexed for other states than those that have it, or copies
                in host memory are not those of the states that need one.
        """
        expected: dict[int, set[int]] = {}
        states = list(itertools.chain.from_iterable(self._by_hash.values()))
        if self.host is not None:
            self.host.check_integrity({state.number for state in states})
            copied = {copy.number for copy in self.host}
            if lost := {each.number for each in states if each.is_spilled} - copied:
                raise InvariantError(f"states {lost}: expected copies in host memory, found none.")
        for state in states:
            for block in () if state.is_spilled else state.blocks:
                expected.setdefault(block.block_id, set()).add(state.number)
        indexed = {
            block_id: {state.number for state in states}
            for block_id, states in self._by_block.items()
        }
        if expected != indexed:
            raise InvariantError(
                f"blocks of kept states: expected {sorted(expected.items())}, found "
                f"{sorted(indexed.items())}."
            )

    def _evict(self, block: KVCacheBlock) -> None:
        """Spills or forgets the states of a block that vLLM hands out or takes out of its cache."""
        for state in list(self._by_block.get(block.block_id, ())):
            if not self._spill(state):
                self._forget(state, EVICTED)

    def _spill(self, state: KeptState) -> bool:
        """Leaves a state to host memory alone, if that has room for it and it may be needed."""
        if self.host is None or state.number in self._superseded:
            return False
        if self.host.use(state.number) is None:
            if not self._make_room(len(state.blocks)):
                return False
            block_ids = tuple(block.block_id for block in state.blocks)
            about = (state.number, state.hashes[0], state.num_tokens)
            copy = self.host.add(*about, block_ids)
            out = (state.number, True, copy.block_ids, copy.slots, len(state.kept))
            self._transfers.append(HostTransfer(*out))
        null = self.block_pool.null_block
        kept, tail = (null,) * len(state.kept), (null,) * len(state.tail)
        self._replace(state, replace(state, kept=kept, tail=tail))
        self.stats.states_spilled += 1
        return True

    def _make_room(self, num_slots: int) -> bool:
        """Frees host blocks, those of the least recently used copies first; False: too few."""
        assert self.host is not None
        if num_slots > self.host.num_slots:
            return False
        for copy in self.host if num_slots > self.host.num_free else ():
            current = self._current(copy.number, copy.found_by)
            if current is not None and current.is_spilled:
                self._forget(current, HOST_FULL)
            self.host.drop(copy.number)
            if num_slots <= self.host.num_free:
                break
        return True

    def _current(self, number: int, found_by: Hashable) -> KeptState | None:
        """Returns a state as it is now, in the pool or not; None: it has been forgotten."""
        known = self._by_hash.get(found_by, ())
        return next((each for each in known if each.number == number), None)

    def _replace(self, state: KeptState, moved: KeptState) -> None:
        """Puts a state with other blocks in the place of the same state."""
        known = self._by_hash[state.hashes[0]]
        known[known.index(state)] = moved
        for block in () if state.is_spilled else state.blocks:
            _remove(self._by_block, block.block_id, state)
        for block in () if moved.is_spilled else moved.blocks:
            self._by_block.setdefault(block.block_id, []).append(moved)

    def _forget(self, state: KeptState, reason: str) -> None:
        self.stats.count_forgotten(reason)
        self._dropped.append(state.number)
        self._superseded.discard(state.number)
        if self.host is not None:
            self.host.drop(state.number)
        _remove(self._by_hash, state.hashes[0], state)
        for block in () if state.is_spilled else state.blocks:
            _remove(self._by_block, block.block_id, state)


def has_only_tokens(request: Request) -> bool:
    """Whether token ids say all of a request; else only block hashes do, as with images."""
    return not request.mm_features and request.prompt_embeds is None


def _num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """Counts the leading elements that two sequences share."""
    pairs = enumerate(zip(first, second, strict=False))
    differing = (index for index, (one, other) in pairs if one != other)
    return next(differing, min(len(first), len(second)))


def _remove(states: dict[Key, list[KeptState]], key: Key, state: KeptState) -> None:
    """Takes a state out of the list under a key, and the list with its last state."""
    states[key].remove(state)
    if not states[key]:
        del states[key]
