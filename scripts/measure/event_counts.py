"""Counts what events queue, hold and compute on a GPU; none is needed.

    python scripts/measure/event_counts.py --out FOLDER

On torch's `meta` device events run whose tensors have no numbers. FOLDER/launches.md has the
operators that a step's events queue in Qwen3-8B's shape, and FOLDER/memory.md the most bytes that
an event holds at once in a layer of Llama-3.1-8B's: launches of Triton's kernels are not among the
operators, nor what these kernels take for themselves. FOLDER/arithmetic.md follows from shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_parts.batched import PromptsEnd, blocks_of
from gpu_parts.whole_events import Cache, Model, make_pipeline
from tests.accelerator import Operators, launched
from tests.live_bytes import LiveBytes
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.query_windows import QueryWindows
from vllm_kvcompress.compression.dummy_runs import DummyRuns
from vllm_kvcompress.compression.runner import EventRunner

BLOCK_SIZE = 16
QWEN3_8B = Model(num_layers=36, num_heads=8, group=4, head_size=128, hidden_size=4096)
LLAMA_31_8B = Model()
INTERMEDIATE = 14336  # of Llama-3.1-8B's feed-forward layers
LAUNCHES = ("streamingllm", "snapkv", "adakv", "adakv+criticalkv", "h2o", "spans")
STEPS = {  # by column: way, prompts, tokens of each
    "layer by layer": ("alone", 1, 2048),
    "one prompt of 2,048 tokens": ("at_once", 1, 2048),
    "one of 8,192": ("at_once", 1, 8192),
    "two of 4,096": ("together", 2, 4096),
}
MEMORY = (
    *("streamingllm", "tova", "snapkv", "adakv", "adakv+criticalkv", "h2o", "d2o", "knorm"),
    *("keydiff", "momentkv", "snapkv+momentfix", "kvmerger", "asymkv", "kvslimmer", "h2o+cam"),
    "snapkv+obcache",
)
LENGTHS = (32768, 131072)


def count_operators(policy: str, way: str, num_requests: int, num_tokens: int) -> int:
    """Counts the operators of all layers of a step in which prompts end."""
    num_blocks = blocks_of(num_requests, num_tokens, BLOCK_SIZE)
    cache = Cache(QWEN3_8B, num_blocks * BLOCK_SIZE, BLOCK_SIZE, "meta")
    pipeline = make_pipeline(policy, QWEN3_8B, BLOCK_SIZE)
    step = PromptsEnd(pipeline, cache, cache.pool, num_requests, num_tokens)
    with launched(), Operators() as operators:
        step.seconds(way)
    return operators.count


def peak_bytes(policy: str, num_tokens: int) -> int:
    """Returns the most bytes that an event, alone and in one layer, holds at once.

    As at start-up, it reads `num_tokens` tokens and keeps all, in fresh blocks and in place.
    """
    model = Model(num_layers=1)
    cache = Cache(model, BLOCK_SIZE, BLOCK_SIZE, "meta")
    pipeline = make_pipeline(policy, model, BLOCK_SIZE)
    windows = QueryWindows(1, pipeline.needs.window_size, cache.device)
    runner = EventRunner(
        PageTables(cache.pool), windows, {policy: pipeline}, [cache.weights], max_tokens=0
    )
    runs = DummyRuns(runner, model.num_query_heads, block=0)
    with launched(), LiveBytes() as memory:
        runs.longest(num_tokens)
    return memory.peak


def arithmetic(num_tokens: int) -> dict[str, float]:
    """Returns by part of an event its floating-point operations, kept to a quarter, in a layer."""
    model, n = LLAMA_31_8B, num_tokens
    queries, dims = model.num_query_heads, model.head_size
    one_query = 2 * queries * dims * n  # by all keys or values, in all query heads
    return {
        "window of 32 queries, logits twice": 2 * 32 * one_query,
        "window of 256 queries, logits twice (h2o, spans: of every other query)": 512 * one_query,
        "obcache, window of 32: logits twice, outputs, values times outputs": 4 * 32 * one_query,
        "criticalkv, norm=l2": dims * one_query,
        "criticalkv, norm=l1": model.hidden_size * one_query,
        "d2o: evicted keys times kept keys": 2 * model.num_heads * dims * (3 * n / 4) * (n / 4),
    }


def prefill(num_tokens: int) -> float:
    """Returns the floating-point operations of a layer's prefill."""
    model, width = LLAMA_31_8B, LLAMA_31_8B.hidden_size
    projections = 2 * width * (model.num_query_heads + model.num_heads) * model.head_size
    linear = 2 * num_tokens * (projections + 3 * width * INTERMEDIATE)
    return linear + 2 * model.num_query_heads * model.head_size * num_tokens**2


def write_table(path: Path, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """Writes a table in Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    launches = {
        f"`{policy}`": [f"{count_operators(policy, *step):,}" for step in STEPS.values()]
        for policy in tqdm(LAUNCHES, desc="launches")
    }
    write_table(out / "launches.md", ["policy", *STEPS], launches)
    memory = {
        f"`{policy}`": [f"{peak_bytes(policy, length) >> 20:,} MiB" for length in LENGTHS]
        for policy in tqdm(MEMORY, desc="memory")
    }
    write_table(out / "memory.md", ["policy", *(f"{n:,} tokens" for n in LENGTHS)], memory)
    longest, whole = LENGTHS[0], prefill(LENGTHS[0])
    work = {
        name: [f"{number / 1e12:.2f}", f"{number / whole:.1%}"]
        for name, number in arithmetic(longest).items()
    }
    write_table(out / "arithmetic.md", ["part", "TFLOP", "of the prefill"], work)


if __name__ == "__main__":
    main()
