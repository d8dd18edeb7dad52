"""What compression costs and saves on this machine, as ratios against stock vLLM.

    python scripts/measure/cost.py [--prompt 4096] [--decode 32] [--repeats 5] [--out FILE.json]

One process per engine (stock, off, and one per policy), all alive at once, measured in turns,
so that a slow minute of the machine hits all of them. Medians of the repetitions. The model has
random weights, which times do not depend on, and by default two layers of Llama-3.1-8B's shape:
every share is one of a layer, so it holds for all 32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_kvcompress.tools.benchmark.report import machine
from vllm_kvcompress.tools.dtypes import dtype_text, fast_dtype

PLUGIN = "vllm_kvcompress.vllm_plugin"
POLICIES = [
    "streamingllm",
    "knorm",
    "keydiff",
    "tova",
    "h2o",
    "snapkv",
    "pyramidkv",
    "adakv",
    "headkv",
    "duoattention",
    "adakv+criticalkv",
    "adakv+criticalkv:l2",
    "spans",
    "spans+headkv",
]
PROFILES = {"headkv": "headkv.json", "duoattention": "duo/pattern.tsv"}


def write_model(directory: str, shape: dict[str, int], dtype: str) -> None:
    """A random Llama of the given shape, without tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, max_position_embeddings=65536, tie_word_embeddings=True, **shape
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)


def write_profiles(directory: Path, options: argparse.Namespace) -> None:
    """Made-up measurements of the model's heads, for the policies that need some."""
    from vllm_kvcompress.tools import profiler

    draw = random.Random(0)
    scores = [
        [[draw.random() for _ in range(4)] for _ in range(options.heads)]
        for _ in range(options.layers)
    ]
    profiler.write_headkv(directory / PROFILES["headkv"], scores)
    profiler.write_duoattention(
        directory / PROFILES["duoattention"], scores, options.kv_heads, profiler.StreamingSizes()
    )


def settings_of(name: str, model: str) -> dict[str, Any] | None:
    """Our settings for an engine's name; None: stock vLLM."""
    if name == "stock":
        return None
    if name == "off":
        return {"policy": "none", "budget": 1.0}
    if name == "budget-1.0":
        return {"policy": "snapkv", "budget": 1.0}
    name, _, budget = name.partition("@")
    policy, _, norm = name.partition(":")
    settings: dict[str, Any] = {"policy": policy, "budget": int(budget) if budget else 0.25}
    if norm:
        settings["params"] = {"norm": norm}
    profile = PROFILES.get(policy.split("+")[-1])
    if profile is not None:
        settings["profile"] = str(Path(model) / profile)
    return settings


def build_engine(name: str, model: str, options: argparse.Namespace) -> Any:
    """The vLLM engine of one configuration, inside this process."""
    from vllm import LLM

    settings = settings_of(name, model)
    arguments: dict[str, Any] = {}
    if settings is not None:
        arguments = {
            "additional_config": {"kvcompress": settings},
            "scheduler_cls": f"{PLUGIN}.scheduler_side.scheduler.CompressionScheduler",
            "worker_cls": f"{PLUGIN}.worker_side.cpu_worker.CompressionCPUWorker",
        }
    length = 2 * options.prompt + options.decode + 64
    return LLM(
        model,
        skip_tokenizer_init=True,
        dtype=options.dtype,
        enforce_eager=True,
        block_size=32,
        max_model_len=length,
        max_num_batched_tokens=options.prompt,
        num_gpu_blocks_override=options.requests * length // 32 + 2,
        enable_prefix_caching=False,
        **arguments,
    )


def run_once(engine: Any, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Serves a batch once: seconds until every first token, per decode step, and of events."""
    import torch
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(seed)
    for number in range(options.requests):
        tokens = torch.randint(1024, (options.prompt,), generator=generator).tolist()
        engine.add_request(
            str(number),
            {"prompt_token_ids": tokens},
            SamplingParams(
                temperature=0, max_tokens=options.decode, ignore_eos=True, detokenize=False
            ),
        )
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    started, prefill, steps, events = time.perf_counter(), 0.0, [], 0.0
    while engine.has_unfinished_requests():
        step_started = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        events += sum(seconds for _, seconds in getattr(worker, "last_event_seconds", []))
        worker.last_event_seconds = []
        if all(len(output.outputs[0].token_ids) > 1 for output in outputs) and outputs:
            steps.append(now - step_started)
        else:
            prefill = now - started
    total = time.perf_counter() - started
    return {
        "prefill": prefill - events,
        "step": statistics.median(steps),
        "event": events,
        "throughput": options.requests * (options.prompt + options.decode) / total,
    }


def serve(name: str, model: str, options: argparse.Namespace, pipe: Connection) -> None:
    """One engine's process: builds, warms up, then measures on demand."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if options.cpu_time:
        time.perf_counter = time.process_time  # of events, too
    engine = build_engine(name, model, options).llm_engine
    run_once(engine, options, seed=0)
    pipe.send("ready")
    while (seed := pipe.recv()) is not None:
        pipe.send(run_once(engine, options, seed))


def measure(names: list[str], options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Every engine `--repeats` times, in turns."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    shape = {
        "hidden_size": options.hidden,
        "intermediate_size": 7 * options.hidden // 2,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
    }
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as model:
        write_model(model, shape, options.dtype)
        write_profiles(Path(model), options)
        engines = {}
        for name in tqdm(names, desc="starting engines"):
            here, child_end = context.Pipe()
            process = context.Process(
                target=serve, args=(name, model, options, child_end), daemon=True
            )
            process.start()
            assert here.recv() == "ready"
            engines[name] = (process, here)
        for repeat in tqdm(range(1, options.repeats + 1), desc="repetitions"):
            for name, (_, pipe) in engines.items():
                pipe.send(repeat)
                samples[name].append(pipe.recv())
        for process, pipe in engines.values():
            pipe.send(None)
            process.join(timeout=60)
    return samples


def ratios(samples: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the repetitions, each as a ratio against stock of the same repetition."""
    table = {}
    stock = samples["stock"]
    for name, runs in samples.items():
        pairs = list(zip(runs, stock, strict=True))
        table[name] = {
            "throughput": statistics.median(r["throughput"] / s["throughput"] for r, s in pairs),
            "step": statistics.median(r["step"] / s["step"] for r, s in pairs),
            "event_share": statistics.median(r["event"] / s["prefill"] for r, s in pairs),
            "event_ms": 1000 * statistics.median(r["event"] for r in runs),
            "prefill_ms": 1000 * statistics.median(r["prefill"] for r in runs),
            "step_ms": 1000 * statistics.median(r["step"] for r in runs),
        }
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--decode", type=int, default=32, help="generated tokens")
    parser.add_argument("--requests", type=int, default=2, help="requests side by side")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default=fast_dtype(), help="of weights and cache (%(default)s)")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--policies-only", action="store_true", help="beside stock vLLM")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="of each process instead of the clock's, where others use the machine; set "
        "OMP_NUM_THREADS=1",
    )
    parser.add_argument(
        "--at-once", type=int, default=7, help="engines beside stock's that memory has room for"
    )
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    print(dtype_text(options.dtype))
    names = [] if options.policies_only else ["off", "budget-1.0"]
    names += options.policies.split(",")
    table = {}
    for start in range(0, len(names), options.at_once):
        table |= ratios(measure(["stock", *names[start : start + options.at_once]], options))
    header = f"{'engine':24}{'throughput':>12}{'decode step':>13}{'event':>10}{'of prefill':>12}"
    print(header)
    for name, row in table.items():
        print(
            f"{name:24}{row['throughput']:>11.3f}x{row['step']:>12.3f}x"
            f"{row['event_ms']:>8.1f}ms{100 * row['event_share']:>11.2f}%"
        )
    if options.out:
        settings = {k: v for k, v in vars(options).items() if k != "out"}
        figures = {"machine": machine(), "options": settings, "ratios": table}
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
