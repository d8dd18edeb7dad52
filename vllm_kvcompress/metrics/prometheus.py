"""Prometheus metrics of compression.

Useful PromQL, besides vLLM's own `vllm:` metrics:

    kvcompress_compression_ratio
    rate(kvcompress_step_logical_tokens_total[5m]) / rate(kvcompress_step_resident_tokens_total[5m])
    rate(kvcompress_kept_tokens_total[5m]) / rate(kvcompress_source_tokens_total[5m])
    rate(kvcompress_blocks_freed_total[5m]) - rate(kvcompress_blocks_written_total[5m])
    histogram_quantile(0.99, sum by (le) (rate(kvcompress_event_seconds_bucket[5m])))
    sum by (reason) (rate(kvcompress_skipped_total[5m]))
    (rate(kvcompress_shadow_lost_nats_total[1h]) - rate(kvcompress_shadow_gained_nats_total[1h]))
        / rate(kvcompress_shadow_tokens_total[1h])
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_kvcompress import __version__
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.metrics.stats import (
    AFTER_FIRST_TOKEN,
    AT_ONCE_FOR_BUFFERS,
    AT_ONCE_FOR_ROOM,
    EVICTED,
    EXTENDED,
    FORGOTTEN_BECAUSE,
    HOST_FULL,
    SHADOW_DROPPED,
    SHADOW_FAILED,
    SHADOW_OUTCOMES,
    SHADOW_SCORED,
    SHADOW_UNCOMPRESSED,
    UNFINISHED,
    EventRecord,
    StepStats,
    counters_of,
)
from vllm_kvcompress.scheduling.ledger import SKIP_REASONS
from vllm_kvcompress.scheduling.rule import TRIGGER_CEILING, TRIGGER_REASONING

_LABELS = ("model_name", "engine")  # of every metric, as of vLLM's
_FRACTION_BUCKETS = [0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0]
_NATS_BUCKETS = [0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
_CHANGED_BUCKETS = [0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1]
_SECONDS_BUCKETS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]

_OF_STEPS = (  # gauges that every step sets
    *("compression_ratio", "reclaimable_blocks", "most_held_tokens"),
    *("spilled_states", "spilled_tokens", "spilled_bytes"),
)
T = TypeVar("T", Counter, Gauge, Histogram)

# All without their prefix, "kvcompress_".
_GAUGES = {  # with the labels that follow the text
    "info": (
        "Always 1. The compression settings of this server and the version of vllm-kvcompress "
        "are in the labels; budget is a fraction of the prompt (with a decimal point) or "
        "tokens per KV head.",
        *("policy", "budget", "trigger", "version"),
    ),
    "heads_info": (
        "Always 1. The label says where the measured heads come from by which budgets are divided: "
        "file, model folder, cache (an earlier start), measured now, or none. Servers with the "
        "status page have it.",
        "source",
    ),
    "promised_loss": (
        "Nats per token that answers are promised to lose at most in the mean, by --kv-budget "
        "loss:F or --kv-promised-loss; without these there is no such series.",
    ),
    "compression_ratio": (
        "Logical tokens of the running requests divided by the tokens per KV head (mean over heads "
        "and layers) that are resident in the KV cache for them. 1 = nothing is compressed or "
        "nothing runs; 4 = a quarter is resident.",
    ),
    "reclaimable_blocks": (
        "KV cache blocks that the pressure trigger would gain if it compressed all running "
        "requests now: in use, and to be had. 0 = nothing to gain, or another trigger.",
    ),
    "most_held_tokens": (
        "Tokens per KV head (mean over heads and layers) that the largest request held after a "
        "step, since the engine started: with --kv-ceiling at most that and a block.",
    ),
    "spilled_states": (
        "Kept states of contexts and conversations with a copy in host memory (--kv-spill), those "
        "that are back in the KV cache included.",
    ),
    "spilled_tokens": ("Tokens that the states in host memory stand for, uncompressed.",),
    "spilled_bytes": ("Bytes of the states in host memory, over all ranks of the engine.",),
}
_COUNTERS = {  # with the labels that follow the text
    "events": (
        "Number of compression events: one request compressed once, in all layers, by policy "
        "and by what triggered it (prompt, chunk, decode, pressure, ceiling, reasoning, or a "
        "request to prepare).",
        *("policy", "trigger"),
    ),
    "skipped": (
        "Number of compression events that a trigger called for but that were left out, by "
        f"reason: {'; '.join(f'{name} = {text}' for name, text in SKIP_REASONS.items())}.",
        *("policy", "reason"),
    ),
    "event_timing": (
        "Number of compression events at the end of a prompt, by when they ran: "
        f"{AFTER_FIRST_TOKEN} = in the step behind the one that sampled the first token; "
        f"{AT_ONCE_FOR_ROOM} = before it, since the next waiting request needed the blocks; "
        f"{AT_ONCE_FOR_BUFFERS} = before it, since all buffers for last queries were in use.",
        "timing",
    ),
    "states_forgotten": (
        "Number of compressed states that were kept for later requests and then dropped, by "
        f"reason: {EVICTED} = vLLM needed one of its blocks; {EXTENDED} = a longer state of "
        f"the same conversation replaced it; {UNFINISHED} = the request ended during a "
        f"compression event, and nothing was kept; {HOST_FULL} = host memory has newer ones "
        "(--kv-spill).",
        "reason",
    ),
    "shadow_answers": (
        "Number of answers that --kv-shadow sampled, by what became of them: "
        f"{SHADOW_SCORED} = scored again with the full cache; {SHADOW_UNCOMPRESSED} = not scored, "
        f"since nothing had been compressed; {SHADOW_DROPPED} = not scored, since too many waited "
        f"or the pool is too small; {SHADOW_FAILED} = scores were missing.",
        "outcome",
    ),
}
_HISTOGRAMS: dict[str, tuple[str, list[float], *tuple[str, ...]]] = {  # with buckets and labels
    "kept_fraction": (
        "Fraction of its source tokens that a compression event kept, per event; between 0 and 1.",
        *(_FRACTION_BUCKETS, "policy"),
    ),
    "event_seconds": (
        "Seconds that a compression event took in the worker: scoring, selecting and writing, "
        "summed over layers, on the first rank.",
        *(_SECONDS_BUCKETS, "policy"),
    ),
    "shadow_loss": (
        "Loss of answers scored again with the full cache, in nats per token, per answer: the mean "
        "of log p_compressed - log p_full of their tokens; a gain counts as 0.",
        _NATS_BUCKETS,
    ),
    "shadow_changed_fraction": (
        "Fraction of the tokens of answers scored again at whose position the full cache has "
        "another best candidate, per answer.",
        _CHANGED_BUCKETS,
    ),
    "read_fraction": (
        "Fraction of the held pages that a decode step read, per step; between 0 and 1.",
        _FRACTION_BUCKETS,
    ),
}


class CompressionMetrics:
    """Collectors of one registry.

    With several API server processes each step's statistics reach exactly one of them, so counters
    and histograms add up over processes, and gauges take the latest value.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def make(kind: type[T], name: str, text: str, *labels: str, **more: Any) -> T:
            names = [*_LABELS, *labels]
            return kind(f"kvcompress_{name}", text, names, registry=registry, **more)

        self.gauges = {
            name: make(Gauge, name, *about, multiprocess_mode="mostrecent")
            for name, about in _GAUGES.items()
        }
        self.step_counters = {
            field: make(Counter, *about) for field, about in counters_of(StepStats).items()
        }
        self.event_counters = {
            field: make(Counter, *about, "policy")
            for field, about in counters_of(EventRecord).items()
        }
        self.counters = {name: make(Counter, name, *about) for name, about in _COUNTERS.items()}
        self.histograms = {
            name: make(Histogram, name, text, *labels, buckets=buckets)
            for name, (text, buckets, *labels) in _HISTOGRAMS.items()
        }

    def start(self, settings: Settings, model_name: str, engine: str) -> None:
        """Shows the settings, and every series at its starting value, from the first scrape on."""
        labels = (model_name, engine)
        about = (settings.policy, str(settings.budget), settings.trigger, __version__)
        self.gauges["info"].labels(*labels, *about).set(1)
        if settings.promised_loss is not None:
            self.gauges["promised_loss"].labels(*labels).set(settings.promised_loss)
        self._set_gauges(StepStats(), labels)
        for collector in (*self.step_counters.values(), self.histograms["read_fraction"]):
            collector.labels(*labels)
        for reason in FORGOTTEN_BECAUSE:
            self.counters["states_forgotten"].labels(*labels, reason)
        for timing in (AFTER_FIRST_TOKEN, AT_ONCE_FOR_ROOM, AT_ONCE_FOR_BUFFERS):
            self.counters["event_timing"].labels(*labels, timing)
        if settings.shadow:
            for name in ("shadow_loss", "shadow_changed_fraction"):
                self.histograms[name].labels(*labels)
            for outcome in SHADOW_OUTCOMES:
                self.counters["shadow_answers"].labels(*labels, outcome)
        for policy in settings.policies:
            kinds: list[str] = []
            if settings.budget != 1.0:
                kinds += [trigger.kind for trigger in settings.triggers]
            kinds += [TRIGGER_CEILING] * (settings.ceiling is not None)
            kinds += [TRIGGER_REASONING] * (settings.after_reasoning is not None)
            for kind in kinds:
                self.counters["events"].labels(*labels, policy, kind)
            for reason in SKIP_REASONS:
                self.counters["skipped"].labels(*labels, policy, reason)
            for counter in self.event_counters.values():
                counter.labels(*labels, policy)
            for name in ("kept_fraction", "event_seconds"):
                self.histograms[name].labels(*labels, policy)

    def show_heads(self, source: str, model_name: str, engine: str) -> None:
        """Shows where an engine's measured heads come from."""
        self.gauges["heads_info"].labels(model_name, engine, source).set(1)

    def observe(self, stats: StepStats, model_name: str, engine: str) -> None:
        """Adds one step of one engine."""
        labels = (model_name, engine)
        self._set_gauges(stats, labels)
        for field, counter in self.step_counters.items():
            counter.labels(*labels).inc(getattr(stats, field))
        for reason, count in stats.forgotten.items():
            self.counters["states_forgotten"].labels(*labels, reason).inc(count)
        for timing, count in stats.prompt_events.items():
            self.counters["event_timing"].labels(*labels, timing).inc(count)
        for left_out in stats.skipped:
            why = (left_out.policy, left_out.reason)
            self.counters["skipped"].labels(*labels, *why).inc(left_out.count)
        for event in stats.events:
            self._observe_event(event, labels)
        for outcome, count in stats.shadow_outcomes.items():
            self.counters["shadow_answers"].labels(*labels, outcome).inc(count)
        for answer in stats.shadows:
            loss = max(0.0, answer.lost_nats / answer.num_tokens)
            self.histograms["shadow_loss"].labels(*labels).observe(loss)
            changed = answer.num_changed / answer.num_tokens
            self.histograms["shadow_changed_fraction"].labels(*labels).observe(changed)
        seconds, read_fraction = self.histograms["event_seconds"], self.histograms["read_fraction"]
        for duration in stats.durations:
            seconds.labels(*labels, duration.policy).observe(duration.seconds)
        if stats.held_pages:
            read_fraction.labels(*labels).observe(stats.read_pages / stats.held_pages)

    def _set_gauges(self, stats: StepStats, labels: tuple[str, str]) -> None:
        for name in _OF_STEPS:
            self.gauges[name].labels(*labels).set(getattr(stats, name))

    def _observe_event(self, event: EventRecord, labels: tuple[str, str]) -> None:
        self.counters["events"].labels(*labels, event.policy, event.trigger).inc()
        for field, counter in self.event_counters.items():
            counter.labels(*labels, event.policy).inc(getattr(event, field))
        kept_fraction = event.resident_tokens / event.source_tokens
        self.histograms["kept_fraction"].labels(*labels, event.policy).observe(kept_fraction)


@functools.cache
def process_metrics() -> CompressionMetrics:
    """Collectors behind this process's /metrics, registered at the first call."""
    return CompressionMetrics(REGISTRY)
