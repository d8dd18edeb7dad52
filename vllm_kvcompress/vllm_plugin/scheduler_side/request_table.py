"""Records of all requests, which follow from settings and from what each one asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvcompress.config.auto import NO_POLICY
from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.scheduling.ledger import (
    SKIP_ONE_TOKEN,
    SKIP_SHORT_ANSWER,
    PreparationLedger,
    RequestLedger,
)
from vllm_kvcompress.scheduling.plan import (
    ReadPlan,
    RequestPlan,
    Spans,
    num_in_spans,
)
from vllm_kvcompress.scheduling.rule import CompressionRule, kept_below
from vllm_kvcompress.vllm_plugin.request_options import check_allowed, request_options
from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import StateUse
from vllm_kvcompress.vllm_plugin.scheduler_side.reasoning import ReasoningEnd
from vllm_kvcompress.vllm_plugin.scheduler_side.request_record import (
    GroupBlocks,
    RequestCompression,
)
from vllm_kvcompress.vllm_plugin.spec import DependentMambaSpec

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

    from vllm_kvcompress.vllm_plugin.spec import CompressedAttentionSpec

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


class RequestTable:
    """Records of all requests, from when they are queued until their end frees their blocks.

    The scheduler and all block managers share it. Cache groups of a request differ in the blocks
    that they hold but see the same positions, so one ledger serves all of them.

    Attributes:
        all_managers: block managers of all cache groups.
        managers: those of the compressed groups.
        others: those of all other groups.
        keeps_states: whether kept states can hold all that a request needs to go on.
        spec: cache spec of the compressed groups.
        records: records by request id.
        recurrent: by request id and group, block with the state of Mamba layers at the end of the
            kept state that the request began with, or of the context that its event leaves.
        selected: requests that this step compresses because of memory pressure.
        written: blocks that this step's events and copies write, beside those that requests list.
        awaiting_event: requests whose prompt's event waits for the first token, in their order.
        shadows: requests that score an answer with the full cache, and how many of their tokens may
            be read from the prefix cache, and put there.
        skipped: counts of events that a trigger called for and that were left out, by policy and
            reason.
        reasoning: finds where reasoning ends; None: nothing depends on it.
        has_connector: whether a KV connector stores and loads blocks.
        reads_for_others: whether another engine may generate from prompts that this one reads.
        whole_images: whether tokens of an image see each other, so that events come behind images.
    """

    def __init__(
        self,
        all_managers: Sequence[SingleTypeKVCacheManager],
        managers: Sequence[SingleTypeKVCacheManager],
    ) -> None:
        assert len({manager.block_size for manager in managers}) == 1
        self.all_managers = all_managers
        self.managers = managers
        self.others = [each for each in all_managers if each not in managers]
        self.keeps_states = len(managers) == 1 and all(map(_remembers_last_token, self.others))
        self.spec: CompressedAttentionSpec = managers[0].kv_cache_spec
        self.records: dict[str, RequestCompression] = {}
        self.recurrent: dict[tuple[str, int], KVCacheBlock] = {}
        self.selected: set[str] = set()
        self.written: list[int] = []
        self.awaiting_event: dict[str, None] = {}
        self.shadows: dict[str, int] = {}
        self.skipped: Counter[tuple[str, str]] = Counter()
        self.reasoning: ReasoningEnd | None = None
        self.has_connector = self.reads_for_others = False
        self.whole_images = False

    def __getitem__(self, request_id: str) -> RequestCompression:
        return self.records[request_id]

    def open(self, request: Request, begins_anew: bool = False, has_room: bool = False) -> None:
        """Opens the record of a request that is queued, or that lost everything by preemption.

        A request that prepares its context begins with no kept state, since it scores uncompressed
        tokens. With `begins_anew` neither does one that had read its prompt before it was
        preempted.

        Args:
            request: the request.
            begins_anew: whether it must not begin with a kept state.
            has_room: whether no request waits, and at least half of the pool is free.
        """
        if request.request_id in self.shadows or (self.reads_for_others and _is_sent(request)):
            self._open_whole(request)
            return
        options = _requested_options(request, self.spec.settings)
        num_tokens = compress_at = request.num_prompt_tokens
        length = min(options.context_tokens or num_tokens, num_tokens)
        settings = self.spec.settings.for_request(options, length)
        rule = self.spec.rule_of(settings)
        protected = _protected_spans(options, settings, rule, request)
        reuse = StateUse(begins_anew=begins_anew, how=self.conversations(settings))
        if options.context_tokens is not None:
            context_tokens = max(options.context_tokens, self._images_end(request))
            compress_at = min(context_tokens, num_tokens)
            num_blocks = min(compress_at, num_tokens - 1) // rule.allocated_size
            if settings.reuse_contexts and num_blocks and not must_read_prompt(request):
                # Full blocks and a token behind them, so that the next token is the same for all.
                compress_at = num_blocks * rule.allocated_size
                reuse.context_hash = request.block_hashes[num_blocks - 1]
        if reuse.context_hash is not None or reuse.how is not None:
            context_end = None if compress_at == num_tokens else compress_at
            reuse.key = (settings.policy, rule, context_end, protected)
        plan = RequestPlan()
        if reuse.context_hash is not None and _prepares(options, request):
            reuse.begins_anew = True
            plan.scored_tokens = compress_at
            ledger: RequestLedger = PreparationLedger.of(
                rule, settings.policy, compress_at, num_tokens
            )
        else:
            if compress_at == num_tokens:
                rule = self._leave_whole(request, settings, rule, has_room)
            ledger = RequestLedger(compress_at, rule, settings.policy, num_prompt_tokens=num_tokens)
        ledger.most_tokens = num_tokens + (request.max_tokens or 1) - 1  # the last one is not read
        ledger.protected = protected
        if self.reasoning is not None:
            ledger.end_reasoning(self.reasoning.find(request))
        read_rule = settings.request_read_rule(options.read)
        if read_rule is not None:
            plan.read = ReadPlan(read_rule, num_tokens, compress_at)
        groups = {manager.kv_cache_group_id: GroupBlocks() for manager in self.managers}
        record = RequestCompression(ledger, groups, read_rule, reuse)
        if plan:
            record.unsent.requests[request.request_id] = plan
        self.records[request.request_id] = record

    def note_reasoning(self, requests: Iterable[Request]) -> None:
        """Notes the requests whose last step has generated the end of their reasoning."""
        if self.reasoning is None:
            return
        for request in requests:
            ledger = self.records[request.request_id].ledger
            if ledger.reasoning_end is None:
                ledger.end_reasoning(self.reasoning.find_new(request))

    def _open_whole(self, request: Request) -> None:
        """Opens the record of a request that is neither compressed nor read in part.

        It is a shadow, or its prompt is read for another engine.
        """
        settings = self.spec.settings.model_copy(update={"policy": NO_POLICY})
        number = request.num_prompt_tokens
        ledger = RequestLedger(number, self.spec.rule_of(settings), num_prompt_tokens=number)
        ledger.most_tokens = number + (request.max_tokens or 1) - 1
        ledger.first_event_position = self.shadows.get(request.request_id)
        groups = {manager.kv_cache_group_id: GroupBlocks() for manager in self.managers}
        self.records[request.request_id] = RequestCompression(ledger, groups)

    def conversations(self, settings: Settings) -> str | None:
        """Returns how conversations of requests with some settings go on; None: they do not.

        Where nobody asked for it, they do not where an explicit option would be refused.
        """
        can_keep = self.keeps_states and self.managers[0].enable_caching and not self.whole_images
        if settings.continues_unasked and can_keep and self.spec.chunks is None:
            return "auto"
        return settings.conversations

    def _images_end(self, request: Request) -> int:
        """Returns the end of a request's last image, if its tokens see each other; else 0."""
        if not self.whole_images:
            return 0
        places = [each.mm_position for each in request.mm_features]
        return max((place.offset + place.length for place in places), default=0)

    def _leave_whole(
        self, request: Request, settings: Settings, rule: CompressionRule, has_room: bool
    ) -> CompressionRule:
        """Returns the rule without the prompt's event, where that gains nothing; counts the reason.

        A request of one token would not read what is kept. A short answer takes less time than the
        event, if nobody needs the blocks, and nobody asked that the next turn continues from it.
        """
        reason = None
        if request.max_tokens <= 1:
            reason = SKIP_ONE_TOKEN
        elif request.max_tokens < settings.min_answer_tokens and has_room:
            reason = None if settings.conversations else SKIP_SHORT_ANSWER
        is_due = rule.first_effective_position(request.num_prompt_tokens) is not None
        if reason is None or not (is_due and rule.at_prompt_end) or rule.chunk_tokens:
            return rule
        self.skipped[settings.policy, reason] += 1
        return replace(rule, at_prompt_end=False)

    def close(self, request_id: str, group: int) -> GroupBlocks:
        """Takes a request's blocks in one group, to be freed; the last group closes the record."""
        record = self.records[request_id]
        held = record.groups.pop(group)
        if not record.groups:
            del self.records[request_id]
            self.awaiting_event.pop(request_id, None)
        return held

    def recurrent_of(self, request_id: str) -> tuple[tuple[int, KVCacheBlock], ...]:
        """Returns group and block of what is held for a request in `recurrent`."""
        groups = [manager.kv_cache_group_id for manager in self.others]
        return tuple((group, self.recurrent[request_id, group]) for group in groups)

    def may_score(self, ledger: PreparationLedger, max_tokens: int) -> bool:
        """Whether a context may be scored now: all that are scored have `max_tokens` together."""
        ledgers = (record.ledger for record in self.records.values())
        scored = [e for e in ledgers if isinstance(e, PreparationLedger) and e.is_scored]
        if not ledger.is_scored:
            num_tokens = sum(each.context_tokens for each in scored) + ledger.context_tokens
            ledger.is_scored = num_tokens <= max_tokens
        return ledger.is_scored


def _remembers_last_token(manager: SingleTypeKVCacheManager) -> bool:
    """Whether a request's last block holds all that a group's layers need for the next token.

    Sliding windows need several blocks, and drafts have states of their own.
    """
    spec = manager.kv_cache_spec
    is_recurrent = isinstance(spec, DependentMambaSpec) and spec.mamba_cache_mode == "align"
    return is_recurrent and not spec.num_speculative_blocks


def must_read_prompt(request: Request) -> bool:
    """Whether a request reads all of its prompt, as its log-probabilities need."""
    return bool(request.sampling_params.skip_reading_prefix_cache)


def _is_sent(request: Request) -> bool:
    """Whether another engine generates its answer, and takes its blocks (disaggregated prefill)."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))


def _requested_options(request: Request, settings: Settings) -> RequestOptions:
    """Parses what a request asks for in its `vllm_xargs`.

    Wrong values were refused at admission. Where `RequestCheck` was left out they are ignored,
    since an error here would end the engine and with it every other request.
    """
    params = request.sampling_params
    try:
        options = request_options(None if params is None else params.extra_args)
        check_allowed(options, settings)
    except ValueError as error:
        logger.warning("request %s: %s Ignored.", request.request_id, error)
        return RequestOptions()
    return options


def _protected_spans(
    options: RequestOptions, settings: Settings, rule: CompressionRule, request: Request
) -> Spans:
    """Returns the prompt tokens that a request's events keep.

    Under a ceiling that has no room for them, which holds whatever else is asked for, it is none.
    """
    spans, num_tokens = options.protect, request.num_prompt_tokens
    if settings.keep_prompt:
        spans = ((0, num_tokens),)
    within = tuple((start, min(end, num_tokens)) for start, end in spans if start < num_tokens)
    why = "" if within == spans else f"expected tokens of the prompt, which has {num_tokens}"
    if within and rule.num_certain:
        within, why = (), "this model's attention needs the last tokens in their order"
    elif rule.ceiling_blocks is not None:
        number = num_in_spans(within, num_tokens)
        num_kept = kept_below(rule.ceiling_blocks) * rule.split
        if not rule.has_room(num_kept, number):
            within, why = (), f"the ceiling has no room for {number} tokens that are always kept"
    if why:
        message = "request %s: protected tokens %s: %s; only %s are."
        logger.warning(message, request.request_id, spans, why, within or "none")
    return within


def _prepares(options: RequestOptions, request: Request) -> bool:
    """Whether a request prepares its context, for which its prompt must go on behind it."""
    if not options.prepare:
        return False
    num_context, num_tokens = options.context_tokens or 0, request.num_prompt_tokens
    if num_context < num_tokens:
        return True
    logger.warning(
        "request %s: kv_prepare: expected a prompt of more than its %d tokens of context, found "
        "%d; repeat the context behind it. Ignored.",
        request.request_id,
        num_context,
        num_tokens,
    )
    return False
