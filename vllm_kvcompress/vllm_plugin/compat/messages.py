"""What travels between processes on objects of vLLM's that have no field for it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from vllm_kvcompress.scheduling.plan import StepPlan, StepReport

_PLAN_ATTRIBUTE = "kvcompress_plan"
_REPORT_ATTRIBUTE = "kvcompress_report"
_STATS_PREFIX = "kvcompress:"


def attach_plan(scheduler_output: Any, plan: StepPlan) -> None:
    """Sends a plan along with the scheduler's output; it survives pickling to workers."""
    setattr(scheduler_output, _PLAN_ATTRIBUTE, plan)


def attached_plan(scheduler_output: Any) -> StepPlan | None:
    """Returns the plan that came with a step; None: there is none."""
    return getattr(scheduler_output, _PLAN_ATTRIBUTE, None)


def attach_report(output: Any, report: StepReport) -> None:
    """Sends a report back to the scheduler with the step's output.

    An output that is still being copied from the device wraps the one that is sent.
    """
    for name in ("model_runner_output", "_model_runner_output"):
        output = getattr(output, name, output)
    setattr(output, _REPORT_ATTRIBUTE, report)


def attached_report(model_runner_output: Any) -> StepReport:
    """Returns the report that came with a step's output, or an empty one."""
    return getattr(model_runner_output, _REPORT_ATTRIBUTE, None) or StepReport()


def attach_stats(scheduler_stats: Any, stats: dict[str, Any]) -> None:
    """Puts our statistics into a field of vLLM's that reaches the API process.

    vLLM has no field for them: see "Hooks that vLLM lacks" in docs/vllm-versions.md.
    """
    from vllm.compilation.cuda_graph import CUDAGraphStat

    own = scheduler_stats.cudagraph_stats or CUDAGraphStat(0, 0, 0, "")
    text = own.runtime_mode + _STATS_PREFIX + json.dumps(stats, separators=(",", ":"))
    scheduler_stats.cudagraph_stats = replace(own, runtime_mode=text)


def detach_stats(scheduler_stats: Any) -> dict[str, Any] | None:
    """Takes our statistics out again, in the API process; None: nothing was attached."""
    carrier = scheduler_stats.cudagraph_stats
    if carrier is None or _STATS_PREFIX not in carrier.runtime_mode:
        return None
    mode, _, text = carrier.runtime_mode.partition(_STATS_PREFIX)
    scheduler_stats.cudagraph_stats = replace(carrier, runtime_mode=mode) if mode else None
    stats: dict[str, Any] = json.loads(text)
    return stats
