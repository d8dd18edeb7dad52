"""One record per request, in a table that the scheduler and all block managers share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.metrics.stats import UNFINISHED
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.ledger import RequestLedger
from vllm_kvcompress.scheduling.plan import ReadPlan, StepPlan
from vllm_kvcompress.scheduling.preparation import PreparationLedger
from vllm_kvcompress.vllm_plugin.request_options import RequestOptions, request_options
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import (
    Beginning,
    KeptState,
    KeptStates,
    tokens_say_all,
)
from vllm_kvcompress.vllm_plugin.scheduler_side.request_records import (
    GroupBlocks,
    RequestCompression,
    block_ids,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

    from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


class RequestTable:
    """The records of all requests, from when they are queued until their end frees their blocks.

    Cache groups of a request differ in the blocks that they hold. They see the same positions, so
    one ledger serves all of them.

    Attributes:
        managers: the block managers of the compressed groups.
        spec: theirs, as far as it says when to compress.
        states: compressed ones, for later requests.
        skipped: events that a trigger called for but the rule left out, by policy and reason.

    Args:
        all_managers: of the compressed groups, and of others beside them.
        managers: of the compressed groups.
        block_pool: theirs.
    """

    def __init__(
        self,
        all_managers: Sequence[SingleTypeKVCacheManager],
        managers: Sequence[SingleTypeKVCacheManager],
        block_pool: BlockPool,
    ) -> None:
        assert len({manager.block_size for manager in managers}) == 1
        self.managers = managers
        self.spec: CompressedAttentionSpec = managers[0].kv_cache_spec
        self.states = KeptStates(block_pool)
        self._unsent = StepPlan()
        self.skipped: Counter[tuple[str, str]] = Counter()
        self._all_managers = all_managers
        self._pool = block_pool
        self._records: dict[str, RequestCompression] = {}

    def __getitem__(self, request_id: str) -> RequestCompression:
        return self._records[request_id]

    def open(self, request: Request, begins_anew: bool = False) -> None:
        """Begins the record of a request that is queued, or that lost everything by preemption.

        Beside layers of other kinds, one that names its context reads no prefix cache: a hit may
        end behind the context, and theirs cannot be shortened. One that asks for the prompt's
        log-probabilities has to read all of it, and begins with no kept state. So does one that
        prepares its context, since it scores what was not compressed.

        Args:
            request: vLLM's.
            begins_anew: it had read its prompt before it was preempted, and does so again.
        """
        options = self._options(request)
        settings = self.spec.settings.for_request(options.policy, options.budget)
        rule = self.spec.rule_of(settings)
        num_tokens = compress_at = request.num_prompt_tokens
        context_hash = None
        if options.context_tokens is not None:
            if len(self._all_managers) > len(self.managers):
                request.skip_reading_prefix_cache = True
            compress_at = min(options.context_tokens, num_tokens)
            num_blocks = min(compress_at, num_tokens - 1) // rule.block_size
            if settings.reuse_contexts and num_blocks and not _reads_all(request):
                # Whole blocks, and a token behind them: what begins there is the same for all.
                compress_at = num_blocks * rule.block_size
                context_hash = request.block_hashes[num_blocks - 1]
        ledger = RequestLedger(compress_at, rule, settings.policy, num_prompt_tokens=num_tokens)
        if prepares := context_hash is not None and _prepares(options, request):
            ledger = PreparationLedger.of(rule, settings.policy, compress_at, num_tokens)
        groups = {manager.kv_cache_group_id: GroupBlocks() for manager in self.managers}
        record = RequestCompression(
            ledger, groups, context_hash=context_hash, begins_anew=begins_anew or prepares
        )
        if prepares:
            record.unsent.preparations[request.request_id] = compress_at
        record.read_rule = settings.request_read_rule(options.read)
        if record.read_rule is not None:
            plan = ReadPlan(record.read_rule, num_tokens, compress_at)
            record.unsent.reads[request.request_id] = plan
        if context_hash is not None or settings.reuse_conversations is not None:
            record.use = (settings.policy, rule, None if compress_at == num_tokens else compress_at)
        self._records[request.request_id] = record

    def _options(self, request: Request) -> RequestOptions:
        """What a request asks for.

        Wrong values were refused at admission; where `RequestCheck` was left out they are passed
        over, since an error here would end the engine and with it every other request.
        """
        params = request.sampling_params
        try:
            options = request_options(None if params is None else params.extra_args)
            options.allowed_by(self.spec.settings)
        except ValueError as error:
            logger.warning("request %s: %s Passed over.", request.request_id, error)
            return RequestOptions()
        return options

    def num_shared(self, request_id: str, num_tokens: int) -> int:
        """Of a request's first tokens those whose blocks others may read.

        None that was computed after a compression event, and none that was generated with a part
        of what is held, since others may read all of it; where prompts are read in part, too, none
        of a chunk that would be longer in a longer prompt.
        """
        record, chunks = self[request_id], self.spec.chunks
        ledger = record.ledger
        if ledger.first_event_position is not None:
            num_tokens = min(num_tokens, ledger.first_event_position)
        if record.read_rule is not None:
            whole = record.read_rule.num_whole(ledger.num_prompt_tokens, self.spec.block_size)
            num_tokens = min(num_tokens, whole)
        if chunks is not None:
            num_tokens = chunks.num_shared(min(num_tokens, ledger.compress_at))
        return num_tokens

    def longest_hit(self, request_id: str, num_tokens: int) -> int:
        """Of a prefix-cache hit the tokens that a request may take.

        One that names its context takes no more than leaves the context's last queries to compute;
        an ordinary one with the same prompt may have left blocks behind them.
        """
        longest = self[request_id].ledger.max_prefix_hit
        return self.num_shared(
            request_id, num_tokens if longest is None else min(num_tokens, longest)
        )

    def find_beginning(self, request: Request, num_cached: int = 0) -> Beginning | None:
        """The state with the most tokens that a request can begin with; None: it reads on.

        Whoever names a context that is shared begins with it; others go on from an earlier turn
        if that saves more than the prefix cache does, and as the operator wants it.

        Args:
            request: one that holds nothing yet.
            num_cached: tokens that the prefix cache has of it.
        """
        record = self._records[request.request_id]
        if record.use is None or record.begins_anew or _reads_all(request):
            return None
        ledger, num_tokens = record.ledger, request.num_prompt_tokens
        room = self._pool.num_gpu_blocks - 1 - ledger.rule.window_blocks
        room -= ceil_div(num_tokens, ledger.rule.block_size)
        room -= ledger.rule.target_blocks(ledger.compress_at, num_tokens)
        found: Beginning | None = None
        for state, num_common in self.states.find(request, record.use):
            usable = ledger.usable_tokens(state.position, num_common)
            fits = len(state.kept) - state.first_block <= room
            if fits and usable > (found.num_tokens if found else 0):
                found = Beginning(state, usable)
        if found is None or record.context_hash is not None:
            return found
        if not self.compresses_anew(ledger.rule.window_size):
            return None if num_cached >= found.num_tokens else found
        # The queries that the event observes are computed anew, whatever the cache has of them.
        size, longest = found.state.block_size, self.spec.max_prefix_hit(num_tokens)
        enough = min(found.state.first_block, longest // size) * size
        return None if num_cached >= enough else found

    def compresses_anew(self, window_size: int) -> bool:
        """Whether a conversation whose history is cached uncompressed is compressed from that.

        `auto` does so where the policy looks at the last queries: then the question decides what
        is kept of old turns, which is what going on loses.

        Args:
            window_size: queries that the request's policy observes.
        """
        how = self.spec.settings.reuse_conversations
        return how == "anew" or (how == "auto" and window_size > 0)

    def end(self, request: Request) -> None:
        """Keeps what a request leaves that ends, before its blocks are freed.

        Of one that has prepared a context that is what its event leaves, in its last step.
        """
        record = self._records[request.request_id]
        prepares = isinstance(record.ledger, PreparationLedger)
        goes_on = self.spec.settings.reuse_conversations is not None
        if record.use is None or not (prepares or goes_on):
            return
        (manager,) = self.managers
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        num_tokens = min(computed, request.num_tokens)
        manager.remove_skipped_blocks(request.request_id, num_tokens)
        if prepares:
            return
        (part,) = record.groups.values()
        if part.event is not None:
            self.states.counts.forgotten[UNFINISHED] += 1
        elif part.kept:
            number = self.states.next_number()
            self._unsent.saves[request.request_id] = number
            self._keep_all(request, number, num_tokens)

    def _keep_all(self, request: Request, number: int, num_tokens: int) -> None:
        """Makes a request's first tokens a state: what its last event left, and what follows.

        Tokens that do not say all, as of images, are kept in whole blocks, which have hashes.
        """
        (manager,) = self.managers
        size, first = manager.block_size, self[request.request_id].ledger.compressed_blocks
        if not tokens_say_all(request):
            num_tokens -= num_tokens % size
        blocks = manager.req_to_blocks[request.request_id]
        self.keep(
            request.request_id,
            number,
            hashes=tuple(request.block_hashes[first - 1 : num_tokens // size]),
            tail=tuple(blocks[first : ceil_div(num_tokens, size)]),
            tokens=tuple(request.all_token_ids[first * size : num_tokens]),
        )

    def keep(
        self, request_id: str, number: int, hashes: tuple[BlockHash, ...], **tail: Any
    ) -> None:
        """Makes what a request's last event left a state, with some of what follows, or nothing."""
        record = self._records[request_id]
        (part,) = record.groups.values()
        size, position = record.ledger.rule.block_size, record.ledger.last_position
        kept = tuple(part.kept)
        record.state = KeptState(number, record.use, size, position, kept, hashes=hashes, **tail)
        self.states.keep(record.state)

    def drop_state(self, part: GroupBlocks) -> None:
        """What an event leaves that has not been processed is for no later request."""
        if part.event is not None and part.event.kept_as is not None:
            self.states.drop(part.event.kept_as)
            part.event = replace(part.event, kept_as=None)

    def prepares(self, request_id: str) -> bool:
        """Whether a request that has not ended prepares a context for others."""
        record = self._records.get(request_id)
        return record is not None and isinstance(record.ledger, PreparationLedger)

    def may_score(self, ledger: PreparationLedger, most_tokens: int) -> bool:
        """Whether a context may be scored beside others, of so many tokens together."""
        others = (record.ledger for record in self._records.values())
        scored = [e for e in others if isinstance(e, PreparationLedger) and e.is_scored]
        if not ledger.is_scored:
            tokens = sum(each.context_tokens for each in scored) + ledger.context_tokens
            ledger.is_scored = tokens <= most_tokens
        return ledger.is_scored

    def keep_nothing(self, request_ids: Iterable[str]) -> None:
        """Requests whose event failed leave nothing to others."""
        for request_id in request_ids:
            if request_id in self._records:
                self._records[request_id].use = None

    def pop_blocks(self, request_id: str, group: int) -> list[KVCacheBlock]:
        """What a request holds in a group, to be freed; the last group closes the record."""
        record = self._records[request_id]
        part = record.groups.pop(group)
        self.drop_state(part)
        if not record.groups:
            del self._records[request_id]
        return part.blocks

    def take_unsent(self) -> StepPlan:
        """What the workers have not been told of states."""
        unsent, self._unsent = self._unsent, StepPlan()
        unsent.dropped = self.states.take_dropped()
        return unsent

    def check_integrity(self, request_ids: Iterable[str]) -> None:
        """Compares the records with vLLM's bookkeeping, between two steps.

        Args:
            request_ids: of all requests that have not ended.

        Raises:
            InvariantError: a record is missing or left over, a block has other owners than its
                count of references says, or a request holds other blocks than its ledger says.
        """
        _expect("requests with a record", set(request_ids), set(self._records))
        parts = [part for record in self._records.values() for part in record.groups.values()]
        owned = Counter(block for part in parts for block in block_ids(part.blocks))
        for manager in self._all_managers:
            gone = set(manager.req_to_blocks) - set(self._records)
            _expect("requests without a record that hold blocks", set(), gone)
            for blocks in manager.req_to_blocks.values():
                owned.update(block.block_id for block in blocks if not block.is_null)
        in_use = [block for block in self._pool.blocks if block.ref_cnt and not block.is_null]
        _expect("owners by block", {b.block_id: b.ref_cnt for b in in_use}, dict(owned))
        num_free = self._pool.num_gpu_blocks - 1 - len(owned)  # the null block is nobody's
        _expect("free blocks", num_free, self._pool.get_num_free_blocks())
        for request_id, manager in itertools.product(self._records, self.managers):
            self._check_blocks(request_id, manager)
        self.states.check_integrity()

    def _check_blocks(self, request_id: str, manager: SingleTypeKVCacheManager) -> None:
        """Raises where a request holds other blocks in a group than its ledger and event say."""
        record = self._records[request_id]
        part, ledger = record.groups[manager.kv_cache_group_id], record.ledger
        blocks, event = manager.req_to_blocks.get(request_id) or [], part.event
        num_null = ledger.compressed_blocks if event is None else event.first_block
        shared = () if record.state is None else record.state.blocks
        unexpected = [
            block.block_id
            for block in part.blocks
            if block.block_hash is not None or (block.ref_cnt != 1 and block not in shared)
        ]
        expected = {
            "null": [number < num_null for number in range(len(blocks))],
            "kept": ledger.resident_blocks if event is None else event.resident_blocks,
            "fresh": () if event is None else event.fresh_block_ids,
            "window": ledger.rule.window_blocks if blocks else 0,
            "shared": [],
        }
        found = {
            "null": [block.is_null for block in blocks],
            "kept": len(part.kept),
            "fresh": block_ids(part.fresh),
            "window": len(part.window),
            "shared": unexpected,
        }
        _expect(f"blocks of {request_id} in group {manager.kv_cache_group_id}", expected, found)


def _reads_all(request: Request) -> bool:
    """Whether a request is to read all of its prompt, whatever there is of it."""
    return bool(request.sampling_params.skip_reading_prefix_cache)


def _prepares(options: RequestOptions, request: Request) -> bool:
    """Whether a request prepares its context, which takes something behind that."""
    if not options.prepares:
        return False
    context, whole = options.context_tokens or 0, request.num_prompt_tokens
    if context < whole:
        return True
    logger.warning(
        "request %s: kv_prepare: expected a prompt of more than its %d tokens of context, found "
        "%d; repeat the context behind it. Passed over.",
        request.request_id,
        context,
        whole,
    )
    return False


def _expect(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise InvariantError(f"{what}: expected {expected}, found {found}.")
