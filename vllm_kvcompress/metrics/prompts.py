"""Prometheus metrics of shortened prompts, on servers with `--prompt-compressor`.

Useful PromQL:

    rate(kvcompress_prompt_kept_tokens_total[5m]) / rate(kvcompress_prompt_source_tokens_total[5m])
    histogram_quantile(0.99, sum by (le) (rate(kvcompress_prompt_seconds_bucket[5m])))
"""

from __future__ import annotations

import functools

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from vllm_kvcompress.prompts.shortener import Work

_LABELS = ["model_name"]  # no engine takes part
_SECONDS_BUCKETS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60]


class PromptMetrics:
    """Collectors of one registry for shortened prompts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(
                f"kvcompress_prompt_{name}", text, [*_LABELS, *labels], registry=registry
            )

        self.source_tokens = counter(
            "source_tokens",
            "Tokens, as the classifier counts them, of the texts of chat requests that "
            "--prompt-compressor was to shorten.",
        )
        self.kept_tokens = counter(
            "kept_tokens",
            "Tokens out of kvcompress_prompt_source_tokens_total that stayed in the prompts.",
        )
        self.texts = counter(
            "texts",
            "Texts of chat requests that were looked at: remembered=no was read by the classifier, "
            "remembered=yes had been before.",
            "remembered",
        )
        self.seconds = Histogram(
            "kvcompress_prompt_seconds",
            "Seconds that a chat request waited until its messages were shortened, including the "
            "wait for other requests.",
            _LABELS,
            registry=registry,
            buckets=_SECONDS_BUCKETS,
        )

    def start(self, model_name: str) -> None:
        """Shows every series at 0, from the first scrape on."""
        for collector in (self.source_tokens, self.kept_tokens, self.seconds):
            collector.labels(model_name)
        for remembered in ("yes", "no"):
            self.texts.labels(model_name, remembered)

    def observe(self, work: Work, seconds: float, model_name: str) -> None:
        """Adds the work of one request."""
        self.source_tokens.labels(model_name).inc(work.source_tokens)
        self.kept_tokens.labels(model_name).inc(work.kept_tokens)
        self.texts.labels(model_name, "no").inc(work.num_scored)
        self.texts.labels(model_name, "yes").inc(work.num_remembered)
        self.seconds.labels(model_name).observe(seconds)


@functools.cache
def process_prompt_metrics() -> PromptMetrics:
    """Collectors behind this process's /metrics, registered at the first call."""
    return PromptMetrics(REGISTRY)
