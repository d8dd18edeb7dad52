"""Compression in one worker: the course of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvcompress.attention.batch import HostNumbers
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.compression.recent_events import RecentEvents
from vllm_kvcompress.compression.stopwatch import Stopwatch
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.scheduling.plan import StepPlan, StepReport, kernel_blocks
from vllm_kvcompress.vllm_plugin.compat.messages import attached_plan
from vllm_kvcompress.vllm_plugin.compat.worker import batch_request_ids, gone_request_ids
from vllm_kvcompress.vllm_plugin.debug_mode import switched_on
from vllm_kvcompress.vllm_plugin.worker_side.access_checks import WorkerChecks
from vllm_kvcompress.vllm_plugin.worker_side.groups import WorkerGroups
from vllm_kvcompress.vllm_plugin.worker_side.ranks import FailedEvents
from vllm_kvcompress.vllm_plugin.worker_side.step import GroupCompression, StepWork

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own
_FAILED = (
    "request %s: policy %s failed at an event; the request keeps its first and latest tokens "
    "instead, and ends with an error. No other request is affected."
)


class Drafts(Protocol):
    """Drafts tokens behind the worker's steps."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Takes what the step verifies."""

    def propose(self, sampled: list[list[int]], num_tokens: HostNumbers) -> list[list[int]]:
        """Returns drafts for every row of the batch, of [any] `num_tokens` tokens."""


class WorkerCompression(WorkerGroups):
    """Runs the scheduler's plans in a worker: begins a step, prepares its groups, ends it.

    Attributes:
        recent_events: results of the last events, for the status page.
        checks: block checks of the debug mode; None: it is off.
        drafter: drafts tokens with the model itself; None: it is not asked to.
    """

    def __init__(self, vllm_config: VllmConfig, settings: Settings) -> None:
        super().__init__(vllm_config, settings)
        self.recent_events = RecentEvents()
        self.checks = WorkerChecks() if switched_on() else None
        self.drafter: Drafts | None = None
        self._plan: StepPlan | None = None
        self._scheduler_output: SchedulerOutput | None = None
        self._running: list[tuple[GroupCompression, StepWork]] = []
        self._ended: list[Event] = []
        self._timed: list[tuple[str, list[Stopwatch]]] = []
        self._failed: list[str] = []
        self._failed_events = FailedEvents()

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Takes the step's plan and forgets requests that have ended or were preempted."""
        self.end_step()  # where nothing was sampled in the last one
        self._plan = plan = attached_plan(scheduler_output) or StepPlan()
        for request_id in gone_request_ids(scheduler_output):
            for group in self.groups.values():
                group.forget(request_id, plan.saves.get(request_id))
        if self.drafter is not None:
            self.drafter.begin_step(scheduler_output)
        self._scheduler_output = scheduler_output
        self._running = []
        for group in self.groups.values():
            group.transfer(plan)
        self._zero_reused_state_blocks(scheduler_output)
        for group in self.groups.values():
            size = group.tables.pool.block_size * group.split
            written = blocks_to_write(scheduler_output, group.group, size)
            group.runner.forget_blocks(kernel_blocks(written, group.split))
            group.zero_blocks(scheduler_output.new_block_ids_to_zero)
        if self.checks is not None:
            pools = [group.tables.pool for group in self.groups.values()]
            self.checks.begin_step(self._plan, pools)

    def _zero_reused_state_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Clears policy state from blocks that tokens are written to in this step."""
        holding = [group for group in self.groups.values() if group.runner.policy_state.blocks]
        if holding:
            new = new_block_ids(scheduler_output)
            for group in holding:
                reused = set(kernel_blocks(new, group.split))
                group.runner.policy_state.zero_reused_blocks(reused)

    def prepare(self, layer_name: str, common: CommonAttentionMetadata) -> StepWork | None:
        """Prepares the step's work of the layer's cache group; None: it has none."""
        group = self.group_of(layer_name)
        if group is None:
            return None
        if self._plan is None or self._scheduler_output is None:
            return group.prepare_dummy(common)
        request_ids = batch_request_ids(self._model_runner, self._scheduler_output, common)
        plan, blocks = self._plan, common.block_table_tensor
        group.begin_requests(plan)
        ended = group.begin_events(plan, request_ids, blocks, after_first_token=True)
        if self.checks is not None:
            self.checks.check_events(group, ended)
        if ended:
            group.run_events(ended)
            self._ended += ended
        work = group.prepare(plan, request_ids, common)
        if self.checks is not None:
            self.checks.check(group, work, request_ids, common)
        if work.is_empty:
            return None
        self._running.append((group, work))
        return work

    def end_forward(self) -> None:
        """Treats batches as vLLM's dummy batches until the next step begins."""
        self._scheduler_output = None

    def end_step(self) -> None:
        """Runs events that waited for sampling, records all, and drops the step's state."""
        for group, work in self._running:
            group.run_events(work.events, work.waiting)
            self._ended += work.events
        by_request: dict[str, list[Event]] = {}
        for event in self._ended:
            by_request.setdefault(event.plan.request_id, []).append(event)
        failed = self._agree_on_failed(by_request)
        for request_id, events in by_request.items():
            if request_id not in failed:
                self._timed.append((events[0].plan.policy, [event.stopwatch for event in events]))
                block_size = self.groups[events[0].plan.group].tables.pool.block_size
                self.recent_events.add(events, block_size)
        self._failed += failed
        if self._plan is not None:
            for group in self.groups.values():
                group.tables.drop_saved(self._plan.dropped)
        self._plan, self._scheduler_output, self._running, self._ended = None, None, [], []

    def _agree_on_failed(self, by_request: dict[str, list[Event]]) -> list[str]:
        """Returns requests whose event failed on any rank up to this stage, and logs why."""
        plans = [] if self._plan is None else self._plan.events
        request_ids = list(dict.fromkeys(plan.request_id for plan in plans))
        errors = {
            request_id: event
            for request_id, events in by_request.items()
            for event in events
            if event.error is not None
        }
        for request_id, event in errors.items():
            logger.error(_FAILED, request_id, event.plan.policy, exc_info=event.error)
        flags = self._failed_events.on_any_rank([each in errors for each in request_ids])
        return [each for each, failed in zip(request_ids, flags, strict=True) if failed]

    def take_report(self) -> StepReport:
        """Returns the results of events that the scheduler has not been sent yet."""
        failed, self._failed = self._failed, []
        return StepReport(self._take_seconds(), failed)

    def _take_seconds(self) -> list[tuple[str, float]]:
        """Returns policy and duration of events whose duration became known since the last call.

        On GPUs that is some steps after the event. A request's events in one step, of several
        cache groups, count as one.
        """
        known, waiting = [], []
        for policy, stopwatches in self._timed:
            seconds = [stopwatch.seconds for stopwatch in stopwatches]
            finished = [each for each in seconds if each is not None]
            if len(finished) < len(seconds):
                waiting.append((policy, stopwatches))
            else:
                known.append((policy, sum(finished)))
        self._timed = waiting
        return known


def new_block_ids(scheduler_output: SchedulerOutput) -> set[int]:
    """Returns blocks that requests were given in this step, prefix-cache hits included."""
    given = [request.block_ids for request in scheduler_output.scheduled_new_reqs]
    given += filter(None, scheduler_output.scheduled_cached_reqs.new_block_ids)
    return {block_id for groups in given for group in groups for block_id in group}


def blocks_to_write(
    scheduler_output: SchedulerOutput, group: int, block_size: int
) -> Iterator[int]:
    """Yields a cache group's blocks that requests were given in this step to write tokens to."""
    for request in scheduler_output.scheduled_new_reqs:
        yield from request.block_ids[group][request.num_computed_tokens // block_size :]
    for given in filter(None, scheduler_output.scheduled_cached_reqs.new_block_ids):
        yield from given[group]
