"""What one long prompt costs a request that generates meanwhile, by the policy that it asks for.

    python scripts/measure/neighbour_cost.py http://127.0.0.1:8000 \\
        --policies none,snapkv,adakv+criticalkv

The server has to allow these policies (--kv-allow-request-policies). For each of them, in turns,
somebody's prompt is read, the longest that the server takes, while another request generates: the
longest that this one waits for a token, and how much later its tokens come than without the long
prompt; medians over repetitions.
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
from collections.abc import Iterator
from typing import Any

BEFORE, BEHIND = 8, 8  # tokens of the neighbour that come before the prompt, and after its answer
ALONE = 40  # where there is no long prompt


def model_of(address: str) -> tuple[str, int]:
    """The name of the model that is served, and how many tokens it takes."""
    with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]
    return model["id"], model["max_model_len"]


def ask(address: str, **body: Any) -> Iterator[float]:
    """Times at which parts of a streamed answer come; who stops listening ends the request."""
    data = json.dumps({**body, "stream": True, "ignore_eos": True, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield time.perf_counter()


def measure(arguments: argparse.Namespace, policy: str, seed: int) -> list[float]:
    """Seconds that a neighbour waits for each token, from before a long prompt until behind it."""
    chance = random.Random(seed)  # new tokens each time, so that nothing is cached
    prompt = [chance.randrange(100, arguments.vocabulary) for _ in range(arguments.tokens)]
    model, address = {"model": arguments.model}, arguments.address
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "vllm_xargs": {"kv_policy": policy}}
    other = threading.Thread(target=lambda: list(ask(address, **model, **body)))
    times: list[float] = []
    ends = ALONE
    for moment in ask(address, **model, prompt=[5] * 16, max_tokens=arguments.most - 17):
        times.append(moment)
        if policy and len(times) == BEFORE:
            other.start()
        if policy and (len(times) <= BEFORE or other.is_alive()):
            ends = len(times) + BEHIND
        if len(times) >= ends:
            break
    if policy:
        other.join()
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("address")
    parser.add_argument("--tokens", type=int, help="of the long prompt (what the server takes)")
    parser.add_argument("--policies", default="none,snapkv")
    parser.add_argument("--vocabulary", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    arguments.model, arguments.most = model_of(arguments.address)
    arguments.tokens = arguments.tokens or arguments.most - 1
    names = ["", *arguments.policies.split(",")]
    longest: dict[str, list[float]] = {name: [] for name in names}
    later: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(arguments.repeats + 1):  # the first one warms up
        usual = 0.0
        for number, name in enumerate(names):
            waits = measure(arguments, name, 1000 * repetition + number)
            usual = usual or statistics.median(waits)
            said = f"longest wait {max(waits):.3f} s of {len(waits)}"
            print(f"{repetition} {name or 'no long prompt'}: {said}", file=sys.stderr, flush=True)
            if repetition:
                longest[name].append(max(waits))
                later[name].append(sum(waits) - len(waits) * usual)
    print("| the long prompt's policy | longest wait for a token | tokens come later by |")
    print("|---|---|---|")
    for name in names:
        wait, delay = (1000 * statistics.median(each[name]) for each in (longest, later))
        print(f"| {name or 'no long prompt'} | {wait:.0f} ms | {delay:.0f} ms |")


if __name__ == "__main__":
    main()
