"""The numbers of the status page, against what was recorded."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from vllm_kvcompress.compression.recent_events import NUM_EVENTS
from vllm_kvcompress.config.fields import SETTINGS_KEY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.metrics.prometheus import CompressionMetrics
from vllm_kvcompress.metrics.prompts import PromptMetrics
from vllm_kvcompress.metrics.stats import DurationRecord, EventRecord, SkippedRecord, StepStats
from vllm_kvcompress.metrics.status import RECENT_SECONDS, RecentRatio, totals
from vllm_kvcompress.prompts.shortener import Work
from vllm_kvcompress.vllm_plugin.api_server.status_page import Status, latest_first


def test_counts_add_up_over_engines_and_gauges_do_not() -> None:
    registry = CollectorRegistry()
    metrics = CompressionMetrics(registry)
    settings = Settings(policy="snapkv", request_policies=("keydiff",))
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
            conversations_continued=2,
            continued_tokens=100,
            forgotten={"evicted": 3},
            held_pages=20,
            read_pages=5,
            most_held_tokens=256,
        )
        metrics.observe(step, "tiny", engine)

    document = totals(registry.collect())
    assert document["policies"]["snapkv"] == {
        **{"events": 2, "source_tokens": 1280, "kept_tokens": 320},
        **{"blocks_freed": 40, "blocks_written": 10, "event_seconds": 3},
    }
    assert document["policies"]["keydiff"]["event_seconds"] == 4
    reasons = ("shorter_than_min_tokens", "ends_with_first_token", "short_answer")
    reasons += ("protected_tokens", "error")
    assert document["skipped"] == {"nothing_to_free": 6, **dict.fromkeys(reasons, 0)}
    scored = ("tokens", "changed_tokens", "lost_nats", "gained_nats")
    spilled = ("states_spilled", "states_restored")
    shadows = [f"shadow_{each}" for each in scored]
    assert document["engines"] == {
        "0": {
            **{"compression_ratio": 3, "contexts_reused": 1, "kv_cache_usage": 0.25},
            **{"conversations_continued": 2, "continued_tokens": 100},
            **{"held_pages": 20, "read_pages": 5, "most_held_tokens": 256},
            **dict.fromkeys((*shadows, *spilled), 0),
            **{"step_logical_tokens": 300, "step_resident_tokens": 100},
        },
        "1": {
            **{"compression_ratio": 3, "contexts_reused": 2, "kv_cache_usage": 0.5},
            **{"conversations_continued": 4, "continued_tokens": 200},
            **{"held_pages": 40, "read_pages": 10, "most_held_tokens": 256},
            **dict.fromkeys((*shadows, *spilled), 0),
            **{"step_logical_tokens": 600, "step_resident_tokens": 200},
        },
    }
    others = ("extended", "unfinished_event", "host_full")
    assert document["forgotten"] == {"evicted": 9, **dict.fromkeys(others, 0)}
    assert document["prompts"] == {}


def test_shortened_chats_are_counted_apart_from_engines() -> None:
    registry = CollectorRegistry()
    metrics = PromptMetrics(registry)
    metrics.start("tiny")
    for seconds in (0.25, 0.5):
        metrics.observe(Work(source_tokens=100, kept_tokens=40), seconds, "tiny")
    assert totals(registry.collect())["prompts"] == {
        **{"requests": 2, "source_tokens": 200, "kept_tokens": 80, "seconds": 0.75}
    }


def test_the_ratio_is_that_of_the_last_five_minutes_and_none_while_idle() -> None:
    registry, recent = CollectorRegistry(), RecentRatio()
    metrics = CompressionMetrics(registry)
    for engine in ("0", "1"):
        metrics.start(Settings(policy="snapkv"), "tiny", engine)

    def sample(seconds: float) -> dict[str, float | None]:
        engines = totals(registry.collect())["engines"]
        recent.add(seconds, engines)
        return recent.ratios(engines)

    assert sample(0) == {"0": None, "1": None, "all": None}
    metrics.observe(StepStats(logical_tokens=600, resident_tokens=100), "tiny", "0")
    metrics.observe(StepStats(), "tiny", "0")  # nothing runs any more
    assert sample(30) == {"0": 6, "1": None, "all": 6}
    metrics.observe(StepStats(logical_tokens=200, resident_tokens=100), "tiny", "1")
    assert sample(60) == {"0": 6, "1": 2, "all": 4}
    assert sample(29 + RECENT_SECONDS) == {"0": 6, "1": 2, "all": 4}
    assert sample(30 + RECENT_SECONDS) == {"0": None, "1": 2, "all": 2}
    assert sample(60 + RECENT_SECONDS) == {"0": None, "1": None, "all": None}
    metrics.observe(StepStats(logical_tokens=50, resident_tokens=50), "tiny", "0")
    assert sample(90 + RECENT_SECONDS) == {"0": 1, "1": None, "all": 1}


def test_an_engine_left_to_vllm_is_asked_for_no_events() -> None:
    """Workers of stock vLLM have no events to return, and shorter prompts need none."""
    section = {"policy": "none", "prompts": {"compressor": "llmlingua2:m"}}
    arguments = {"served_model_name": None, "model": "m", "api_key": None}
    args = Namespace(additional_config={SETTINGS_KEY: section}, **arguments)
    document = asyncio.run(Status(None, args).document())
    assert document["events"] == []
    assert document["settings"]["prompts"] == {"compressor": "llmlingua2:m"}


def test_events_of_all_engines_are_in_one_order_with_the_heads_of_all_ranks() -> None:
    def rank_says(engine: int, rank: int) -> list[dict[str, Any]]:
        times = [2 * n + engine for n in reversed(range(NUM_EVENTS))]
        return [{"finished_at": at, "kept_by_head": [[at, rank], [32, 64]]} for at in times]

    engines = {engine: [rank_says(engine, rank) for rank in range(2)] for engine in range(2)}
    events = latest_first(engines)
    last = 2 * NUM_EVENTS - 1
    assert [event["finished_at"] for event in events] == list(range(last, last - NUM_EVENTS, -1))
    for event in events:
        at = event["finished_at"]
        assert event["engine"] == at % 2
        assert event["kept_by_head"] == [[at, 0, at, 1], [32, 64, 32, 64]]
