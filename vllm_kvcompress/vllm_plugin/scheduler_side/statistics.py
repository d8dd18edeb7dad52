"""Statistics of the scheduler: what its steps did, and what running requests hold after them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_kvcompress.metrics.stats import DurationRecord, EventRecord, SkippedRecord, StepStats
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.ledger import SKIP_ERROR, RequestLedger
from vllm_kvcompress.scheduling.plan import StepPlan, StepReport
from vllm_kvcompress.scheduling.read_rule import ReadRule

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import KeptStates
    from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable


class SchedulerStatistics:
    """Counts what steps do until vLLM asks for its statistics.

    Attributes:
        step: what was counted since then; kept states and the canary count here, too.
    """

    def __init__(self, table: RequestTable, kept: KeptStates) -> None:
        self.step = kept.stats = StepStats()
        self._table = table
        self._kept = kept
        self._most_held_tokens = 0

    def add(self, plan: StepPlan | None, report: StepReport) -> None:
        """Records the events that workers ran in a step, and durations that have become known.

        The first group's event stands for those of all groups, which have as many tokens and
        blocks each. Tokens are counted per group, blocks over all groups.
        """
        self.step.durations += [DurationRecord(*each) for each in report.seconds]
        spec, managers = self._table.spec, self._table.managers
        for event in [] if plan is None else plan.events:
            if event.group != managers[0].kv_cache_group_id:
                continue
            if event.request_id in report.failed:
                self._table.skipped[event.policy, SKIP_ERROR] += 1
                continue
            num_written = ceil_div(len(event.fresh_block_ids), spec.split)
            record = EventRecord(
                policy=event.policy,
                trigger=event.trigger,
                source_tokens=event.num_source_blocks * spec.kernel_block_size,
                resident_tokens=event.num_kept_blocks * spec.kernel_block_size,
                blocks_freed=event.num_freed_blocks * len(managers),
                blocks_written=num_written * len(managers),
            )
            self.step.events.append(record)

    def count_pages(self, rule: ReadRule, ledger: RequestLedger, num_tokens: int) -> None:
        """Counts the pages of a decode step at `num_tokens` tokens, which reads a part of them."""
        if num_tokens <= ledger.num_prompt_tokens:
            return
        num_resident = ledger.resident_tokens(num_tokens)
        size = self._table.spec.kernel_block_size
        self.step.held_pages += ceil_div(num_resident, size)
        self.step.read_pages += rule.read_pages(num_resident, size)

    def take(self, running: Iterable[Request]) -> StepStats:
        """Returns what was counted, and what running requests hold, and counts anew."""
        step, table = self.step.take(), self._table
        step.skipped = [SkippedRecord(*names, n) for names, n in table.skipped.items()]
        table.skipped.clear()
        running = list(running)
        if not running:
            step.reclaimable_blocks = 0  # the step had been planned before the last one ended
        for request in running:
            if request.request_id in table.shadows:
                continue
            ledger = table[request.request_id].ledger
            num_resident = ledger.resident_tokens(request.num_computed_tokens)
            step.logical_tokens += request.num_computed_tokens
            step.resident_tokens += num_resident
            self._most_held_tokens = max(self._most_held_tokens, num_resident)
        step.most_held_tokens = self._most_held_tokens
        if (host := self._kept.host) is not None:
            step.spilled_states, step.spilled_tokens = len(host), host.num_tokens
            step.spilled_bytes = host.num_bytes
        return step
