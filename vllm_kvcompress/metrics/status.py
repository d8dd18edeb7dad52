"""Metrics of compression as one document, for the status page and for scripts."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import Metric

from vllm_kvcompress.metrics.stats import EventRecord, StepStats, counters_of

RECENT_SECONDS = 300.0  # period of the page's compression ratio

# Metrics by their names in the document.
_PER_ENGINE = {
    "compression_ratio": "kvcompress_compression_ratio",
    "most_held_tokens": "kvcompress_most_held_tokens",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
    **{name: f"kvcompress_{name}_total" for name, _ in counters_of(StepStats).values()},
}
_PER_POLICY = {
    "events": "kvcompress_events_total",
    **{name: f"kvcompress_{name}_total" for name, _ in counters_of(EventRecord).values()},
    "event_seconds": "kvcompress_event_seconds_sum",
}
_PER_REASON = {
    "skipped": "kvcompress_skipped_total",
    "forgotten": "kvcompress_states_forgotten_total",
}
_PROMPTS = {
    "requests": "kvcompress_prompt_seconds_count",
    "source_tokens": "kvcompress_prompt_source_tokens_total",
    "kept_tokens": "kvcompress_prompt_kept_tokens_total",
    "seconds": "kvcompress_prompt_seconds_sum",
}
_BY_METRIC = {
    name: (group, key)
    for group in (_PER_ENGINE, _PER_POLICY, _PER_REASON, _PROMPTS)
    for key, name in group.items()
}


def totals(metrics: Iterable[Metric]) -> dict[str, Any]:
    """Adds up metrics of a registry that covers every API server, since the start.

    Returns:
        `engines`: gauges and counters of each; `policies`: counts of each, over all engines;
        `skipped`: events left out, by reason; `forgotten`: dropped states of conversations and
        contexts, by reason; `prompts`: shortened chats of all API servers, empty without any.
    """
    engines: defaultdict[str, dict[str, float]] = defaultdict(dict)
    policies: defaultdict[str, dict[str, float]] = defaultdict(
        lambda: dict.fromkeys(_PER_POLICY, 0)
    )
    reasons: dict[str, defaultdict[str, float]] = {key: defaultdict(float) for key in _PER_REASON}
    prompts: defaultdict[str, float] = defaultdict(float)
    for sample in (sample for metric in metrics for sample in metric.samples):
        group, key = _BY_METRIC.get(sample.name, (None, ""))
        if group is _PER_REASON:
            reasons[key][sample.labels["reason"]] += sample.value
        elif group is _PER_POLICY:
            policies[sample.labels["policy"]][key] += sample.value
        elif group is _PROMPTS:
            prompts[key] += sample.value
        elif group is _PER_ENGINE and "engine" in sample.labels:
            engines[sample.labels["engine"]][key] = sample.value
    return {
        "engines": dict(engines),
        "policies": dict(policies),
        "prompts": dict(prompts),
        **{key: dict(counts) for key, counts in reasons.items()},
    }


class RecentRatio:
    """Compression ratio of the last five minutes, from samples of counters that only grow.

    samples   |---------|---------|  ...  |---------|---- now
              ^ the latest one that is at least five minutes old
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, tuple[float, float]]]] = deque()

    def add(self, now: float, engines: Mapping[str, Mapping[str, float]]) -> None:
        """Remembers the counters of every engine, from `totals`, at a monotonic clock's second."""
        self._samples.append((now, _step_tokens(engines)))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RECENT_SECONDS:
            self._samples.popleft()

    def ratios(self, engines: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
        """Logical over resident tokens since the oldest sample, added up over steps.

        Of every engine in `totals` and, under "all", of all engines; None where no request ran.
        """
        before = self._samples[0][1] if self._samples else {}
        gained = {
            engine: (logical - before_logical, resident - before_resident)
            for engine, (logical, resident) in _step_tokens(engines).items()
            for before_logical, before_resident in [before.get(engine, (0.0, 0.0))]
        }
        gained["all"] = (sum(n for n, _ in gained.values()), sum(n for _, n in gained.values()))
        return {
            name: logical / resident if resident > 0 else None
            for name, (logical, resident) in gained.items()
        }


def _step_tokens(
    engines: Mapping[str, Mapping[str, float]],
) -> dict[str, tuple[float, float]]:
    names = ("step_logical_tokens", "step_resident_tokens")
    return {
        engine: (counts.get(names[0], 0.0), counts.get(names[1], 0.0))
        for engine, counts in engines.items()
    }
