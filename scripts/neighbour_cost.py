"""What one long prompt costs a request that generates meanwhile, by the policy that it asks for.

    python scripts/neighbour_cost.py http://127.0.0.1:8000 --model NAME --tokens 8000 \
        --policies none,snapkv,adakv+criticalkv

The server has to allow these policies (--kv-allow-request-policies). For each of them, in turns:
the longest wait for one of the neighbour's tokens, and its total time for all of them, while
somebody's prompt is read; medians over repetitions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import threading
import time
import urllib.request
from typing import Any


def ask(address: str, **body: Any) -> list[float]:
    """Times at which parts of a streamed answer came."""
    data = json.dumps({**body, "stream": True, "ignore_eos": True, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return [time.perf_counter() for line in answer if line.startswith(b"data: {")]


def measure(arguments: argparse.Namespace, policy: str, seed: int) -> tuple[float, float]:
    """Longest wait and total, in seconds, of a neighbour's tokens."""
    chance = random.Random(seed)  # new tokens each time, so that nothing is cached
    prompt = [chance.randrange(100, arguments.vocabulary) for _ in range(arguments.tokens)]
    xargs = {"kv_policy": policy} if policy else {}
    common = {"model": arguments.model}

    def attack() -> None:
        time.sleep(arguments.delay)
        ask(arguments.address, prompt=prompt, max_tokens=1, vllm_xargs=xargs, **common)

    other = threading.Thread(target=attack)
    if policy:
        other.start()
    times = ask(arguments.address, prompt=[5] * 16, max_tokens=arguments.neighbour_tokens, **common)
    if policy:
        other.join()
    waits = [after - before for before, after in itertools.pairwise(times)]
    return max(waits), times[-1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("address")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=8000, help="of the long prompt (8000)")
    parser.add_argument("--policies", default="none,snapkv")
    parser.add_argument("--neighbour-tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=250)
    parser.add_argument("--delay", type=float, default=0.5, help="seconds before it is sent (0.5)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    names = ["", *arguments.policies.split(",")]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for repetition in range(arguments.repeats + 1):  # the first one warms up
        for number, name in enumerate(names):
            result = measure(arguments, name, 1000 * repetition + number)
            said = ", ".join(f"{seconds:.3f} s" for seconds in result)
            print(f"{repetition} {name or 'no long prompt'}: {said}", file=sys.stderr, flush=True)
            if repetition:
                found[name].append(result)
    print("| the long prompt's policy | longest wait for a token | all tokens |\n|---|---|---|")
    for name, results in found.items():
        waits, totals = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"| {name or 'no long prompt'} | {1000 * waits:.0f} ms | {totals:.2f} s |")


if __name__ == "__main__":
    main()
