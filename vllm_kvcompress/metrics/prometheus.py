"""What compression did, for Prometheus.

Useful PromQL, beside vLLM's own `vllm:` metrics:

    kvcompress_compression_ratio
    rate(kvcompress_step_logical_tokens_total[5m]) / rate(kvcompress_step_resident_tokens_total[5m])
    rate(kvcompress_kept_tokens_total[5m]) / rate(kvcompress_source_tokens_total[5m])
    rate(kvcompress_blocks_freed_total[5m]) - rate(kvcompress_blocks_written_total[5m])
    histogram_quantile(0.99, sum by (le) (rate(kvcompress_event_seconds_bucket[5m])))
    sum by (reason) (rate(kvcompress_skipped_total[5m]))
"""

from __future__ import annotations

import functools

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_kvcompress import __version__
from vllm_kvcompress.config import Settings
from vllm_kvcompress.metrics.stats import (
    EVICTED,
    EXTENDED,
    FORGOTTEN_BECAUSE,
    UNFINISHED,
    EventRecord,
    StepStats,
)
from vllm_kvcompress.scheduling.ledger import SKIP_ERROR, SKIP_NOTHING_TO_FREE, SKIP_SHORT

_LABELS = ["model_name", "engine"]  # as vLLM's own metrics
_POLICY = ["policy"]  # all but the ratio tell the policies of requests apart
_FRACTION_BUCKETS = [0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0]
_SECONDS_BUCKETS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]


class _Make:
    """Collectors of one registry, with vLLM's labels before their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, extra_labels: list[str] | None = None) -> Counter:
        labels = _LABELS + (extra_labels or [])
        return Counter(name, text, labelnames=labels, registry=self._registry)

    def gauge(self, name: str, text: str, extra_labels: list[str] | None = None) -> Gauge:
        return Gauge(
            name,
            text,
            labelnames=_LABELS + (extra_labels or []),
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )

    def histogram(
        self, name: str, text: str, buckets: list[float], extra_labels: list[str] | None = None
    ) -> Histogram:
        labels = _LABELS + (extra_labels or [])
        return Histogram(name, text, labelnames=labels, registry=self._registry, buckets=buckets)


class ServerCollectors:
    """What is set for the server, and what its running requests hold."""

    def __init__(self, make: _Make) -> None:
        self.info = make.gauge(
            "kvcompress_info",
            "Always 1. The compression settings of this server and the version of vllm-kvcompress "
            "are in the labels; budget is a fraction of the prompt (with a decimal point) or "
            "tokens per KV head.",
            ["policy", "budget", "trigger", "version"],
        )
        self.compression_ratio = make.gauge(
            "kvcompress_compression_ratio",
            "Logical tokens of the running requests divided by the tokens per KV head (mean over "
            "heads and layers) that are resident in the KV cache for them. 1 = nothing is "
            "compressed or nothing runs; 4 = a quarter is resident.",
        )
        self.step_logical_tokens = make.counter(
            "kvcompress_step_logical_tokens",
            "Logical tokens of the running requests, added up over steps.",
        )
        self.step_resident_tokens = make.counter(
            "kvcompress_step_resident_tokens",
            "Tokens per KV head (mean over heads and layers) that are resident in the KV cache for "
            "the tokens of kvcompress_step_logical_tokens_total, added up over steps. Logical over "
            "resident = the compression ratio of a period.",
        )
        self.reclaimable_blocks = make.gauge(
            "kvcompress_reclaimable_blocks",
            "KV cache blocks that the pressure trigger would gain if it compressed all running "
            "requests now: in use, and to be had. 0 = nothing to gain, or another trigger.",
        )

    def start(self, settings: Settings, labels: tuple[str, str]) -> None:
        """Shows the settings, and nothing compressed."""
        own = (settings.policy, str(settings.budget), settings.trigger, __version__)
        self.info.labels(*labels, *own).set(1)
        self.compression_ratio.labels(*labels).set(1)
        self.step_logical_tokens.labels(*labels)
        self.step_resident_tokens.labels(*labels)
        self.reclaimable_blocks.labels(*labels).set(0)

    def observe(self, stats: StepStats, labels: tuple[str, str]) -> None:
        """Shows one step of one engine."""
        self.compression_ratio.labels(*labels).set(stats.compression_ratio)
        self.step_logical_tokens.labels(*labels).inc(stats.logical_tokens)
        self.step_resident_tokens.labels(*labels).inc(stats.resident_tokens)
        self.reclaimable_blocks.labels(*labels).set(stats.reclaimable_blocks)


class EventCollectors:
    """Compression events: how many, of what, for how long, and those left out."""

    def __init__(self, make: _Make) -> None:
        self.events = make.counter(
            "kvcompress_events",
            "Number of compression events: one request compressed once, in all layers, by policy "
            "and by what triggered it (prompt, chunk, decode, pressure, or a request to prepare).",
            ["policy", "trigger"],
        )
        self.source_tokens = make.counter(
            "kvcompress_source_tokens",
            "Tokens per KV head (mean over heads and layers) that compression events read; the "
            "partial last block of a request takes no part.",
            _POLICY,
        )
        self.kept_tokens = make.counter(
            "kvcompress_kept_tokens",
            "Tokens per KV head (mean over heads and layers) that compression events kept, out of "
            "kvcompress_source_tokens_total.",
            _POLICY,
        )
        self.blocks_freed = make.counter(
            "kvcompress_blocks_freed",
            "KV cache blocks that compression events handed back to vLLM's allocator.",
            _POLICY,
        )
        self.blocks_written = make.counter(
            "kvcompress_blocks_written",
            "Fresh KV cache blocks that compression events allocated and filled with what they "
            "kept. Freed minus written = blocks gained.",
            _POLICY,
        )
        self.skipped = make.counter(
            "kvcompress_skipped",
            "Number of compression events that a trigger called for but that were left out, by "
            f"reason: {SKIP_SHORT} = fewer logical tokens than min_tokens; "
            f"{SKIP_NOTHING_TO_FREE} = the budget is no smaller than what the request holds; "
            f"{SKIP_ERROR} = the policy failed, and the request ended with an error.",
            ["policy", "reason"],
        )
        self.kept_fraction = make.histogram(
            "kvcompress_kept_fraction",
            "Fraction of its source tokens that a compression event kept, per event; between 0 "
            "and 1.",
            _FRACTION_BUCKETS,
            _POLICY,
        )
        self.event_seconds = make.histogram(
            "kvcompress_event_seconds",
            "Seconds that a compression event took in the worker: scoring, selecting and writing, "
            "summed over layers, on the first rank.",
            _SECONDS_BUCKETS,
            _POLICY,
        )

    def start(self, settings: Settings, labels: tuple[str, str]) -> None:
        """Every series of the policies that requests may have."""
        for policy in settings.policies:
            own = (*labels, policy)
            for trigger in settings.triggers:
                self.events.labels(*own, trigger.kind)
            for reason in (SKIP_SHORT, SKIP_NOTHING_TO_FREE, SKIP_ERROR):
                self.skipped.labels(*own, reason)
            for collector in (
                *(self.source_tokens, self.kept_tokens),
                *(self.blocks_freed, self.blocks_written),
                *(self.kept_fraction, self.event_seconds),
            ):
                collector.labels(*own)

    def observe(self, stats: StepStats, labels: tuple[str, str]) -> None:
        """Adds one step of one engine."""
        for skipped in stats.skipped:
            self.skipped.labels(*labels, skipped.policy, skipped.reason).inc(skipped.count)
        for event in stats.events:
            self._observe_event(event, labels)
        for duration in stats.durations:
            self.event_seconds.labels(*labels, duration.policy).observe(duration.seconds)

    def _observe_event(self, event: EventRecord, labels: tuple[str, str]) -> None:
        own = (*labels, event.policy)
        self.events.labels(*own, event.trigger).inc()
        self.source_tokens.labels(*own).inc(event.source_tokens)
        self.kept_tokens.labels(*own).inc(event.resident_tokens)
        self.blocks_freed.labels(*own).inc(event.blocks_freed)
        self.blocks_written.labels(*own).inc(event.blocks_written)
        self.kept_fraction.labels(*own).observe(event.resident_tokens / event.source_tokens)


class ReadingCollectors:
    """Decode steps that read a part of what is held."""

    def __init__(self, make: _Make) -> None:
        self.held_pages = make.counter(
            "kvcompress_held_pages",
            "Pages (blocks of a KV head) per KV head, mean over heads and layers, that decoding "
            "requests held, added up over steps; 0 without --kv-read.",
        )
        self.read_pages = make.counter(
            "kvcompress_read_pages",
            "Pages (blocks of a KV head) per KV head, out of kvcompress_held_pages_total, that "
            "decode steps read.",
        )
        self.read_fraction = make.histogram(
            "kvcompress_read_fraction",
            "Fraction of the held pages that a decode step read, per step; between 0 and 1.",
            _FRACTION_BUCKETS,
        )

    def start(self, labels: tuple[str, str]) -> None:
        """Every series, at nothing."""
        for collector in (self.held_pages, self.read_pages, self.read_fraction):
            collector.labels(*labels)

    def observe(self, stats: StepStats, labels: tuple[str, str]) -> None:
        """Adds one step of one engine."""
        if stats.held_pages:
            self.held_pages.labels(*labels).inc(stats.held_pages)
            self.read_pages.labels(*labels).inc(stats.read_pages)
            self.read_fraction.labels(*labels).observe(stats.read_pages / stats.held_pages)


class KeptStateCollectors:
    """Contexts and conversations whose compressed state is kept for later requests."""

    def __init__(self, make: _Make) -> None:
        self.contexts_reused = make.counter(
            "kvcompress_contexts_reused",
            "Number of requests that began with a context which an earlier request had "
            "compressed, and did not read it again.",
        )
        self.conversations_continued = make.counter(
            "kvcompress_conversations_continued",
            "Number of requests that went on from what an earlier turn of their conversation had "
            "left, compressed (--kv-reuse-conversations).",
        )
        self.continued_tokens = make.counter(
            "kvcompress_continued_tokens",
            "Tokens of prompts that were neither read nor compressed again, since a conversation "
            "was continued.",
        )
        self.states_forgotten = make.counter(
            "kvcompress_states_forgotten",
            "Number of compressed states that were kept for later requests and are no more, by "
            f"reason: {EVICTED} = vLLM needed a block of it; {EXTENDED} = a longer state of the "
            f"same conversation took its place; {UNFINISHED} = the request ended in the middle of "
            "a compression event, and nothing was kept.",
            ["reason"],
        )

    def start(self, labels: tuple[str, str]) -> None:
        """Every series, at nothing."""
        self.contexts_reused.labels(*labels)
        self.conversations_continued.labels(*labels)
        self.continued_tokens.labels(*labels)
        for reason in FORGOTTEN_BECAUSE:
            self.states_forgotten.labels(*labels, reason)

    def observe(self, stats: StepStats, labels: tuple[str, str]) -> None:
        """Adds one step of one engine."""
        self.contexts_reused.labels(*labels).inc(stats.contexts_reused)
        self.conversations_continued.labels(*labels).inc(stats.conversations_continued)
        self.continued_tokens.labels(*labels).inc(stats.continued_tokens)
        for reason, count in stats.forgotten.items():
            self.states_forgotten.labels(*labels, reason).inc(count)


class CompressionMetrics:
    """The collectors of one registry.

    With several API server processes each step's statistics reach exactly one of them, so
    counters and histograms add up over processes, and of a gauge the latest value counts.

    Args:
        registry: where the collectors are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Make(registry)
        self.server = ServerCollectors(make)
        self.events = EventCollectors(make)
        self.reading = ReadingCollectors(make)
        self.kept_states = KeptStateCollectors(make)

    def start(self, settings: Settings, model_name: str, engine: str) -> None:
        """Shows the settings, and every series at its starting value, from the first scrape on."""
        labels = (model_name, engine)
        self.server.start(settings, labels)
        self.events.start(settings, labels)
        self.reading.start(labels)
        self.kept_states.start(labels)

    def observe(self, stats: StepStats, model_name: str, engine: str) -> None:
        """Adds one step of one engine."""
        labels = (model_name, engine)
        self.server.observe(stats, labels)
        self.events.observe(stats, labels)
        self.reading.observe(stats, labels)
        self.kept_states.observe(stats, labels)


@functools.cache
def process_metrics() -> CompressionMetrics:
    """The collectors behind this process's /metrics, registered at the first call."""
    return CompressionMetrics(REGISTRY)
