"""Schedulers that plan compression events and report what they did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.metrics.stats import DurationRecord, EventRecord, SkippedRecord, StepStats
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.ledger import SKIP_ERROR, RequestLedger
from vllm_kvcompress.scheduling.plan import EventPlan, StepPlan
from vllm_kvcompress.scheduling.preparation import PreparationLedger
from vllm_kvcompress.scheduling.pressure import STEPS_UNTIL_FREED, Pool, choose
from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.vllm_plugin.debug_mode import switched_on
from vllm_kvcompress.vllm_plugin.scheduler_side.block_manager import CompressedBlockManager
from vllm_kvcompress.vllm_plugin.scheduler_side.block_owners import SchedulerChecks
from vllm_kvcompress.vllm_plugin.scheduler_side.dependent_blocks import LimitedCaching
from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable
from vllm_kvcompress.vllm_plugin.startup import compat, versions
from vllm_kvcompress.vllm_plugin.startup.needed_classes import CompressingScheduler, check_classes
from vllm_kvcompress.vllm_plugin.startup.refusals import engine_settings

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


_WINDOW = "; the last %d tokens before an event are read again, since it looks at their queries"
_BY_ITSELF = {
    True: " = anew while the whole history is cached, since the policy looks at the last queries",
    False: " = reuse, since the policy does not look at queries",
}


class CompressionMixin(CompressingScheduler):
    """Adds to a scheduler: chunk ends at event positions, plans for the workers, statistics.

    Without compressed layers (no policy, or a budget of 1.0) every method only calls `super()`.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        check_classes(self.vllm_config, engine_settings(self.vllm_config))
        managers = self.kv_cache_manager.coordinator.single_type_managers
        compressed = [each for each in managers if isinstance(each, CompressedBlockManager)]
        self.table: RequestTable | None = None
        self.checks: SchedulerChecks | None = None
        self._step_stats = StepStats()
        if not compressed:
            return
        self.table = RequestTable(managers, compressed, self.kv_cache_manager.block_pool)
        self.spec = self.table.spec
        self._check_reuse()
        if switched_on():
            self.checks = SchedulerChecks(self.table, self.kv_cache_manager.block_pool)
        compat.enable_chunk_ends(self)
        for manager in managers:
            self._share_table(manager)
        self._announce()

    def _share_table(self, manager: SingleTypeKVCacheManager) -> None:
        """Lets a block manager know the requests' records, such as which blocks it may cache."""
        if isinstance(manager, LimitedCaching):
            manager.table = self.table
        elif manager.enable_caching:
            raise UnsupportedError(
                f"this model has {type(manager.kv_cache_spec).__name__} layers beside its "
                "full-attention layers, whose blocks would be shared between requests although "
                "they depend on what is compressed; add --no-enable-prefix-caching."
            )

    def _check_reuse(self) -> None:
        settings = self.spec.settings
        managers = self.kv_cache_manager.coordinator.single_type_managers
        for option, given in (
            ("--kv-reuse-contexts", settings.reuse_contexts),
            ("--kv-reuse-conversations", settings.reuse_conversations),
            ("prefill in --kv-read, with prefix caching,", self._shares_chunks()),
        ):
            if given and len(managers) > 1:
                raise UnsupportedError(
                    f"{option} needs a model of full-attention layers only: the others of this one "
                    "would have to read the tokens again; leave it out."
                )

    def _shares_chunks(self) -> bool:
        return self.spec.chunks is not None and self.kv_cache_manager.enable_caching

    def _announce(self) -> None:
        """One line at start-up: what is compressed, and what that means for capacity."""
        settings, rule, length = self.spec.settings, self.spec.rule, self.max_model_len
        pool_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        if settings.read is not None:
            logger.info("Decode steps read a part of what is held (--kv-read %s).", settings.read)
        if not settings.may_compress:
            versions.warn_of_version(logger)
            return
        logger.info(
            "KV cache compressed with %s, budget %s, trigger %s: a prompt of %d tokens holds %d of "
            "its %d blocks, and up to %d while it is read; %d blocks serve %.2f such requests at a "
            "time (uncompressed: %.2f).",
            settings.policy,
            settings.budget_text,
            settings.trigger,
            length,
            rule.held_blocks(length),
            ceil_div(length, rule.block_size),
            rule.admission_blocks(length),
            pool_blocks,
            rule.concurrency(length, pool_blocks),
            pool_blocks / ceil_div(length, rule.block_size),
        )
        if settings.reuse_conversations is not None:
            anew = self.table.compresses_anew(rule.window_size)
            by_itself = _BY_ITSELF[anew] if settings.reuse_conversations == "auto" else ""
            logger.info(
                "What requests leave is kept for the next turn of their conversation, as long as "
                "there is no other use for its blocks (--kv-reuse-conversations %s%s%s).",
                settings.reuse_conversations,
                by_itself,
                _WINDOW % rule.window_size if rule.window_size else "",
            )
        versions.warn_of_version(logger)

    def schedule(self, *args, **kwargs) -> SchedulerOutput:
        """vLLM's schedule, with the step's plan attached when there is anything to do."""
        if self.table is None:
            return super().schedule(*args, **kwargs)
        if self.spec.pressure_mark is not None and self.running:
            self._select_under_pressure(self.table, self.spec.pressure_mark)
        output = super().schedule(*args, **kwargs)
        plan = self._step_plan(self.table, output)
        if self.checks is not None:
            self.checks.after_step(self.requests)
            plan.tags = self.checks.tags(output, plan, self.requests)
        if plan:
            compat.attach_plan(output, plan)
        return output

    def _select_under_pressure(self, table: RequestTable, mark: float) -> None:
        """Under the pressure trigger: selects the requests that this step compresses for room."""
        block_pool = self.kv_cache_manager.block_pool
        ahead = {r.request_id: r.num_computed_tokens + STEPS_UNTIL_FREED for r in self.running}
        pool = Pool(
            size=block_pool.num_gpu_blocks - 1,
            free=block_pool.get_num_free_blocks(),
            pending_frees=sum(each.num_pending_frees() for each in table.managers),
            reserved=sum(each.reserved_blocks() for each in table.managers),
            growth=len(self.running) * len(table.managers),
            needed_until_freed=sum(each.reserved_blocks(ahead=ahead) for each in table.managers),
            wanted=compat.blocks_to_admit(self),
        )
        candidates = []
        for request in self.running:
            record = table[request.request_id]
            record.selected = False
            if not request.is_prefill_chunk:
                position = request.num_computed_tokens + 1
                candidates.append(record.candidate(request.request_id, position))
        worth = [candidate for candidate in candidates if candidate and candidate.is_worth_it]
        gain = sum(candidate.gain for candidate in worth) * len(table.managers)
        self._step_stats.reclaimable_blocks = gain
        if not worth:
            return
        shortage = pool.shortage(mark, min(candidate.written for candidate in worth))
        for candidate in choose(worth, shortage, pool.room // len(table.managers)):
            table[candidate.request_id].selected = True

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Ends a prefill chunk at the next event position, or where one that chooses ends.

        Chunks that would run past it are those of resumed requests, whose generated tokens
        are computed anew together with the prompt, and those of the chunk trigger. Drafts end
        before it: they may be taken back, and an event cannot.
        """
        if self.table is None:
            return super()._mamba_block_aligned_split(
                request,
                num_new_tokens,
                num_new_local_computed_tokens,
                num_external_computed_tokens,
            )
        start = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        ledger, chunks = self.table[request.request_id].ledger, self.spec.chunks
        if isinstance(ledger, PreparationLedger):
            if start >= ledger.scored_from and not self.table.may_score(ledger, self.max_model_len):
                return 0  # until another one has ended
            if chunks is None:
                num_new_tokens = ledger.chunk(start, num_new_tokens)
        if chunks is not None and start < ledger.compress_at:
            return chunks.next_step(start, ledger.compress_at, num_new_tokens)
        position = ledger.rule.next_position(ledger.compress_at, start)
        if position is None:
            return num_new_tokens
        room = position - start
        if position > request.num_tokens:  # what leads there are drafts, but for the first
            room = max(1, room - 1)
        return min(num_new_tokens, room)

    def _get_local_prefix_cache_hit(self, request: Request, *args, **kwargs):
        """vLLM's, or a kept state: null blocks for what is compressed, since it is elsewhere.

        Of vLLM's no more is taken than `RequestTable.longest_hit` says. Since 0.33 vLLM also says
        how long a hit may be, where something else than the cache limits it: then there is no
        state, whose compressed part can only be taken whole.
        """
        hit = super()._get_local_prefix_cache_hit(request, *args, **kwargs)
        if self.table is None:
            return hit
        record, size = self.table[request.request_id], self.spec.block_size
        longest = self.table.longest_hit(request.request_id, hit[1])
        if longest < hit[1]:
            limit = longest // size
            kept = tuple(group[:limit] for group in hit[0].blocks)
            blocks = self.kv_cache_manager.create_kv_cache_blocks(kept)
            hit = (blocks, limit * size, *hit[2:])
        limited = any(value is not None for value in (*args, *kwargs.values()))
        record.beginning = None if limited else self.table.find_beginning(request, hit[1])
        if record.beginning is None:
            return hit
        state, num_whole = record.beginning.state, record.beginning.num_whole_blocks
        compressed = [self.kv_cache_manager.block_pool.null_block] * state.first_block
        blocks = self.kv_cache_manager.create_kv_cache_blocks(
            ([*compressed, *state.tail[:num_whole]],)
        )
        return blocks, record.beginning.num_tokens, 0, False

    def add_request(self, request: Request) -> None:
        """Queues a request; one that is known already only brings more input."""
        if self.table is not None and request.request_id not in self.requests:
            self.table.open(request)
        super().add_request(request)

    def _preempt_request(self, request: Request, *args, **kwargs) -> None:
        """A preempted request drops everything, and computes every event's queries anew.

        It reads no prefix cache if an event was before, or one comes while it generates: hits may
        reach as far as it had come.
        """
        if self.table is None:
            return super()._preempt_request(request, *args, **kwargs)
        record, end = self.table[request.request_id], request.num_computed_tokens
        ledger, began_with = record.ledger, record.began_with
        is_ahead = ledger.rule.next_position(ledger.compress_at, end) is not None
        if ledger.first_event_position is not None or (end > ledger.compress_at and is_ahead):
            request.skip_reading_prefix_cache = True
        super()._preempt_request(request, *args, **kwargs)
        # Its record was closed with its blocks.
        self.table.open(request, begins_anew=began_with is None and record.context_hash is None)

    def _free_request(self, request: Request, *args, **kwargs):
        """vLLM's, at the end of a request, whose state may be kept."""
        if self.table is not None:
            self.table.end(request)
        return super()._free_request(request, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Records the events that the workers ran; requests whose event failed end with an error.

        One that ends with this step's token anyway does not, since an event is for later ones,
        unless it was sent to prepare a context.
        """
        plan = compat.attached_plan(scheduler_output)
        report = compat.attached_report(model_runner_output)
        if self.table is not None and plan is not None:
            for each in self._of_requests(self.table, plan.events):
                if each.request_id in report.failed:
                    self.table.skipped[each.policy, SKIP_ERROR] += 1
                else:
                    self._step_stats.events.append(self._record(self.table, each))
        for policy, seconds in report.seconds:
            self._step_stats.durations.append(DurationRecord(policy, seconds))
        errors: list[tuple[int, EngineCoreOutput]] = []
        if self.table is not None and report.failed:
            self.table.keep_nothing(report.failed)
            errors += self._end_with_errors(filter(self.table.prepares, report.failed))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if report.failed:
            errors += self._end_with_errors(report.failed)
        for client_index, output in errors:
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
        if self.checks is not None:
            self.checks.after_step(self.requests)
        return outputs

    def _end_with_errors(self, request_ids: Iterable[str]) -> list[tuple[int, EngineCoreOutput]]:
        """Ends requests as vLLM does failed ones, HTTP 500; whom to tell, and what."""
        return [
            (
                request.client_index,
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                ),
            )
            for request in self.finish_requests(list(request_ids), RequestStatus.FINISHED_ERROR)
        ]

    def make_stats(self, *args, **kwargs) -> SchedulerStats | None:
        """vLLM's statistics, with ours in the field that reaches the API process."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None or self.table is None:
            return stats
        step = self._step_stats
        self._step_stats = StepStats()
        step.skipped = [SkippedRecord(*names, n) for names, n in self.table.skipped.items()]
        self.table.skipped.clear()
        counts = self.table.states.take_counts()
        step.contexts_reused = counts.contexts_reused
        step.conversations_continued = counts.conversations_continued
        step.continued_tokens = counts.continued_tokens
        step.forgotten = dict(counts.forgotten)
        if not self.running:
            step.reclaimable_blocks = 0  # the step had been planned before the last one ended
        for request in self.running:
            ledger = self.table[request.request_id].ledger
            step.logical_tokens += request.num_computed_tokens
            step.resident_tokens += ledger.resident_tokens(request.num_computed_tokens)
        compat.attach_stats(stats, step.to_dict())
        return stats

    def _step_plan(self, table: RequestTable, output: SchedulerOutput) -> StepPlan:
        """The events and observations of the requests that are in this step."""
        plan = table.take_unsent()
        observes = any(rule.window_size for rule in self.spec.rules)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            record = table[request_id]
            end = self.requests[request_id].num_computed_tokens
            if record.unsent:
                plan.add(record.unsent)
                record.unsent = StepPlan()
            if record.read_rule is not None and num_tokens == 1:
                self._count_pages(record.read_rule, record.ledger, end)
            if observes:
                seen = record.ledger.observation(end - num_tokens, end)
                if seen is not None:
                    plan.observations[request_id] = seen
        return plan

    def _count_pages(self, rule: ReadRule, ledger: RequestLedger, num_tokens: int) -> None:
        """Of a step that decodes the last of a request's `num_tokens`."""
        if num_tokens <= ledger.num_prompt_tokens:
            return
        resident, block_size = ledger.resident_tokens(num_tokens), self.spec.block_size
        self._step_stats.held_pages += ceil_div(resident, block_size)
        self._step_stats.read_pages += rule.read_pages(resident, block_size)

    def _of_requests(self, table: RequestTable, events: list[EventPlan]) -> list[EventPlan]:
        """One event per request: those of the first group, which stand for all."""
        return [plan for plan in events if plan.group == table.managers[0].kv_cache_group_id]

    def _record(self, table: RequestTable, plan: EventPlan) -> EventRecord:
        """Tokens of a group, blocks of all, each of which has as many."""
        block_size, num_groups = self.spec.block_size, len(table.managers)
        return EventRecord(
            policy=plan.policy,
            trigger=plan.trigger,
            source_tokens=plan.num_source_blocks * block_size,
            resident_tokens=len(plan.fresh_block_ids) * block_size,
            blocks_freed=plan.num_source_blocks * num_groups,
            blocks_written=len(plan.fresh_block_ids) * num_groups,
        )


class CompressionScheduler(CompressionMixin, Scheduler):
    """For engines without asynchronous scheduling (the CPU build)."""


class AsyncCompressionScheduler(CompressionMixin, AsyncScheduler):
    """For engines with asynchronous scheduling (CUDA)."""
