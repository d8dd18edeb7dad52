"""Compressed states that outlive their request, so that later ones need not read them again.

What an event kept, and what was computed behind it, says the same to every request that begins
with the same tokens. Its blocks stay readable when nobody uses them: they go to the end of vLLM's
free queue, as cached prefixes do, and a state is forgotten once one of them is handed out.

    tokens    0 ........... first_block .. position ............. end
    blocks    [ kept: what the last event left ][ tail: ordinary blocks, the last one partial ]

A state that was kept right behind an event, for others with the same context, has no tail.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.metrics.stats import EVICTED, EXTENDED

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class KeptState:
    """What is left of a request.

    Attributes:
        number: by which workers know its page tables.
        use: which requests may begin with it: the policy, the rule and what they name as context.
        block_size: tokens of a block.
        position: tokens that had been computed at its last event, which saw all of them.
        kept: the blocks that hold what the event left of whole blocks.
        hashes: of the last compressed block, and of the tail's full ones.
        tail: ordinary blocks behind these.
        tokens: in the tail.
    """

    number: int
    use: Hashable
    block_size: int
    position: int
    kept: tuple[KVCacheBlock, ...]
    hashes: tuple[BlockHash, ...]
    tail: tuple[KVCacheBlock, ...] = ()
    tokens: tuple[int, ...] = ()

    @property
    def first_block(self) -> int:
        """Logical blocks that were compressed."""
        return self.position // self.block_size

    @property
    def blocks(self) -> tuple[KVCacheBlock, ...]:
        """All of them."""
        return self.kept + self.tail

    def num_common_tokens(self, request: Request) -> int:
        """Tokens that a request with the same compressed blocks has in common with it.

        Whole blocks by their hashes, which stand for images and adapters too; what is behind them
        token by token, where tokens say all.
        """
        theirs = request.block_hashes[self.first_block - 1 :]
        num_same = _num_equal(self.hashes, theirs)
        end = (self.first_block - 1 + num_same) * self.block_size
        if not tokens_say_all(request):
            return end
        rest = self.tokens[(num_same - 1) * self.block_size :]
        return end + _num_equal(rest, request.all_token_ids[end : end + self.block_size])

    def extends(self, other: KeptState) -> bool:
        """Whether it serves whoever the other one serves: the same event, and more behind it.

        One without a tail is left alone: it lasts longer than what came behind it.
        """
        same_event = self.use == other.use and self.kept == other.kept
        is_longer = self.tokens[: len(other.tokens)] == other.tokens
        return same_event and is_longer and bool(other.tail)


@dataclass(frozen=True)
class Beginning:
    """Tokens that a request need not read, since it begins with a state.

    Attributes:
        state: an earlier request's.
        num_tokens: of it, at least those that its event saw.
    """

    state: KeptState
    num_tokens: int

    @property
    def num_whole_blocks(self) -> int:
        """Of the state's tail, that are only read."""
        return self.num_tokens // self.state.block_size - self.state.first_block

    @property
    def blocks(self) -> tuple[KVCacheBlock, ...]:
        """That the request shares with others."""
        return self.state.kept + self.state.tail[: self.num_whole_blocks]

    @property
    def copied_block(self) -> KVCacheBlock | None:
        """The one that the request goes on writing to, in a copy; None: it begins a new one."""
        if self.num_tokens % self.state.block_size == 0:
            return None
        return self.state.tail[self.num_whole_blocks]


@dataclass
class StateCounts:
    """What became of states.

    Attributes:
        contexts_reused: requests that began with a context.
        conversations_continued: requests that began with what another one left at its end.
        continued_tokens: that these neither read nor compressed again.
        forgotten: states, by reason; and requests whose event was not finished at their end.
    """

    contexts_reused: int = 0
    conversations_continued: int = 0
    continued_tokens: int = 0
    forgotten: Counter[str] = field(default_factory=Counter)


class KeptStates:
    """The states of one cache group.

    Attributes:
        counts: of what became of them, since they were last taken.

    Args:
        block_pool: vLLM's.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        self.counts = StateCounts()
        self._pool = block_pool
        self._by_hash: dict[Hashable, list[KeptState]] = {}
        self._by_block: dict[int, list[KeptState]] = {}
        self._numbers = itertools.count()
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._by_hash.values()))

    def next_number(self) -> int:
        """For a state that is about to be kept."""
        return next(self._numbers)

    def find(self, request: Request, use: Hashable) -> Iterator[tuple[KeptState, int]]:
        """States that a request may begin with, and how many tokens it has in common with each.

        All that their events have seen is in the request's prompt, and at least a token is not. The
        latest comes first: a context that was prepared after one that was not.
        """
        for block_hash in reversed(request.block_hashes if self._by_hash else ()):
            for state in reversed(self._by_hash.get(block_hash, ())):
                if state.use == use and state.position < request.num_prompt_tokens:
                    num_tokens = min(
                        state.num_common_tokens(request), request.num_prompt_tokens - 1
                    )
                    if num_tokens >= state.position:
                        yield state, num_tokens

    def keep(self, state: KeptState) -> None:
        """Makes a state known, whose blocks a request holds."""
        known = self._by_hash.setdefault(state.hashes[0], [])
        for other in [other for other in known if state.extends(other)]:
            self._forget_state(other, EXTENDED)
        self._by_hash.setdefault(state.hashes[0], []).append(state)
        for block in state.blocks:
            self._by_block.setdefault(block.block_id, []).append(state)

    def drop(self, number: int) -> None:
        """Workers may forget a state that never was known."""
        self._dropped.append(number)

    def release(
        self, blocks: Iterable[KVCacheBlock], superseded: bool = False
    ) -> list[KVCacheBlock]:
        """Ends a request's hold of blocks; those of states stay readable until they are reused.

        Args:
            blocks: that the request holds.
            superseded: the request has compressed them, so that only a branch of its conversation
                would begin with them. Where states take more than half of the pool these go
                first; else they wait their turn.

        Returns:
            Those to be freed.
        """
        held = list(blocks)
        known = [block for block in held if block.block_id in self._by_block]
        self._pool.unpin_blocks(known, self._forget)
        freed = [block for block in held if block.block_id not in self._by_block]
        if superseded and 2 * len(self._by_block) > self._pool.num_gpu_blocks:
            idle = [block for block in known if block.ref_cnt == 0]
            self._pool.touch(idle)  # freed once more, they go to the front of the queue
            freed += idle
        return freed

    def knows(self, block: KVCacheBlock) -> bool:
        """Whether a block is part of a state that a request may begin with."""
        return block.block_id in self._by_block

    def begin(self, beginning: Beginning, is_context: bool) -> None:
        """Holds what a request begins with, but for the tail, which vLLM holds."""
        self._pool.touch(beginning.state.kept)
        if is_context and not beginning.state.tail:
            self.counts.contexts_reused += 1
        else:
            self.counts.conversations_continued += 1
            self.counts.continued_tokens += beginning.num_tokens

    def take_counts(self) -> StateCounts:
        """What became of states since this was last asked."""
        counts, self.counts = self.counts, StateCounts()
        return counts

    def take_dropped(self) -> list[int]:
        """Numbers of states that were forgotten since this was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        """Checks that every block of a known state, and no other, stands for that state.

        Raises:
            InvariantError: one does not.
        """
        expected: dict[int, set[int]] = {}
        for state in itertools.chain.from_iterable(self._by_hash.values()):
            for block in state.blocks:
                expected.setdefault(block.block_id, set()).add(state.number)
        found = {
            block_id: {state.number for state in states}
            for block_id, states in self._by_block.items()
        }
        if expected != found:
            raise InvariantError(
                f"blocks of kept states: expected {sorted(expected.items())}, found "
                f"{sorted(found.items())}."
            )

    def _forget(self, block: KVCacheBlock) -> None:
        """vLLM hands a block out, or empties its cache."""
        for state in list(self._by_block.get(block.block_id, ())):
            self._forget_state(state, EVICTED)

    def _forget_state(self, state: KeptState, reason: str) -> None:
        self.counts.forgotten[reason] += 1
        self._dropped.append(state.number)
        _remove(self._by_hash, state.hashes[0], state)
        for block in state.blocks:
            _remove(self._by_block, block.block_id, state)


def tokens_say_all(request: Request) -> bool:
    """Whether a request is nothing but tokens; else only hashes of whole blocks say what it is."""
    return not request.mm_features and request.prompt_embeds is None


def _num_equal(ours: Sequence[object], theirs: Sequence[object]) -> int:
    """How many they have in common before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    differing = (number for number, (one, other) in pairs if one != other)
    return next(differing, min(len(ours), len(theirs)))


def _remove(states: dict[Key, list[KeptState]], key: Key, state: KeptState) -> None:
    """Takes a state out of the list under a key, and the list with the last one."""
    states[key].remove(state)
    if not states[key]:
        del states[key]
