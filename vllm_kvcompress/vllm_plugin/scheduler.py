"""Schedulers that plan compression events and report what they did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.metrics.stats import DurationRecord, EventRecord, SkippedRecord, StepStats
from vllm_kvcompress.scheduling.ledger import RequestLedger
from vllm_kvcompress.scheduling.plan import Adoption, EventPlan, Observation, StepPlan
from vllm_kvcompress.scheduling.pressure import STEPS_UNTIL_FREED, Pool, choose
from vllm_kvcompress.vllm_plugin import compat, versions
from vllm_kvcompress.vllm_plugin.block_manager import CompressedBlockManager
from vllm_kvcompress.vllm_plugin.dependent_blocks import DependentBlockManager
from vllm_kvcompress.vllm_plugin.needed_classes import check_classes
from vllm_kvcompress.vllm_plugin.refusals import engine_settings
from vllm_kvcompress.vllm_plugin.requests import RequestOptions, request_options

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own


class CompressionMixin:
    """Adds to a scheduler: chunk ends at event positions, plans for the workers, statistics.

    Without compressed layers (no policy, or a budget of 1.0) every method only calls `super()`.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        check_classes(self.vllm_config, engine_settings(self.vllm_config))
        coordinator = self.kv_cache_manager.coordinator
        self.compressed_managers = [
            manager
            for manager in coordinator.single_type_managers
            if isinstance(manager, CompressedBlockManager)
        ]
        self._step_stats = StepStats()
        if not self.compressed_managers:
            return
        self.spec = self.compressed_managers[0].kv_cache_spec
        self._check_context_reuse()
        compat.enable_chunk_ends(self)
        for manager in self.compressed_managers:
            manager.open_ledger = self._open_ledger
        for manager in coordinator.single_type_managers:
            self._limit_caching(manager)
        self._announce()

    def _limit_caching(self, manager: SingleTypeKVCacheManager) -> None:
        """Tells managers of other groups which of a request's blocks may be cached."""
        if isinstance(manager, DependentBlockManager):
            manager.cacheable_tokens = self.compressed_managers[0].cacheable_tokens
        elif manager.enable_caching and not isinstance(manager, CompressedBlockManager):
            raise UnsupportedError(
                f"this model has {type(manager.kv_cache_spec).__name__} layers beside its "
                "full-attention layers, whose blocks would be shared between requests although "
                "they depend on what is compressed; add --no-enable-prefix-caching."
            )

    def _check_context_reuse(self) -> None:
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if self.spec.settings.reuse_contexts and len(managers) > 1:
            raise UnsupportedError(
                "--kv-reuse-contexts needs a model of full-attention layers only: the others of "
                "this one would have to read the context again; leave it out."
            )

    def _announce(self) -> None:
        """One line at start-up: what is compressed, and what that means for capacity."""
        settings, rule, length = self.spec.settings, self.spec.rule, self.max_model_len
        pool_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        logger.info(
            "KV cache compressed with %s, budget %s, trigger %s: a prompt of %d tokens holds %d of "
            "its %d blocks, and up to %d while it is read; %d blocks serve %.2f such requests at a "
            "time (uncompressed: %.2f).",
            settings.policy,
            settings.budget_text,
            settings.trigger,
            length,
            rule.held_blocks(length),
            -(-length // rule.block_size),
            rule.admission_blocks(length),
            pool_blocks,
            rule.concurrency(length, pool_blocks),
            pool_blocks / -(-length // rule.block_size),
        )
        versions.warn_of_version(logger)

    def schedule(self, *args, **kwargs) -> SchedulerOutput:
        """vLLM's schedule, with the step's plan attached when there is anything to do."""
        if self.compressed_managers:
            self._select_under_pressure()
        output = super().schedule(*args, **kwargs)
        if self.compressed_managers:
            plan = self._step_plan(output)
            if plan != StepPlan():
                compat.attach_plan(output, plan)
        return output

    def _select_under_pressure(self) -> None:
        """Under the pressure trigger: names the requests that this step compresses for room."""
        manager = self.compressed_managers[0]
        for each in self.compressed_managers:
            each.selected.clear()
        mark = self.spec.pressure_mark
        if mark is None or not self.running:
            return
        block_pool = self.kv_cache_manager.block_pool
        ahead = {r.request_id: r.num_computed_tokens + STEPS_UNTIL_FREED for r in self.running}
        pool = Pool(
            size=block_pool.num_gpu_blocks - 1,
            free=block_pool.get_num_free_blocks(),
            coming=sum(each.coming_blocks() for each in self.compressed_managers),
            promised=sum(each.promised_blocks() for each in self.compressed_managers),
            growth=len(self.running) * len(self.compressed_managers),
            soon=sum(each.promised_blocks(ahead=ahead) for each in self.compressed_managers),
            wanted=compat.blocks_to_admit(self),
        )
        able = [
            manager.candidate(request.request_id, request.num_computed_tokens + 1)
            for request in self.running
            if not request.is_prefill_chunk
        ]
        worth = [candidate for candidate in able if candidate and candidate.is_worth_it]
        if not worth:
            return
        shortage = pool.shortage(mark, min(candidate.written for candidate in worth))
        for candidate in choose(worth, shortage, pool.room // len(self.compressed_managers)):
            for each in self.compressed_managers:
                each.selected.add(candidate.request_id)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Ends a prefill chunk at the next event position.

        Chunks that would run past it are those of resumed requests, whose generated tokens
        are computed anew together with the prompt, and those of the chunk trigger.
        """
        if not self.compressed_managers:
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
        ledger = self.compressed_managers[0].ledgers.get(request.request_id)
        if ledger is None:
            ledger = self._open_ledger(request.request_id, request.num_prompt_tokens)
        position = ledger.rule.next_position(ledger.num_prompt_tokens, start)
        if position is None:
            return num_new_tokens
        return min(num_new_tokens, position - start)

    def _get_local_prefix_cache_hit(self, request: Request, *args, **kwargs):
        """vLLM's, or a compressed context: null blocks, since nothing of it is where it was.

        Since 0.33 vLLM also says how long a hit may be, where something else than the cache limits
        it: then there is no context, which can only be taken whole.
        """
        if self.compressed_managers and self.spec.settings.reuse_contexts:
            manager = self.compressed_managers[0]
            ledger = self._open_ledger(request.request_id, request.num_prompt_tokens)
            limited = any(value is not None for value in (*args, *kwargs.values()))
            key = None if limited else ledger.context_key
            context = manager.want_context(request.request_id, key)
            if context is not None:
                blocks = [self.kv_cache_manager.block_pool.null_block] * context.num_blocks
                hit = self.kv_cache_manager.create_kv_cache_blocks((blocks,))
                return hit, context.num_blocks * self.spec.block_size, 0, False
        return super()._get_local_prefix_cache_hit(request, *args, **kwargs)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        One that names its context reads no prefix cache: a hit may end behind the context, in
        blocks that an ordinary request with the same prompt has left there.
        """
        if self.compressed_managers and self._options(request).context_tokens is not None:
            request.skip_reading_prefix_cache = True
        super().add_request(request)

    def _preempt_request(self, request: Request, *args, **kwargs) -> None:
        """A preempted request drops everything, and computes every event's queries anew."""
        if any(m.cacheable_tokens(request.request_id) for m in self.compressed_managers):
            request.skip_reading_prefix_cache = True
        super()._preempt_request(request, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ):
        """Records the events that the workers ran."""
        plan = compat.attached_plan(scheduler_output)
        if plan is not None and plan.events:
            self._step_stats.events += self._records(plan.events)
        for policy, seconds in compat.attached_seconds(model_runner_output):
            self._step_stats.durations.append(DurationRecord(policy, seconds))
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args, **kwargs) -> SchedulerStats | None:
        """vLLM's statistics, with ours in the field that reaches the API process."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None or not self.compressed_managers:
            return stats
        step = self._step_stats
        self._step_stats = StepStats()
        manager = self.compressed_managers[0]
        step.skipped = [SkippedRecord(*names, n) for names, n in manager.skipped.items()]
        manager.skipped.clear()
        for request in self.running:
            ledger = manager.ledgers.get(request.request_id)
            if ledger is not None:
                step.logical_tokens += request.num_computed_tokens
                step.resident_tokens += ledger.resident_tokens(request.num_computed_tokens)
        compat.attach_stats(stats, step.to_dict())
        return stats

    def _open_ledger(self, request_id: str, num_prompt_tokens: int) -> RequestLedger:
        """A new request's ledger, by what it asks for and the server's settings."""
        options = self._options(self.requests[request_id])
        settings = self.spec.settings.for_request(options.policy, options.budget)
        rule = self.spec.rule_of(settings)
        end = num_prompt_tokens
        if options.context_tokens is not None:
            end = min(options.context_tokens, num_prompt_tokens)
        key = None
        num_blocks = min(end, num_prompt_tokens - 1) // rule.block_size
        if settings.reuse_contexts and options.context_tokens is not None and num_blocks:
            # Whole blocks, and a token behind them: what begins there is the same for everybody.
            end = num_blocks * rule.block_size
            key = (self.requests[request_id].block_hashes[num_blocks - 1], settings.policy, rule)
        return RequestLedger(
            end, rule, settings.policy, num_read_tokens=num_prompt_tokens, context_key=key
        )

    def _options(self, request: Request) -> RequestOptions:
        """What a request asks for.

        Wrong values were refused at admission; where `RequestCheck` was left out they are passed
        over, since an error here would end the engine and with it every other request.
        """
        params = request.sampling_params
        try:
            options = request_options(None if params is None else params.extra_args)
            self.spec.settings.for_request(options.policy, options.budget)
        except ValueError as error:
            logger.warning("request %s: %s Passed over.", request.request_id, error)
            return RequestOptions()
        return options

    def _step_plan(self, output: SchedulerOutput) -> StepPlan:
        """The events and observations of the requests that are in this step."""
        scheduled = output.num_scheduled_tokens
        events: list[EventPlan] = []
        adoptions: list[Adoption] = []
        windows: dict[tuple[int, str], tuple[int, ...]] = {}
        for manager in self.compressed_managers:
            events += [plan for rid, plan in manager.plans.items() if rid in scheduled]
            manager.plans.clear()
            adoptions += [a for rid, a in manager.adoptions.items() if rid in scheduled]
            manager.adoptions.clear()
            group = manager.kv_cache_group_id
            windows |= {(group, rid): ids for rid, ids in manager.new_windows.items()}
            manager.new_windows.clear()
        self._step_stats.contexts_reused += len(adoptions)
        observations: dict[str, Observation] = {}
        if any(rule.window_size for rule in self.spec.rules):
            ledgers = self.compressed_managers[0].ledgers
            for request_id, num_tokens in scheduled.items():
                end = self.requests[request_id].num_computed_tokens
                seen = ledgers[request_id].observation(end - num_tokens, end)
                if seen is not None:
                    observations[request_id] = seen
        return StepPlan(tuple(events), tuple(adoptions), windows, observations)

    def _records(self, events: tuple[EventPlan, ...]) -> list[EventRecord]:
        """One record per request: blocks of all groups, tokens of the first."""
        block_size = self.spec.block_size
        records: dict[str, EventRecord] = {}
        for plan in events:
            record = records.get(plan.request_id)
            if record is None:
                record = records[plan.request_id] = EventRecord(
                    policy=plan.policy,
                    trigger=plan.trigger,
                    source_tokens=plan.num_source_blocks * block_size,
                    resident_tokens=len(plan.fresh_block_ids) * block_size,
                    blocks_freed=0,
                    blocks_written=0,
                )
            record.blocks_freed += plan.num_source_blocks
            record.blocks_written += len(plan.fresh_block_ids)
        return list(records.values())


class CompressionScheduler(CompressionMixin, Scheduler):
    """For engines without asynchronous scheduling (the CPU build)."""


class AsyncCompressionScheduler(CompressionMixin, AsyncScheduler):
    """For engines with asynchronous scheduling (CUDA)."""
