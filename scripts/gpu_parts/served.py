"""Engines with the options that `vllm-kvcompress serve` gives vLLM, and how they compress."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from gpu_parts import shapes

SERVED_BY_DEFAULT = ("max_num_batched_tokens", "max_num_seqs")


def write_8b_shape(folder: Path, num_layers: int = shapes.NUM_LAYERS) -> Path:
    """Writes the configuration of a model of Llama-3.1-8B's shape, without weights and tokenizer.

    With its whole vocabulary, since every step reads the matrix of the logits.
    """
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        max_position_embeddings=131072,
        hidden_size=shapes.HIDDEN_SIZE,
        intermediate_size=shapes.INTERMEDIATE_SIZE,
        num_hidden_layers=num_layers,
        num_attention_heads=shapes.NUM_HEADS * shapes.GROUP,
        num_key_value_heads=shapes.NUM_HEADS,
        head_dim=shapes.HEAD_SIZE,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    return folder


def serve_options(
    model: str, settings: dict[str, Any] | None, engine: dict[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` that make the engine of `vllm-kvcompress serve`.

    They are what `serve --print-vllm-command` prints. Where vLLM's defaults for servers are not
    those of `vllm.LLM`, the server's are written out.

    Args:
        model: name or directory.
        settings: by the names of serve's options without `--kv-`; None: `serve MODEL`, which is
            stock vLLM. The policy none is what `vllm serve` makes of it with our classes.
        engine: further options, which win.
    """
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_kvcompress.cli import launch

    command = launch.vllm_command(_request(model, settings))
    options = dict(launch.plain_command(command, {}).engine)
    options.pop("model", None)
    options = {"block_size": None, **options, **engine}
    arguments = AsyncEngineArgs(model=model, **{**options, "skip_tokenizer_init": True})
    scheduling = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER).scheduler_config
    return {name: getattr(scheduling, name) for name in SERVED_BY_DEFAULT} | options


def _request(model: str, settings: dict[str, Any] | None) -> Any:
    from vllm_kvcompress.cli import serve
    from vllm_kvcompress.cli.vllm_command import ServeRequest
    from vllm_kvcompress.config.auto import NO_POLICY
    from vllm_kvcompress.config.settings import Settings

    if settings is not None and settings["policy"] == NO_POLICY:
        return ServeRequest(Settings.from_dict(settings), [model])
    given = [f"--kv-{name}={value}" for name, value in (settings or {}).items()]
    return serve.parse_request([model, *given])


class EventCounter:
    """Counts events as `/metrics` does: from the statistics that the scheduler sends every step.

    A stat logger of vLLM, for an engine in this process, where vLLM builds none of plugins.

    Attributes:
        triggers: events so far, by what triggered them.
    """

    def __init__(self, llm: Any) -> None:
        self.triggers: Counter[str] = Counter()
        llm.llm_engine.logger_manager.stat_loggers.insert(0, self)

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        """Called by vLLM after every step."""
        from vllm_kvcompress.metrics.stats import StepStats
        from vllm_kvcompress.vllm_plugin.compat.messages import detach_stats

        values = None if scheduler_stats is None else detach_stats(scheduler_stats)
        if values is not None:
            self.triggers.update(event.trigger for event in StepStats.from_dict(values).events)

    @property
    def events(self) -> int:
        """The number of events so far."""
        return self.triggers.total()

    def log(self) -> None:
        """Does nothing when vLLM asks for a log line."""


def counter_of(llm: Any) -> EventCounter:
    """The engine's counter, made at the first call."""
    loggers = llm.llm_engine.logger_manager.stat_loggers
    return loggers[0] if isinstance(loggers[0], EventCounter) else EventCounter(llm)


def path_of(worker: Any) -> dict[str, Any]:
    """In the worker: which path its steps take.

    Returns:
        `graphs`: vLLM's mode of CUDA graphs; `observers`: tools that look on, with which events
        run one by one, layer by layer; `batched_tokens`: how many tokens of events, or of an
        event's layers, run together; None where nothing is compressed.
    """
    mode = worker.vllm_config.compilation_config.cudagraph_mode
    compression = getattr(worker, "compression", None)
    runners = [] if compression is None else [g.runner for g in compression.groups.values()]
    return {
        "graphs": getattr(mode, "name", str(mode)),
        "observers": sum(runner.observer is not None for runner in runners),
        "batched_tokens": min((runner.max_tokens for runner in runners), default=None),
    }


def allocated(worker: Any) -> dict[str, int]:
    """In the worker: bytes that torch has handed out on the GPU, 0 where there is none.

    Returns:
        `now`; `most` at any time since the last call; and what ours has `left` out of the cache.
    """
    import torch

    numbers = {"now": 0, "most": 0, "left": getattr(worker, "left_bytes", 0)}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        numbers["now"] = stats["allocated_bytes.all.current"]
        numbers["most"] = stats["allocated_bytes.all.peak"]
        torch.cuda.reset_peak_memory_stats()
    return numbers
