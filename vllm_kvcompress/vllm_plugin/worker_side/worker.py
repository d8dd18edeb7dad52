"""What workers of all kinds do besides vLLM's work: they run the scheduler's plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_kvcompress.vllm_plugin.startup import compat
from vllm_kvcompress.vllm_plugin.startup.needed_classes import CompressingWorker
from vllm_kvcompress.vllm_plugin.startup.refusals import check_engine
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBackend
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_kvcompress.config import Settings


class CompressionWorker(CompressingWorker):
    """Mixed into a worker of vLLM; does nothing unless the settings ask for compression.

    Attributes:
        compression: what it holds for compressed requests; None when nothing is compressed.
        last_event_seconds: policies and durations of events, as they came with the last step.
    """

    def __init__(self, vllm_config: VllmConfig, *args, **kwargs) -> None:
        super().__init__(compat.worker_config(vllm_config), *args, **kwargs)
        self.compression: WorkerCompression | None = None
        self.last_event_seconds: list[tuple[str, float]] = []
        settings = check_engine(vllm_config)
        if settings is not None and settings.acts:
            self.compression = WorkerCompression(vllm_config, settings)
            CompressedBackend.compression = self.compression
            self.take_our_attention(vllm_config, settings)
        else:
            self.leave_attention(vllm_config)

    def take_our_attention(self, vllm_config: VllmConfig, settings: Settings) -> None:
        """Has vLLM choose our attention backend, before any layer exists."""
        raise NotImplementedError

    def leave_attention(self, vllm_config: VllmConfig) -> None:
        """Has vLLM choose its own attention backend, where nothing is ever compressed."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the cache, then lays our page view over it."""
        super().initialize_from_config(kv_cache_config)
        if self.compression is not None:
            self.compression.bind(self.model_runner, kv_cache_config)

    @compat.checks_gpu_syncs
    def execute_model(self, scheduler_output: SchedulerOutput):
        """Runs a step with its plan; what its events do behind sampling is left to be done."""
        if self.compression is None:
            return super().execute_model(scheduler_output)
        self.compression.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        self.compression.end_forward()
        if output is not None:  # nothing will be sampled
            self._end_step(output)
        return output

    @compat.checks_gpu_syncs
    def sample_tokens(self, grammar_output: GrammarOutput | None):
        """Samples, then runs events, and sends back with the tokens how events went."""
        output = super().sample_tokens(grammar_output)
        if self.compression is not None:
            self._end_step(output)
        return output

    def reload_weights(self, *args, **kwargs) -> None:
        """vLLM's; policies then read the new weights."""
        super().reload_weights(*args, **kwargs)
        self.refresh_weights()

    def finish_weight_update(self) -> None:
        """vLLM's, at the end of a transfer from a trainer; policies then read the new weights."""
        super().finish_weight_update()
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """For `collective_rpc`, after weights were changed in ways that vLLM does not know."""
        if self.compression is not None:
            self.compression.refresh_weights()

    def kvcompress_recent_events(self) -> list[dict[str, Any]]:
        """For `collective_rpc`: what the last events did, the latest first."""
        return [] if self.compression is None else self.compression.recent_events.to_list()

    def _end_step(self, output) -> None:
        """Ends the step; `output` is None on ranks that send none."""
        self.compression.end_step()
        if output is not None:
            report = self.compression.take_report()
            self.last_event_seconds = report.seconds
            compat.attach_report(output, report)
