"""Records the engine's step statistics in Prometheus metrics, in the API process.

vLLM builds this logger in every server that has this package installed (entry point
`vllm.stat_logger_plugins`); without settings in `--additional-config` it does nothing.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from vllm_kvcompress.metrics.prometheus import CompressionMetrics
from vllm_kvcompress.metrics.stats import StepStats
from vllm_kvcompress.vllm_plugin.compat.messages import detach_stats
from vllm_kvcompress.vllm_plugin.startup.needed_classes import check_classes
from vllm_kvcompress.vllm_plugin.startup.refusals import check_plugins, engine_settings


class CompressionStatLogger(AggregateStatLoggerBase):
    """Logger of all engines that this API process talks to.

    The engine core hands each step's statistics to one API process only (the first that has
    outputs in that step), so nothing is counted twice.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self.metrics: CompressionMetrics | None = None
        settings = engine_settings(vllm_config)
        if settings is not None:
            check_plugins(settings)
        if settings is None or not settings.acts:
            return
        check_classes(vllm_config, settings)
        from vllm_kvcompress.metrics.prometheus import process_metrics

        self.metrics = process_metrics()
        self.model_name = vllm_config.model_config.served_model_name
        for engine in engine_indexes:
            self.metrics.start(settings, self.model_name, str(engine))

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Records one step's statistics, if a batch of outputs carries them."""
        if self.metrics is None or scheduler_stats is None:
            return
        values = detach_stats(scheduler_stats)
        if values is not None:
            stats = StepStats.from_dict(values)
            self.metrics.observe(stats, self.model_name, str(engine_idx))

    def log_engine_initialized(self) -> None:
        """Does nothing: the gauges were set when the logger was built."""
