"""Measures the time to the first token of a turn whose conversation's state lies in three places.

    python scripts/measure/spilled_turns.py models/reference --tokens 4096 --repeats 7 --out FILE

`resident`: in the pool; `spilled`: in host memory, since another request needed its blocks;
`evicted`: nowhere, since the same happened without `--kv-spill`, so the whole prompt is read again.
Writes JSON: the median, least and most of each in seconds, and ratios of medians to `resident`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
BLOCK = 32


def main() -> None:
    """Measures both engines, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a model's directory")
    parser.add_argument("--tokens", type=int, default=4096, help="of the first turn's prompt")
    parser.add_argument("--question", type=int, default=64, help="tokens of the second turn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--policy", default="adakv")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    for spill in (1.0, None):  # each in a process of its own, which gives its memory back
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            seconds |= process.submit(measure, arguments, spill).result()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    rows = {
        name: {
            "median": round(medians[name], 4),
            "least": round(min(each), 4),
            "most": round(max(each), 4),
            "to_resident": round(medians[name] / medians["resident"], 3),
        }
        for name, each in seconds.items()
    }
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(arguments.out.read_text(), end="")


def measure(arguments: argparse.Namespace, spill: float | None) -> dict[str, list[float]]:
    """Returns seconds by where the state lies, with host memory or without."""
    from vllm import LLM

    settings = {"policy": arguments.policy, "budget": 0.25, "request_policies": ["none"]}
    settings |= {"reuse_conversations": "reuse"} | ({"spill": spill} if spill else {})
    plugin = "vllm_kvcompress.vllm_plugin"
    longest = arguments.tokens + arguments.question + 8 * BLOCK
    engine = LLM(
        arguments.model,
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=longest,
        num_gpu_blocks_override=longest * 5 // 4 // BLOCK + 16,
        additional_config={"kvcompress": settings},
        scheduler_cls=f"{plugin}.scheduler_side.scheduler.CompressionScheduler",
        worker_cls=f"{plugin}.worker_side.cpu_worker.CompressionCPUWorker",
    )
    places = ["resident", "spilled"] if spill else ["evicted"]
    seconds: dict[str, list[float]] = {place: [] for place in places}
    for repeat in range(arguments.repeats + 1):  # the first one warms up
        for place in places:
            taken = turn(engine, arguments, seed=repeat, evicts=place != "resident")
            if repeat:
                seconds[place].append(taken)
    return seconds


def turn(engine: Any, arguments: argparse.Namespace, seed: int, evicts: bool) -> float:
    """Returns the seconds of a second turn of one token, all other requests having ended."""
    from vllm import SamplingParams

    draw = random.Random(f"{seed} {evicts}")
    vocabulary = engine.get_tokenizer().vocab_size

    def ask(tokens: list[int], max_tokens: int, policy: str) -> list[int]:
        asked = {"extra_args": {"kv_policy": policy}}
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **asked)
        (answer,) = engine.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)
        return [*tokens, *answer.outputs[0].token_ids]

    def draw_tokens(count: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(count)]

    history = ask(draw_tokens(arguments.tokens), 16, arguments.policy)
    if evicts:
        for _ in range(2):  # the second takes the blocks that were used before the first's
            ask(draw_tokens(arguments.tokens + 4 * BLOCK), 2, "none")
    question = draw_tokens(arguments.question)
    begin = time.perf_counter()
    ask([*history, *question], 1, arguments.policy)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
