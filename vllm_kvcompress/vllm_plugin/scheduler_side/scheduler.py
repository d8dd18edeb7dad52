"""Schedulers that plan compression events and report what they did."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.metrics.stats import (
    AFTER_FIRST_TOKEN,
    AT_ONCE_FOR_BUFFERS,
    AT_ONCE_FOR_ROOM,
)
from vllm_kvcompress.scheduling.draft_pace import MAX_DRAFTS
from vllm_kvcompress.scheduling.ledger import PreparationLedger
from vllm_kvcompress.scheduling.plan import StepPlan
from vllm_kvcompress.scheduling.pressure import STEPS_UNTIL_FREED, Pool, choose
from vllm_kvcompress.vllm_plugin.compat.messages import (
    attach_plan,
    attach_stats,
    attached_plan,
    attached_report,
)
from vllm_kvcompress.vllm_plugin.compat.scheduler import (
    SchedulerHooks,
    blocks_to_admit,
    drop_drafts_beside_sampling,
    enable_chunk_ends,
    find_prefix_hit_within,
    first_to_admit,
    num_unverified_drafts,
    recomputes_failed_loads,
    reserve_drafts,
    wrap_connector,
)
from vllm_kvcompress.vllm_plugin.debug_mode import switched_on
from vllm_kvcompress.vllm_plugin.scheduler_side.block_manager import CompressedBlockManager
from vllm_kvcompress.vllm_plugin.scheduler_side.canary import CHUNK_TOKENS, Canary
from vllm_kvcompress.vllm_plugin.scheduler_side.host_copies import HostCopies
from vllm_kvcompress.vllm_plugin.scheduler_side.integrity import SchedulerChecks
from vllm_kvcompress.vllm_plugin.scheduler_side.other_managers import LimitedCaching
from vllm_kvcompress.vllm_plugin.scheduler_side.reasoning import ReasoningEnd
from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable
from vllm_kvcompress.vllm_plugin.scheduler_side.start import announce, check_reuse
from vllm_kvcompress.vllm_plugin.scheduler_side.state_reuse import StateReuse
from vllm_kvcompress.vllm_plugin.scheduler_side.statistics import SchedulerStatistics
from vllm_kvcompress.vllm_plugin.scheduler_side.whole_blocks import WholeBlocks, limit_connector
from vllm_kvcompress.vllm_plugin.spec import QueryBuffers, spill_slots, spilled_block_bytes
from vllm_kvcompress.vllm_plugin.startup.connector_refusals import reads_for_others
from vllm_kvcompress.vllm_plugin.startup.needed_classes import CompressingScheduler, check_classes
from vllm_kvcompress.vllm_plugin.startup.refusals import engine_settings

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

MAX_USAGE_OF_ROOM = 0.5  # of the pool; below it a short answer's prompt may stay whole


class CompressionMixin(CompressingScheduler, SchedulerHooks):
    """Adds to a scheduler: chunk ends at event positions, plans for the workers, statistics.

    Without compressed layers (no policy, or a budget of 1.0) every method only calls `super()`.

    Attributes:
        compressed: block managers of the compressed cache groups.
        table: records of all requests; None: nothing is compressed.
        states: kept states, for later requests.
        statistics: counts what steps do.
        spec: cache spec of the compressed layers.
        checks: checks of the debug mode; None: it is off.
        canary: scores answers with the full cache; None: it is off.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_classes(self.vllm_config, engine_settings(self.vllm_config))
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self.compressed = [each for each in managers if isinstance(each, CompressedBlockManager)]
        self.table: RequestTable | None = None
        self.checks: SchedulerChecks | None = None
        self.canary: Canary | None = None
        if not self.compressed:
            return
        if self.compressed[0].kv_cache_spec.settings.draft is not None:
            reserve_drafts(self, MAX_DRAFTS)
        self.table = RequestTable(managers, self.compressed)
        self.spec = self.table.spec
        self.table.whole_images = self.vllm_config.model_config.is_mm_prefix_lm
        self.table.reasoning = ReasoningEnd.of(self.vllm_config, self.spec.settings)
        self.states = StateReuse(self.kv_cache_manager.block_pool, self._host_copies())
        self.statistics = SchedulerStatistics(self.table, self.states.kept)
        self._buffers = QueryBuffers.of(self.vllm_config, self.spec.settings).for_prompt_events
        check_reuse(self.table)
        if self.spec.settings.shadow:
            self.canary = Canary(self.spec.settings.shadow, self.table, self.max_model_len)
            self.canary.stats = self.statistics.step
        if switched_on():
            self.checks = SchedulerChecks(self.table, self.states.kept)
        self._connector = wrap_connector(self, self._limit_connector)
        enable_chunk_ends(self)
        for manager in managers:
            self._share_table(manager)
        announce(self.table, self.states, self.max_model_len)

    def _limit_connector(self, connector: Any) -> WholeBlocks:
        """Wraps vLLM's KV connector, to which requests end at their first event.

        The table of requests hears that there is one.
        """
        transfer = self.vllm_config.kv_transfer_config
        assert self.table is not None
        assert transfer is not None
        self.table.has_connector = True
        self.table.reads_for_others = reads_for_others(transfer)
        return limit_connector(
            connector, self.table, self.states.kept, self.kv_cache_manager, transfer
        )

    def _share_table(self, manager: SingleTypeKVCacheManager) -> None:
        """Gives a block manager the requests' records, so that it knows which blocks to cache."""
        if isinstance(manager, CompressedBlockManager):
            manager.siblings = self.compressed
        if isinstance(manager, LimitedCaching):
            assert self.table is not None
            manager.table, manager.states = self.table, self.states
        elif manager.enable_caching:
            raise UnsupportedError(
                f"this model has {type(manager.kv_cache_spec).__name__} layers beside its "
                "full-attention layers, whose blocks would be shared between requests although "
                "they depend on what is compressed; add --no-enable-prefix-caching."
            )

    def _host_copies(self) -> HostCopies | None:
        """Returns the bookkeeping of kept states in host memory; None: there is none."""
        if self.spec.settings.spill is None:
            return None
        num_slots = spill_slots(self.vllm_config, self.spec)
        return HostCopies(num_slots, spilled_block_bytes(self.vllm_config, self.spec))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedules a step, and attaches our plan if workers have anything to do for it."""
        if self.table is None:
            return super().schedule(*args, **kwargs)
        self.table.selected.clear()
        self.table.written.clear()
        if self.spec.settings.draft is not None:
            drop_drafts_beside_sampling(self)
        if self.canary is not None:
            self._give_way(self.canary)
        if self.spec.pressure_mark is not None and self.running:
            self._select_under_pressure(self.table, self.spec.pressure_mark)
        output = super().schedule(*args, **kwargs)
        if self._connector is not None:
            self._connector.end_at_events(output.num_scheduled_tokens)
        plan = self._step_plan(self.table, output)
        if self.checks is not None:
            self.checks.after_step(self.requests)
            plan.tags = self.checks.tags(output, plan, self.requests)
        if plan:
            attach_plan(output, plan)
        return output

    def _give_way(self, canary: Canary) -> None:
        """Aborts the shadow if another request waits; it is sent again later."""
        if canary.shadow_id is None:
            return
        shadow = self.requests[canary.shadow_id]
        _, num_waiting = self.get_request_counts()
        if num_waiting > (shadow.status != RequestStatus.RUNNING) or shadow.num_preemptions:
            self.finish_requests(canary.take_back(), RequestStatus.FINISHED_ABORTED)

    def _send_shadow(self, canary: Canary) -> None:
        """Queues the next shadow while nothing waits, if twice its blocks are free."""
        num_running, num_waiting = self.get_request_counts()
        if num_waiting or num_running >= self.scheduler_config.max_num_seqs:
            return
        assert self.table is not None
        pool, mark = self.kv_cache_manager.block_pool, self.spec.pressure_mark or 1.0
        num_free = pool.get_num_free_blocks() - int((1 - mark) * pool.num_gpu_blocks)
        room = num_free // (2 * len(self.table.all_managers)) * self.spec.block_size
        shadow = canary.next_shadow(room, is_idle=not num_running)
        if shadow is not None:
            self.add_request(shadow)

    def _select_under_pressure(self, table: RequestTable, mark: float) -> None:
        """Selects the requests that this step compresses because of memory pressure."""
        block_pool, num_groups = self.kv_cache_manager.block_pool, len(self.compressed)
        ahead = {r.request_id: r.num_computed_tokens + STEPS_UNTIL_FREED for r in self.running}
        pool = Pool(
            size=block_pool.num_gpu_blocks - 1,
            free=block_pool.get_num_free_blocks(),
            pending_frees=sum(each.num_pending_frees() for each in self.compressed),
            reserved=sum(each.reserved_blocks() for each in self.compressed),
            growth=len(self.running) * num_groups,
            needed_until_freed=sum(each.reserved_blocks(ahead=ahead) for each in self.compressed),
            wanted=self._blocks_to_admit(table),
        )
        candidates = [
            table[request.request_id].candidate(request.request_id, request.num_computed_tokens + 1)
            for request in self.running
            if not request.is_prefill_chunk
        ]
        worth = [candidate for candidate in candidates if candidate and candidate.is_worth_it]
        gain = sum(candidate.gain for candidate in worth) * num_groups
        self.statistics.step.reclaimable_blocks = gain
        if worth:
            shortage = pool.shortage(mark, min(candidate.written for candidate in worth))
            chosen = choose(worth, shortage, pool.room // num_groups)
            table.selected = {candidate.request_id for candidate in chosen}

    def clip_chunk(self, request: Request, num_new_tokens: int, start: int) -> int:
        """Ends a prefill chunk at the next event position, or at the end of a chunk that chooses.

        Chunks that would run past it are those of resumed requests, whose generated tokens are
        computed anew together with the prompt, and those of the chunk trigger. Drafts end before
        it: they may be taken back, and an event cannot. While drafts of an earlier step are not
        verified, the step ends before the queries that the event observes, whose positions are not
        known. Under a ceiling a request waits for blocks that an event is about to free.
        """
        if self.table is None or not num_new_tokens:
            return num_new_tokens
        if request.request_id in self.table.shadows:
            return min(num_new_tokens, CHUNK_TOKENS)
        ledger, chunks = self.table[request.request_id].ledger, self.spec.chunks
        if isinstance(ledger, PreparationLedger):
            if start >= ledger.scored_from and not self.table.may_score(ledger, self.max_model_len):
                return 0  # until another context has been scored
            if chunks is None:
                num_new_tokens = ledger.chunk(start, num_new_tokens)
        if chunks is not None and start < ledger.compress_at:
            return chunks.next_step(start, ledger.compress_at, num_new_tokens)
        num_unverified = num_unverified_drafts(self, request)
        position = ledger.next_position(start - num_unverified)
        if position is None:
            return num_new_tokens
        room = position - start
        if num_unverified:
            room = max(0, room - max(1, ledger.rule.window_size))
        elif position > request.num_tokens:  # all tokens before it but the first are drafts
            room = max(1, room - 1)
        num_new_tokens = min(num_new_tokens, room)
        if ledger.rule.reserves_growth and request.status == RequestStatus.RUNNING:
            num_processed = request.num_computed_tokens - request.num_in_flight_tokens
            if self.compressed[0].waits_for_room(
                request.request_id, start + num_new_tokens, num_processed
            ):
                return 0
        return num_new_tokens

    def reusable_end(self, request: Request) -> int:
        """Returns the end of the last block of a prompt that the same prompt can hit.

        Windows and states of other layers are kept there, too; vLLM keeps them at the end of the
        prompt, whose queries an event needs.
        """
        if self.table is None:
            return super().reusable_end(request)
        num_tokens, record = request.num_prompt_tokens, self.table[request.request_id]
        longest = record.longest_hit(num_tokens - 1, num_tokens, self.spec.chunks)
        block_size: int = self.spec.block_size
        return longest - longest % block_size

    def find_prefix_hit(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Returns a kept state's blocks, or as much of vLLM's prefix-cache hit as is allowed.

        A kept state has null blocks in place of the compressed ones, then its tail. Since 0.33 vLLM
        also limits how long a hit may be, for reasons beside the cache. Then no state is taken,
        since its compressed part cannot be shortened.
        """
        hit = super().find_prefix_hit(request, *args, **kwargs)
        if self.table is None:
            return hit
        record = self.table[request.request_id]
        longest = record.longest_hit(hit[1], request.num_tokens, self.spec.chunks)
        if longest < hit[1]:  # of a window or a state the blocks before its end say nothing
            hit = (*find_prefix_hit_within(self, request, longest), *hit[3:])
        if any(value is not None for value in (*args, *kwargs.values())):
            record.reuse.beginning = None
            return hit
        beginning = record.reuse.beginning = self.states.find_beginning(request, record, hit[1])
        if beginning is None:
            return hit
        groups = beginning.groups(self.kv_cache_manager.block_pool.null_block)
        blocks = self.kv_cache_manager.create_kv_cache_blocks(groups)
        return blocks, beginning.num_tokens, 0, False

    def add_request(self, request: Request) -> None:
        """Queues a request; a known one only brings more input."""
        if self.table is not None and request.request_id not in self.requests:
            usage = self.kv_cache_manager.block_pool.get_usage()
            self.table.open(request, has_room=not self.waiting and usage <= MAX_USAGE_OF_ROOM)
            self.states.expect(request, self.table[request.request_id])
            if self.canary is not None and request.request_id not in self.table.shadows:
                self.canary.watch(request)
        super().add_request(request)

    def preempt(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Preempts a request, which drops all its blocks and computes every event's queries anew.

        It reads no prefix cache if an event was before, or one comes while it generates: hits may
        reach as far as it had come.
        """
        if self.table is None:
            return super().preempt(request, *args, **kwargs)
        record, end = self.table[request.request_id], request.num_computed_tokens
        ledger, reuse = record.ledger, record.reuse
        is_ahead = ledger.next_position(end) is not None
        if ledger.first_event_position is not None or (end > ledger.compress_at and is_ahead):
            request.skip_reading_prefix_cache = True
        if self._connector is not None:
            self._connector.release(request.request_id)
        super().preempt(request, *args, **kwargs)  # closes the record
        begins_anew = reuse.state is None and reuse.context_hash is None
        self.table.open(request, begins_anew=begins_anew)

    def end_load(self, request: Request) -> None:
        """Goes back to the tokens whose queries an event needs, where all were loaded.

        The record of a request that lost its blocks, since nothing was loaded, is opened anew.
        """
        super().end_load(request)
        if self.table is None:
            return
        record = self.table.records.get(request.request_id)
        if record is None:
            self.table.open(request)
            return
        longest = record.longest_hit(
            request.num_computed_tokens, request.num_tokens, self.spec.chunks
        )
        request.num_computed_tokens = record.ledger.num_hit_tokens = longest

    def handle_invalid_blocks(self, invalid_ids: set[int], *args: Any, **kwargs: Any) -> set[str]:
        """Preempts running requests that computed, and were compressed, behind a failed load.

        vLLM would compute the missing tokens into the same blocks, which an event may have
        freed already. Nothing is loaded for them again.
        """
        affected = super().handle_invalid_blocks(invalid_ids, *args, **kwargs)
        if self.table is None or not recomputes_failed_loads(self):
            return affected
        for request in [each for each in self.running if each.request_id in affected]:
            first = request.num_computed_tokens // self.spec.block_size
            (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
            self.kv_cache_manager.evict_blocks(set(blocks[first:]))
            self.running.remove(request)
            self.preempt(request, time.monotonic(), drop_stale_output=True)
            request.skip_reading_prefix_cache = True
        return affected

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drops vLLM's cached prefixes and all kept states, those in host memory included."""
        is_reset: bool = super().reset_prefix_cache(*args, **kwargs)
        if is_reset and self.table is not None:
            self.states.kept.forget_spilled()
        return is_reset

    def free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Frees a request that has ended, after keeping its state for later ones."""
        if self.table is not None:
            record = self.table[request.request_id]
            self.states.end(request, record, self.compressed[0], self.table.others)
            if self.canary is not None:
                self.canary.end(request, record)
        return super().free_request(request, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Records the events that workers ran; requests whose event failed end with an error.

        A request that ends with this step's token anyway has no error, since an event is for later
        tokens, unless it was sent to prepare a context.
        """
        plan = attached_plan(scheduler_output)
        report = attached_report(model_runner_output)
        errors: list[tuple[int, EngineCoreOutput]] = []
        if self.table is not None:
            self.statistics.add(plan, report)
            records = self.table.records
            known = [request_id for request_id in report.failed if request_id in records]
            for request_id in known:
                records[request_id].reuse.key = None  # it leaves no state
            errors += self._end_with_errors(each for each in known if records[each].prepares)
        if self.canary is not None:
            self.canary.score(model_runner_output.prompt_logprobs_dict)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if self.table is not None:
            ran = map(self.requests.get, scheduler_output.num_scheduled_tokens)
            self.table.note_reasoning(each for each in ran if each is not None)
        if report.failed:
            errors += self._end_with_errors(report.failed)
        for client_index, output in errors:
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
        if self.canary is not None:
            self.canary.collect(outputs)
            self._send_shadow(self.canary)
        if self.checks is not None:
            self.checks.after_step(self.requests)
        return outputs

    def _end_with_errors(self, request_ids: Iterable[str]) -> list[tuple[int, EngineCoreOutput]]:
        """Ends requests with HTTP 500, like vLLM; returns client indices, and what to tell each."""
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

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Returns vLLM's statistics, with ours in the field that reaches the API process."""
        stats = super().make_stats(*args, **kwargs)
        if stats is None or self.table is None:
            return stats
        step = self.statistics.take(self.running)
        attach_stats(stats, step.to_dict())
        return stats

    def _step_plan(self, table: RequestTable, output: SchedulerOutput) -> StepPlan:
        """Merges what workers have to do for the requests in this step."""
        plan = self.states.take_unsent()
        self._plan_prompt_events(table, output, plan)
        observes = any(rule.window_size for rule in self.spec.rules)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            record = table[request_id]
            end = self.requests[request_id].num_computed_tokens
            if record.unsent:
                plan.add(record.unsent)
                record.unsent = StepPlan()
            if record.read_rule is not None and num_tokens == 1:
                self.statistics.count_pages(record.read_rule, record.ledger, end)
            if observes:
                observation = record.ledger.observation(end - num_tokens, end)
                if observation is not None:
                    plan.observations[request_id] = observation
        return plan

    def _plan_prompt_events(
        self, table: RequestTable, output: SchedulerOutput, plan: StepPlan
    ) -> None:
        """Sends prompts' events with the step behind their first token, or at once.

        An event comes at once where the first waiting request needs its blocks, where all buffers
        for last queries are in use, and where the request was preempted behind its prompt: its next
        step reads all that it has generated, up to the next event.
        """
        num_buffered, needs_room = 0, None
        scheduled = output.num_scheduled_tokens
        for request_id in [each for each in table.awaiting_event if each in scheduled]:
            record, end = table[request_id], self.requests[request_id].num_computed_tokens
            waiting = record.prompt_events(end)
            if not waiting:  # the first token was sampled in an earlier step
                plan.events += record.prompt_events(end - scheduled[request_id])
                self.statistics.step.count_prompt_event(AFTER_FIRST_TOKEN)
                del table.awaiting_event[request_id]
                continue
            if needs_room is None:
                needs_room = self._needs_room(table)
            num_buffered += waiting[0].window_size > 0
            lacks_room = needs_room or self.requests[request_id].num_tokens > end
            if lacks_room or num_buffered > self._buffers:
                reason = AT_ONCE_FOR_ROOM if lacks_room else AT_ONCE_FOR_BUFFERS
                self.statistics.step.count_prompt_event(reason)
                plan.events += record.run_event_at_once()
                del table.awaiting_event[request_id]

    def _needs_room(self, table: RequestTable) -> bool:
        """Whether the first waiting request waits for more blocks than are free."""
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return self._blocks_to_admit(table) > free

    def _blocks_to_admit(self, table: RequestTable) -> int:
        """Counts the free blocks that the first waiting request needs; 0: none waits for them."""
        request = first_to_admit(self)
        if request is None:
            return 0
        num_tokens, record = request.num_tokens, table[request.request_id]
        longest = record.longest_hit(num_tokens - 1, num_tokens, self.spec.chunks)
        return blocks_to_admit(self, request, longest)


class CompressionScheduler(CompressionMixin, Scheduler):
    """Scheduler for engines without asynchronous scheduling (the CPU build)."""


class AsyncCompressionScheduler(CompressionMixin, AsyncScheduler):
    """Scheduler for engines with asynchronous scheduling (CUDA)."""
