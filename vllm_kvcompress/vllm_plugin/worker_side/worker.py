"""The part that all workers share: runs the scheduler's plans beside vLLM's own work."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvcompress.vllm_plugin.compat.messages import attach_report, attached_plan
from vllm_kvcompress.vllm_plugin.compat.options import worker_config
from vllm_kvcompress.vllm_plugin.compat.worker import checks_gpu_syncs, draft_layers, read_prompt
from vllm_kvcompress.vllm_plugin.spec import (
    dependent_on_compressed,
    unwrap_equal_specs,
    with_draft_layers,
)
from vllm_kvcompress.vllm_plugin.startup.connector_refusals import keeps_blocks
from vllm_kvcompress.vllm_plugin.startup.needed_classes import CompressingWorker
from vllm_kvcompress.vllm_plugin.startup.refusals import check_engine
from vllm_kvcompress.vllm_plugin.startup.registration import use_relative_backend
from vllm_kvcompress.vllm_plugin.worker_side.attention.base import CompressedBackend
from vllm_kvcompress.vllm_plugin.worker_side.connector import EarlyEnds, flush_connector
from vllm_kvcompress.vllm_plugin.worker_side.drafting import Drafter
from vllm_kvcompress.vllm_plugin.worker_side.measured_heads import NONE, provide_heads
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression


class CompressionWorker(CompressingWorker, Worker):
    """vLLM's worker, which also runs events; stock behaviour unless the settings ask for them.

    Attributes:
        compression: state of the compressed requests; None when nothing is compressed.
        last_event_seconds: policies and durations of events, as reported with the last step.
        early_ends: tells a KV connector that keeps blocks which requests have ended for it.
    """

    early_ends: EarlyEnds | None = None

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(worker_config(vllm_config), *args, **kwargs)
        self.compression: WorkerCompression | None = None
        self.last_event_seconds: list[tuple[str, float]] = []
        settings = check_engine(vllm_config)
        if settings is not None and settings.acts:
            self.compression = WorkerCompression(vllm_config, settings)
            CompressedBackend.compression = self.compression
            self.use_compressed_backend(self.compression)
        else:
            self.use_stock_backend(vllm_config)

    def use_compressed_backend(self, compression: WorkerCompression) -> None:
        """Has vLLM choose our attention backend, before any layer exists."""
        raise NotImplementedError

    def use_stock_backend(self, vllm_config: VllmConfig) -> None:
        """Has vLLM choose its own attention backend, where nothing is ever compressed."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns the cache specs of all layers; backends mark neither Mamba nor draft layers."""
        if self.compression is None:
            stock: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
            return stock
        use_relative_backend(self.vllm_config)
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        speculation = self.vllm_config.speculative_config
        by_mtp = speculation is not None and speculation.method == "mtp"
        specs = with_draft_layers(specs, draft_layers(self.model_runner), by_mtp)
        return {name: dependent_on_compressed(spec) for name, spec in specs.items()}

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the cache, then lays our page view over it."""
        if self.compression is not None:
            unwrap_equal_specs(kv_cache_config.kv_cache_groups)
        super().initialize_from_config(kv_cache_config)
        if self.compression is not None:
            self.compression.bind(self.model_runner, kv_cache_config)
            transfer = self.vllm_config.kv_transfer_config
            if transfer is not None and keeps_blocks(transfer):
                self.early_ends = EarlyEnds(get_kv_transfer_group())
            self.compression.allocate_host_memory(kv_cache_config)
            if self.compression.settings.draft_rule is not None:
                self.compression.drafter = Drafter.of(self.compression, self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """Compiles what vLLM does, then provides the measured heads that policies lack.

        vLLM compiles the ranks of log-probabilities when the first request asks for some. Where a
        canary will, they are compiled here, or all requests beside its first one would wait.
        """
        times = super().compile_or_warm_up_model()
        provide_heads(self)
        if self.compression is not None and self.compression.settings.shadow:
            read_prompt(self, "kvcompress-warm-up", [0, 0], num_logprobs=1)
        return times

    @checks_gpu_syncs
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Runs a step's forward pass with its plan; `sample_tokens` ends the step."""
        if self.compression is None:
            return super().execute_model(scheduler_output)
        flush_connector(scheduler_output)
        if self.early_ends is not None:
            plan = attached_plan(scheduler_output)
            self.early_ends.end(event.request_id for event in (plan.events if plan else ()))
        self.compression.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        self.compression.end_forward()
        if output is not None:  # nothing will be sampled
            self._end_step(self.compression, output)
        return output

    @checks_gpu_syncs
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Samples, then runs events, and sends their results back with the tokens."""
        output = super().sample_tokens(grammar_output)
        if self.compression is not None:
            self._end_step(self.compression, output)
        return output

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads new weights as vLLM does; policies then read them."""
        super().reload_weights(*args, **kwargs)
        self.refresh_weights()

    def finish_weight_update(self) -> None:
        """Ends a transfer of weights from a trainer; policies then read the new ones."""
        super().finish_weight_update()
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Has policies read the weights again; for `collective_rpc`, after changes in place."""
        if self.compression is not None:
            self.compression.refresh_weights()

    def kvcompress_heads(self) -> str:
        """Returns where measured heads come from; for `collective_rpc`."""
        return NONE if self.compression is None else self.compression.heads_from

    def kvcompress_recent_events(self) -> list[dict[str, Any]]:
        """Returns what the last events did, the latest first; for `collective_rpc`."""
        return [] if self.compression is None else self.compression.recent_events.to_list()

    def _end_step(self, compression: WorkerCompression, output: Any) -> None:
        """Ends the step; `output` is None on ranks that send none."""
        compression.end_step()
        if output is not None:
            report = compression.take_report()
            self.last_event_seconds = report.seconds
            attach_report(output, report)
