"""State reuse: which kept state a request begins with, and what it leaves to later requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_kvcompress.config.auto import PROFILED_POLICY
from vllm_kvcompress.metrics.stats import UNFINISHED
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.ledger import RequestLedger
from vllm_kvcompress.scheduling.plan import StepPlan
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import (
    Beginning,
    KeptState,
    KeptStates,
    has_only_tokens,
)
from vllm_kvcompress.vllm_plugin.scheduler_side.request_record import (
    GroupBlocks,
    RequestCompression,
)
from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import must_read_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

    from vllm_kvcompress.vllm_plugin.scheduler_side.host_copies import HostCopies


SAFE_HISTORY = 1024  # compressed tokens of which measured heads forget next to nothing


class StateReuse:
    """Finds kept states for new requests, and keeps what others leave.

    Attributes:
        kept: the kept states.
    """

    def __init__(self, block_pool: BlockPool, host: HostCopies | None = None) -> None:
        self.kept = KeptStates(block_pool, host)
        self._saves: dict[str, int] = {}

    def expect(self, request: Request, record: RequestCompression) -> None:
        """Notes the state that a waiting request can begin with, unless it would be spilled."""
        if self.kept.host is not None:
            return
        beginning = self._best_beginning(request, record, num_cached=0)
        if beginning is not None:
            self.kept.expect(request.request_id, beginning.state)

    def find_beginning(
        self, request: Request, record: RequestCompression, num_cached: int = 0
    ) -> Beginning | None:
        """Returns the state with the most tokens that a request can begin with, in the pool."""
        best = self._best_beginning(request, record, num_cached)
        if best is None or not best.state.is_spilled:
            return best
        size = best.state.block_size
        num_new = ceil_div(record.ledger.num_prompt_tokens, size) - best.num_tokens // size
        restored = self.kept.restore(best.state, spare=num_new)
        return None if restored is None else replace(best, state=restored)

    def _best_beginning(
        self, request: Request, record: RequestCompression, num_cached: int
    ) -> Beginning | None:
        """Returns the same, where it lies in the pool or in host memory.

        A request that names a shared context begins with that. Others continue an earlier turn if
        this saves more than the `num_cached` tokens in the prefix cache do, in the way that the
        operator chose.
        """
        use, ledger = record.reuse, record.ledger
        if use.key is None or use.begins_anew or must_read_prompt(request):
            return None
        room = self._room_for_kept(ledger)
        best: Beginning | None = None
        for state, num_common in self.kept.find(request, use.key):
            usable = ledger.usable_tokens(state.position, state.resident_blocks, num_common)
            # Each other group also needs a block to go on in, and one while it moves to the next.
            num_blocks = len(state.kept) + 3 * len(state.recurrent)
            fits = num_blocks - state.first_block <= room and usable >= state.fewest_tokens
            if fits and usable > (best.num_tokens if best else 0):
                best = Beginning(state, usable)
        if best is None or use.context_hash is not None:
            return best
        if compresses_anew(use.how, ledger, best.state.position):
            # The queries that the event needs are computed anew even if they are cached.
            size = best.state.block_size
            longest = ledger.max_prefix_hit(ledger.num_prompt_tokens)
            enough = min(best.state.first_block, longest // size) * size
        else:
            enough = best.num_tokens
        return None if num_cached >= enough else best

    def _room_for_kept(self, ledger: RequestLedger) -> int:
        """Counts the blocks left for a state's kept blocks, with all of this prompt in the pool."""
        rule, num_tokens = ledger.rule, ledger.num_prompt_tokens
        room: int = self.kept.block_pool.num_gpu_blocks - 1 - rule.window_blocks
        room -= ceil_div(num_tokens, rule.allocated_size)
        return room - ceil_div(rule.target_blocks(ledger.compress_at, num_tokens), rule.split)

    def begin(self, record: RequestCompression, group: int) -> None:
        """Holds the state that an admitted request begins with."""
        use = record.reuse
        assert use.beginning is not None
        state = use.state = use.beginning.state
        self.kept.begin(use.beginning, is_context=use.context_hash is not None)
        record.groups[group].kept = list(state.kept)
        record.ledger.commit(state.position, state.resident_blocks)

    def number_of_context(self, record: RequestCompression, position: int) -> int | None:
        """Numbers the state that an event at the end of a shared context leaves; None: none."""
        if record.reuse.context_hash is None or position != record.ledger.compress_at:
            return None
        return self.kept.next_number()

    def end(
        self,
        request: Request,
        record: RequestCompression,
        manager: SingleTypeKVCacheManager,
        others: Sequence[SingleTypeKVCacheManager] = (),
    ) -> None:
        """Keeps what a request leaves at its end, before its blocks are freed.

        A request that prepared a context leaves what its event kept, in its last step.

        Args:
            request: the request.
            record: its record.
            manager: block manager of the compressed group.
            others: those of the groups of Mamba layers.
        """
        self.kept.expected.pop(request.request_id, None)
        if record.reuse.how is None and not record.prepares:
            return
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        num_tokens = min(computed, request.num_tokens)
        manager.remove_skipped_blocks(request.request_id, num_tokens)
        if record.prepares:
            return
        (held,) = record.groups.values()
        if held.event is not None:
            self.kept.stats.count_forgotten(UNFINISHED)
        elif held.kept:
            self._keep_end(request, record, manager, others)

    def _keep_end(
        self,
        request: Request,
        record: RequestCompression,
        manager: SingleTypeKVCacheManager,
        others: Sequence[SingleTypeKVCacheManager],
    ) -> None:
        """Keeps what a request's last event kept, and what it has computed behind that.

        States of Mamba layers include the token of a step that has not been processed. Workers run
        that step before anybody reads them, but it may not be known yet which token this is.
        """
        request_id, computed = request.request_id, request.num_computed_tokens
        size, first = manager.block_size, record.ledger.num_freed
        num_tokens = computed if others else computed - request.num_in_flight_tokens
        num_tokens = min(num_tokens, request.num_tokens)
        if not has_only_tokens(request):  # only full blocks have hashes
            num_tokens -= num_tokens % size
        if others and num_tokens != computed:
            self.kept.stats.count_forgotten(UNFINISHED)
            return
        number = self._saves[request_id] = self.kept.next_number()
        end = ceil_div(num_tokens, size)
        self.keep(
            record,
            number,
            hashes=tuple(request.block_hashes[first - 1 : num_tokens // size]),
            tail=tuple(manager.req_to_blocks[request_id][first:end]),
            tokens=tuple(request.all_token_ids[first * size : num_tokens]),
            recurrent=tuple(
                (each.kv_cache_group_id, each.req_to_blocks[request_id][end - 1]) for each in others
            ),
        )

    def keep(
        self,
        record: RequestCompression,
        number: int,
        hashes: tuple[BlockHash, ...],
        tail: tuple[KVCacheBlock, ...] = (),
        tokens: tuple[int, ...] = (),
        recurrent: tuple[tuple[int, KVCacheBlock], ...] = (),
    ) -> None:
        """Makes a state of what a request's last event kept, with the tail behind it."""
        (held,) = record.groups.values()
        ledger, use = record.ledger, record.reuse
        use.state = KeptState(
            number,
            use.key,
            ledger.rule.allocated_size,
            ledger.last_position,
            ledger.resident_blocks,
            tuple(held.kept),
            hashes,
            tail,
            tokens,
            recurrent,
        )
        self.kept.keep(use.state)

    def supersede(self, record: RequestCompression) -> None:
        """Marks the state that a request began with, once an event has compressed it further."""
        if record.reuse.state is not None:
            self.kept.supersede(record.reuse.state)

    def drop_unprocessed(self, held: GroupBlocks) -> None:
        """Drops the state that an event was to leave whose step has not been processed."""
        if held.event is not None and held.event.kept_as is not None:
            self.kept.drop(held.event.kept_as)
            held.event = replace(held.event, kept_as=None)

    def take_unsent(self) -> StepPlan:
        """Returns what workers have not been told of states."""
        saves, self._saves = self._saves, {}
        dropped, transfers = self.kept.take_dropped(), self.kept.take_transfers()
        return StepPlan(saves=saves, dropped=dropped, transfers=transfers)


def compresses_anew(how: str | None, ledger: RequestLedger, num_compressed: int) -> bool:
    """Whether a conversation whose history is cached uncompressed is compressed from that.

    With `auto` a policy that observes a window of last queries does so, since the new question then
    decides what is kept of old turns. With measured heads it does so only while the history is
    short: of a longer one next to nothing is forgotten (docs/results/conversations.md).

    Args:
        how: how the conversation goes on, as in `--kv-reuse-conversations`.
        ledger: of the new request.
        num_compressed: tokens of the history that have been compressed.
    """
    if how != "auto":
        return how == "anew"
    is_safe = ledger.policy == PROFILED_POLICY and num_compressed >= SAFE_HISTORY
    return ledger.rule.window_size > 0 and not is_safe
