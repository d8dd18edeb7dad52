"""What /metrics says of compression, as one document for people and scripts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from prometheus_client import Metric

# By their names in the document.
_PER_ENGINE = {
    "compression_ratio": "kvcompress_compression_ratio",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
    "contexts_reused": "kvcompress_contexts_reused_total",
    "conversations_continued": "kvcompress_conversations_continued_total",
    "continued_tokens": "kvcompress_continued_tokens_total",
    "held_pages": "kvcompress_held_pages_total",
    "read_pages": "kvcompress_read_pages_total",
}
_PER_POLICY = {
    "events": "kvcompress_events_total",
    "source_tokens": "kvcompress_source_tokens_total",
    "kept_tokens": "kvcompress_kept_tokens_total",
    "blocks_freed": "kvcompress_blocks_freed_total",
    "blocks_written": "kvcompress_blocks_written_total",
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
_PLACES = {
    name: (group, key)
    for group in (_PER_ENGINE, _PER_POLICY, _PER_REASON, _PROMPTS)
    for key, name in group.items()
}


def totals(metrics: Iterable[Metric]) -> dict[str, Any]:
    """Numbers by engine, by policy and by reason, since the start.

    Args:
        metrics: of a registry that covers every API server.

    Returns:
        `engines`: gauges and counters of each; `policies`: counts of each, over all engines;
        `skipped`: events left out, by reason; `forgotten`: states of conversations and contexts
        that are kept no more, by reason; `prompts`: chats that were shortened, in all API servers,
        empty where none are.
    """
    engines: defaultdict[str, dict[str, float]] = defaultdict(dict)
    policies: defaultdict[str, dict[str, float]] = defaultdict(
        lambda: dict.fromkeys(_PER_POLICY, 0)
    )
    reasons: dict[str, defaultdict[str, float]] = {key: defaultdict(float) for key in _PER_REASON}
    prompts: defaultdict[str, float] = defaultdict(float)
    for sample in (sample for metric in metrics for sample in metric.samples):
        group, key = _PLACES.get(sample.name, (None, ""))
        if group is _PER_REASON:
            reasons[key][sample.labels["reason"]] += sample.value
        elif group is _PER_POLICY:
            policies[sample.labels["policy"]][key] += sample.value
        elif group is _PROMPTS:
            prompts[key] += sample.value
        elif group is _PER_ENGINE and "engine" in sample.labels:
            engines[sample.labels["engine"]][key] = sample.value
    counted = {key: dict(counts) for key, counts in reasons.items()}
    found = {"engines": dict(engines), "policies": dict(policies), "prompts": dict(prompts)}
    return {**found, **counted}
