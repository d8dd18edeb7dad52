"""The numbers behind the status page, against what was recorded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from vllm_kvcompress.config import Settings
from vllm_kvcompress.metrics.prometheus import CompressionMetrics
from vllm_kvcompress.metrics.stats import DurationRecord, EventRecord, SkippedRecord, StepStats
from vllm_kvcompress.metrics.status import totals


def test_counts_add_up_over_engines_and_gauges_do_not() -> None:
    registry = CollectorRegistry()
    metrics = CompressionMetrics(registry)
    settings = Settings("snapkv", request_policies=("keydiff",))
    usage = Gauge("vllm:kv_cache_usage_perc", "", ["model_name", "engine"], registry=registry)
    for engine, share in (("0", 0.25), ("1", 0.5)):
        metrics.start(settings, "tiny", engine)
        usage.labels("tiny", engine).set(share)
    idle = totals(registry.collect())
    assert idle["policies"]["keydiff"]["events"] == 0

    for engine, policy, seconds in (
        ("0", "snapkv", 1.0),
        ("1", "snapkv", 2.0),
        ("1", "keydiff", 4),
    ):
        step = StepStats(
            events=[EventRecord(policy, "prompt", 640, 160, 20, 5)],
            durations=[DurationRecord(policy, seconds)],
            skipped=[SkippedRecord(policy, "nothing_to_free", 2)],
            logical_tokens=300,
            resident_tokens=100,
            contexts_reused=1,
        )
        metrics.observe(step, "tiny", engine)

    found = totals(registry.collect())
    assert found["policies"]["snapkv"] == {
        **{"events": 2, "source_tokens": 1280, "kept_tokens": 320},
        **{"blocks_freed": 40, "blocks_written": 10, "event_seconds": 3},
    }
    assert found["policies"]["keydiff"]["event_seconds"] == 4
    assert found["skipped"] == {"nothing_to_free": 6, "shorter_than_min_tokens": 0, "error": 0}
    assert found["engines"] == {
        "0": {"compression_ratio": 3, "contexts_reused": 1, "kv_cache_usage": 0.25},
        "1": {"compression_ratio": 3, "contexts_reused": 2, "kv_cache_usage": 0.5},
    }
