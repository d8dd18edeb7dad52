"""What events of one step take together, or in several layers at once, against one by one.

    python scripts/measure/batched_events.py [--tokens 512] [--policies snapkv] [--threads 2]
    python scripts/measure/batched_events.py --heads 8 --group 4 --head-size 128 --device cuda

Prompts of equal length that end in the same step, by default on the CPU with one thread, in the
reference model's shape. Medians of all layers' CPU time; with several threads of the time that
passes, which asks for an idle machine; on a GPU of what the host takes to queue them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_parts.batched import POLICIES, WAYS, PromptsEnd, blocks_of
from gpu_parts.whole_events import Cache, Model, make_pipeline
from vllm_kvcompress.cache.page_order import known_packings
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool


def as_on_cpus(pool: InterleavedPagePool) -> PackedPagePool:
    """The same pages in the order of vLLM's CPU kernels."""
    keys, values = known_packings(pool.block_size, pool.head_size)[:2]
    return PackedPagePool(**vars(pool), packings=(keys, values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"requests": 16, "tokens": 512, "layers": 4, "heads": 4, "group": 2, "head-size": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    on_cpu = options.device == "cpu"
    block_size = 32 if on_cpu else 16
    hidden = options.heads * options.group * options.head_size
    shape = (options.layers, options.heads, options.group, options.head_size, hidden)
    model = Model(*shape, dtype=torch.float32 if on_cpu else torch.bfloat16)
    num_tokens = blocks_of(options.requests, options.tokens, block_size) * block_size
    cache = Cache(model, num_tokens, block_size, options.device)
    pool = as_on_cpus(cache.pool) if on_cpu else cache.pool
    print("| policy | one by one | layers at once | together |\n|---|---|---|---|")
    for name in options.policies.split(","):
        pipeline = make_pipeline(name, model, block_size)
        step = PromptsEnd(pipeline, cache, pool, options.requests, options.tokens)
        runs = [[step.seconds(way) for way in WAYS] for _ in range(options.repeats + 1)][1:]
        alone, *others = (1000 * statistics.median(column) for column in zip(*runs, strict=True))
        ratios = " | ".join(f"{other:.1f} ms, {other / alone:.2f}x" for other in others)
        print(f"| `{name}` | {alone:.1f} ms | {ratios} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
