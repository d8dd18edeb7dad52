"""Starts a tiny model as `serve` does, in a process of its own, and says what it answers."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

OPTIONS = [
    *("--load-format", "dummy", "--enforce-eager", "--trust-remote-code"),
    *("--max-model-len", "2048", "--num-gpu-blocks-override", "200", "--block-size", "32"),
    *("--max-num-batched-tokens", "512", "--max-num-seqs", "8"),
]
COMPRESSED = [
    *("--kv-policy", "snapkv", "--kv-budget", "0.25", "--kv-min-tokens", "64"),
    *("--kv-min-request-budget", "0.25", "--kv-max-request-budget", "1.0"),
]
ANSWER = 40  # tokens


def prompt(is_hybrid: bool) -> list[int]:
    """Returns a prompt of several blocks, which are long beside Mamba and linear attention."""
    generator = random.Random(0)
    return [generator.randrange(4, 256) for _ in range(1800 if is_hybrid else 300)]


def run(
    kind: str,
    model: str,
    options: list[str],
    report: str,
    log: str,
    platform: AbstractContextManager[None] | None = None,
) -> None:
    """Checks, or runs, a model in this process, and writes a report.

    Args:
        kind: `check` says whether `serve` would accept the model, `stock` and `compressed` run it.
        model: folder with a config.json.
        options: options of `serve` beside `OPTIONS`.
        report: path of the JSON to write.
        log: path of the file to which the output goes.
        platform: what makes a command for another platform than this one.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    gc.freeze()
    try:
        result = _run(kind, model, options, platform or nullcontext())
    except BaseException as error:
        traceback.print_exc()
        root = _root(error)
        lines = " ".join(line.strip() for line in str(root).splitlines())
        result = {"error": lines[:400], "kind": type(root).__name__}
    Path(report).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _root(error: BaseException) -> BaseException:
    """Returns the first error of a chain."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _run(
    kind: str, model: str, options: list[str], platform: AbstractContextManager[None]
) -> dict[str, Any]:
    import torch._dynamo

    torch._dynamo.config.disable = True
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from model_parts import operators
    from model_parts.configs import config_class
    from vllm_kvcompress.cli import launch, serve

    config = json.loads(Path(model, "config.json").read_text())
    config_class(config["model_type"])
    operators.install(*config["architectures"])
    has_tokenizer = Path(model, "tokenizer.json").exists()
    options = [*options, "--language-model-only" if has_tokenizer else "--skip-tokenizer-init"]
    arguments = [model, *OPTIONS, *options, *([] if kind == "stock" else COMPRESSED)]
    with platform:
        command = launch.vllm_command(serve.parse_request(arguments))
    _, parsed = launch.parse(command)
    if kind == "check":
        launch.check_command(command)
        return {}
    seed_weights()
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))
    if kind == "stock":
        return {"answer": _answer(engine, "stock", {})}
    events = _count_events(engine)
    whole = _answer(engine, "whole", {"kv_budget": 1.0})
    unchanged = not events
    compressed = _answer(engine, "compressed", {})
    return {
        "answer": whole,
        "unchanged": unchanged,
        "compressed": compressed,
        "events": events,
        "layers": _layers(engine),
    }


def seed_weights() -> None:
    """Has vLLM make up weights of which attention and answers depend, the same in every engine."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for layer in model.modules():
            for name, tensor in get_layer_tensors(layer).items():
                if name in layer._non_persistent_buffers_set or not tensor.is_floating_point():
                    continue
                width = tensor.shape[-1] if tensor.dim() > 1 else 3
                values = torch.rand(tensor.shape, generator=generator) * 2 - 1
                values *= (3 / width) ** 0.5
                if tensor.dim() == 1:
                    values = 1 + values / 2
                if name == "A":  # of Mamba, which decays
                    values = -values.abs() - 0.1
                tensor.data.copy_(values)

    DummyModelLoader.load_weights = load_weights


def _answer(engine: Any, name: str, choices: dict[str, Any]) -> list[Any]:
    """Returns the tokens that are generated, and their log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=ANSWER,
        temperature=0,
        ignore_eos=True,
        logprobs=3,
        extra_args=choices or None,
        detokenize=False,
    )
    tokens = prompt(engine.vllm_config.model_config.is_hybrid)
    engine.add_request(name, {"prompt_token_ids": tokens, "cache_salt": name}, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (choice,) = outputs[-1].outputs
    tokens = zip(choice.token_ids, choice.logprobs, strict=True)
    logprobs = [step[token].logprob for token, step in tokens]
    return [list(choice.token_ids), logprobs]


def _count_events(engine: Any) -> list[list[int]]:
    """Returns a list that grows by [blocks freed, blocks written] with every event."""
    from vllm_kvcompress.vllm_plugin.compat.messages import detach_stats

    scheduler, events = engine.engine_core.engine_core.scheduler, []
    make_stats = scheduler.make_stats

    def recording(*args: Any, **kwargs: Any) -> Any:
        stats = make_stats(*args, **kwargs)
        ours = detach_stats(stats) if stats else None
        for event in (ours or {}).get("events", ()):
            events.append([event["blocks_freed"], event["blocks_written"]])
        return stats

    scheduler.make_stats = recording
    return events


def _layers(engine: Any) -> dict[str, int]:
    """Returns how many layers there are of each kind of cache."""
    kinds: dict[str, int] = {}
    for group in engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", None)
        for layer in group.layer_names:
            kind = type(spec if specs is None else specs[layer]).__name__
            kinds[kind] = kinds.get(kind, 0) + 1
    return kinds
