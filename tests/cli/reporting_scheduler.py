"""A scheduler that compresses nothing, and reports one made-up event per request."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvcompress.stats import DurationRecord, EventRecord, SkippedRecord, StepStats
from vllm_kvcompress.vllm_plugin import compat

EVENT = EventRecord("snapkv", "prompt", 128, 32, 4, 1)
DURATION = DurationRecord("snapkv", 0.25)


class ReportingScheduler(Scheduler):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.reported: set[str] = set()

    def make_stats(self, *args, **kwargs):
        stats = super().make_stats(*args, **kwargs)
        if stats is None:
            return stats
        new = {request.request_id for request in self.running} - self.reported
        self.reported |= new
        skipped = SkippedRecord("snapkv", "nothing_to_free", len(new))
        step = StepStats([EVENT] * len(new), [DURATION] * len(new), [skipped])
        step.logical_tokens, step.resident_tokens = (400, 100) if self.running else (0, 0)
        compat.attach_stats(stats, step.to_dict())
        return stats
