from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_kvcompress import __version__
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.metrics.prometheus import CompressionMetrics
from vllm_kvcompress.metrics.stats import (
    FORGOTTEN_BECAUSE,
    DurationRecord,
    EventRecord,
    ShadowRecord,
    SkippedRecord,
    StepStats,
)

SETTINGS = Settings(policy="adakv+criticalkv", budget=0.25, trigger="prompt,decode:64", shadow=0.5)
LABELS = {"model_name": "m", "engine": "0"}
OWN = {**LABELS, "policy": "adakv+criticalkv"}
STEP = StepStats(
    events=[
        EventRecord("adakv+criticalkv", "prompt", 1024, 256, 32, 8),
        EventRecord("adakv+criticalkv", "decode", 512, 256, 16, 8),
    ],
    durations=[
        DurationRecord("adakv+criticalkv", 0.125),
        DurationRecord("adakv+criticalkv", 0.5),
    ],
    skipped=[SkippedRecord("adakv+criticalkv", "nothing_to_free", 3)],
    logical_tokens=1200,
    resident_tokens=300,
    contexts_reused=2,
    conversations_continued=3,
    continued_tokens=700,
    forgotten={"evicted": 4},
    reclaimable_blocks=24,
    most_held_tokens=1024,
    spilled_states=2,
    spilled_tokens=800,
    spilled_bytes=4096,
    states_spilled=5,
    states_restored=1,
    held_pages=40,
    read_pages=10,
)
STEP.add_shadow(ShadowRecord(40, 10.0, 4))
STEP.add_shadow(ShadowRecord(10, -1.0, 0))
STEP.count_shadow("scored")
STEP.count_shadow("scored")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_every_series_is_there_before_the_first_event(registry: CollectorRegistry) -> None:
    CompressionMetrics(registry).start(SETTINGS, "m", "0")
    value = registry.get_sample_value
    info = {"policy": "adakv+criticalkv", "budget": "0.25", "trigger": "prompt,decode:64"}
    assert value("kvcompress_info", {**LABELS, **info, "version": __version__}) == 1
    assert value("kvcompress_compression_ratio", LABELS) == 1
    assert value("kvcompress_reclaimable_blocks", LABELS) == 0
    for name in ("logical", "resident"):
        assert value(f"kvcompress_step_{name}_tokens_total", LABELS) == 0
    for trigger in ("prompt", "decode"):
        labels = {**OWN, "trigger": trigger}
        assert value("kvcompress_events_total", labels) == 0
    for reason in ("shorter_than_min_tokens", "nothing_to_free", "error"):
        assert value("kvcompress_skipped_total", {**OWN, "reason": reason}) == 0
    for reason in FORGOTTEN_BECAUSE:
        assert value("kvcompress_states_forgotten_total", {**LABELS, "reason": reason}) == 0
    for outcome in ("scored", "uncompressed", "dropped", "failed"):
        assert value("kvcompress_shadow_answers_total", {**LABELS, "outcome": outcome}) == 0
    for name in ("shadow_loss", "shadow_changed_fraction"):
        assert value(f"kvcompress_{name}_count", LABELS) == 0
    for name in ("source_tokens", "kept_tokens", "blocks_freed", "blocks_written"):
        assert value(f"kvcompress_{name}_total", OWN) == 0
    for name in ("kept_fraction", "event_seconds"):
        assert value(f"kvcompress_{name}_count", OWN) == 0


def test_steps_add_up_and_the_gauge_follows_the_last(registry: CollectorRegistry) -> None:
    metrics = CompressionMetrics(registry)
    metrics.observe(STEP, "m", "0")
    assert registry.get_sample_value("kvcompress_compression_ratio", LABELS) == 4
    assert registry.get_sample_value("kvcompress_reclaimable_blocks", LABELS) == 24
    assert registry.get_sample_value("kvcompress_most_held_tokens", LABELS) == 1024
    for name, number in (("states", 2), ("tokens", 800), ("bytes", 4096)):
        assert registry.get_sample_value(f"kvcompress_spilled_{name}", LABELS) == number
    for name, number in (("spilled", 5), ("restored", 1)):
        name = f"kvcompress_states_{name}_total"
        assert registry.get_sample_value(name, LABELS) == number
    metrics.observe(STEP, "m", "0")
    metrics.observe(StepStats(), "m", "0")
    value = registry.get_sample_value
    assert value("kvcompress_compression_ratio", LABELS) == 1
    assert value("kvcompress_reclaimable_blocks", LABELS) == 0
    for trigger in ("prompt", "decode"):
        labels = {**OWN, "trigger": trigger}
        assert value("kvcompress_events_total", labels) == 2
    assert value("kvcompress_skipped_total", {**OWN, "reason": "nothing_to_free"}) == 6
    assert value("kvcompress_source_tokens_total", OWN) == 2 * (1024 + 512)
    assert value("kvcompress_kept_tokens_total", OWN) == 2 * (256 + 256)
    assert value("kvcompress_blocks_freed_total", OWN) == 2 * (32 + 16)
    assert value("kvcompress_blocks_written_total", OWN) == 2 * (8 + 8)
    assert value("kvcompress_step_logical_tokens_total", LABELS) == 2 * 1200
    assert value("kvcompress_step_resident_tokens_total", LABELS) == 2 * 300
    assert value("kvcompress_contexts_reused_total", LABELS) == 2 * 2
    assert value("kvcompress_conversations_continued_total", LABELS) == 2 * 3
    assert value("kvcompress_continued_tokens_total", LABELS) == 2 * 700
    assert value("kvcompress_states_forgotten_total", {**LABELS, "reason": "evicted"}) == 2 * 4
    assert value("kvcompress_held_pages_total", LABELS) == 2 * 40
    assert value("kvcompress_read_pages_total", LABELS) == 2 * 10
    assert value("kvcompress_read_fraction_sum", LABELS) == 2 * 0.25
    assert value("kvcompress_read_fraction_count", LABELS) == 2
    assert value("kvcompress_shadow_answers_total", {**LABELS, "outcome": "scored"}) == 2 * 2
    assert value("kvcompress_shadow_tokens_total", LABELS) == 2 * 50
    assert value("kvcompress_shadow_changed_tokens_total", LABELS) == 2 * 4
    assert value("kvcompress_shadow_lost_nats_total", LABELS) == 2 * 10
    assert value("kvcompress_shadow_gained_nats_total", LABELS) == 2 * 1
    assert value("kvcompress_shadow_loss_sum", LABELS) == 2 * 0.25
    assert value("kvcompress_shadow_loss_bucket", {**LABELS, "le": "0.0"}) == 2
    assert value("kvcompress_shadow_loss_count", LABELS) == 2 * 2
    assert value("kvcompress_shadow_changed_fraction_sum", LABELS) == 2 * 0.1
    assert value("kvcompress_kept_fraction_sum", OWN) == 2 * (0.25 + 0.5)
    assert value("kvcompress_kept_fraction_bucket", {**OWN, "le": "0.25"}) == 2
    assert value("kvcompress_event_seconds_sum", OWN) == 2 * (0.125 + 0.5)


def test_engines_are_counted_apart(registry: CollectorRegistry) -> None:
    metrics = CompressionMetrics(registry)
    metrics.observe(STEP, "m", "0")
    metrics.observe(StepStats(logical_tokens=2, resident_tokens=1), "m", "1")
    second = {**LABELS, "engine": "1"}
    assert registry.get_sample_value("kvcompress_compression_ratio", LABELS) == 4
    assert registry.get_sample_value("kvcompress_compression_ratio", second) == 2
    second = {**OWN, "engine": "1"}
    assert registry.get_sample_value("kvcompress_source_tokens_total", second) is None


def test_every_metric_has_our_prefix_and_a_unit(registry: CollectorRegistry) -> None:
    """vLLM unregisters every collector that starts with its own prefix."""
    CompressionMetrics(registry).start(SETTINGS, "m", "0")
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    units = ("token", "block", "byte", "states", "number of", "second", "fraction", "always 1")
    for family in families:
        assert family.name.startswith("kvcompress_")
        if not family.name.endswith("_created"):
            assert any(unit in family.documentation.lower() for unit in units), family.name
    assert len([f for f in families if not f.name.endswith("_created")]) == 36


WRITER = """
import sys
from prometheus_client import REGISTRY
from tests.metrics.test_metrics import SETTINGS, STEP
from vllm_kvcompress.metrics.prometheus import process_metrics
from vllm_kvcompress.metrics.stats import StepStats

metrics = process_metrics()
metrics.start(SETTINGS, "m", "0")
for _ in range(int(sys.argv[1])):
    metrics.observe(STEP, "m", "0")
if len(sys.argv) > 2:
    metrics.observe(StepStats(logical_tokens=2, resident_tokens=1), "m", "0")
"""
READER = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_processes_add_up_and_the_latest_gauge_counts(tmp_path: Path) -> None:
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    root = Path(__file__).parents[2]

    def python(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, check=True
        )
        return done.stdout

    python(WRITER, "2")
    python(WRITER, "1", "then a ratio of 2")
    text = python(READER)
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["kvcompress_source_tokens_total", frozenset(OWN.items())] == 3 * (1024 + 512)
    assert samples["kvcompress_compression_ratio", frozenset(LABELS.items())] == 2
    infos = [value for (name, _), value in samples.items() if name == "kvcompress_info"]
    assert infos == [1]
    assert "HELP kvcompress_blocks_freed_total KV cache blocks" in text


def vllm_config(section: dict[str, object] | None) -> SimpleNamespace:
    """The parts of vLLM's configuration that the logger reads, as `serve` fills them."""
    from vllm_kvcompress.vllm_plugin.compat.options import plugin_options

    additional = {} if section is None else {"kvcompress": section}
    paths = plugin_options(SETTINGS)
    return SimpleNamespace(
        additional_config=additional,
        model_config=SimpleNamespace(served_model_name="m"),
        scheduler_config=SimpleNamespace(scheduler_cls=paths["scheduler_cls"]),
        parallel_config=SimpleNamespace(worker_cls=paths["worker_cls"]),
    )


@pytest.fixture
def process_registry(monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry):
    """Replaces the process's registry by another."""
    metrics = CompressionMetrics(registry)
    monkeypatch.setattr("vllm_kvcompress.metrics.prometheus.process_metrics", lambda: metrics)
    return registry


def test_logger_takes_steps_from_vllms_statistics(process_registry: CollectorRegistry) -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_kvcompress.vllm_plugin.api_server.stat_logger import CompressionStatLogger
    from vllm_kvcompress.vllm_plugin.compat.messages import attach_stats

    logger = CompressionStatLogger(vllm_config(SETTINGS.to_dict()), [0, 1])
    stats = SchedulerStats()
    attach_stats(stats, STEP.to_dict())
    logger.record(stats, None, engine_idx=1)
    logger.record(None, None, engine_idx=1)
    logger.record(SchedulerStats(), None, engine_idx=1)
    value = process_registry.get_sample_value
    assert value("kvcompress_compression_ratio", {**LABELS, "engine": "1"}) == 4
    assert value("kvcompress_blocks_freed_total", {**OWN, "engine": "1"}) == 48
    assert value("kvcompress_blocks_freed_total", OWN) == 0


@pytest.mark.parametrize("section", [None, {"policy": "none", "budget": 0.5}])
def test_logger_registers_nothing_without_a_policy(
    section: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_kvcompress.vllm_plugin.api_server.stat_logger import CompressionStatLogger

    def refuse() -> None:
        raise AssertionError("collectors were registered")

    monkeypatch.setattr("vllm_kvcompress.metrics.prometheus.process_metrics", refuse)
    logger = CompressionStatLogger(vllm_config(section), [0])
    logger.record(SchedulerStats(), None)
    logger.log_engine_initialized()


def test_vllms_own_loggers_pass_our_statistics_over() -> None:
    """The field that carries them must not break vLLM's loggers."""
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import AggregatedLoggingStatLogger, LoggingStatLogger
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_kvcompress.vllm_plugin.compat.messages import attach_stats, detach_stats

    stats = SchedulerStats()
    attach_stats(stats, STEP.to_dict())
    config = VllmConfig()
    for logger in (LoggingStatLogger(config), AggregatedLoggingStatLogger(config, [0])):
        logger.record(stats, None)
        logger.log()
    assert detach_stats(stats) == STEP.to_dict()
