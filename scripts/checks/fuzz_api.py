"""Sends nonsense to a running server, and says what it answers.

    python scripts/checks/fuzz_api.py http://127.0.0.1:8000 --seed 1 --requests 5000 [--model NAME]

Chats and completions whose `vllm_xargs` and fields have wrong types, huge and infinite numbers,
odd characters, megabytes, deep nesting. The same seed sends the same to another server: whatever
fails there, too, is vLLM's. Status 1 if an answer was a 5xx, none came, or a refusal had no reason.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

OURS = (
    *("kv_policy", "kv_budget", "kv_read", "kv_context_tokens", "kv_prepare", "kv_x"),
    *("kv_transfer_params", "other"),
)
FIELDS = (
    *("messages", "max_tokens", "temperature", "top_p", "n", "stop", "logprobs", "top_logprobs"),
    *("stream", "seed", "tools", "tool_choice", "response_format", "cache_salt", "priority"),
    *("min_tokens", "prompt_logprobs", "logit_bias", "user", "stream_options", "vllm_xargs"),
    *("structured_outputs", "kv_transfer_params", "repetition_penalty", "chat_template_kwargs"),
    *("add_generation_prompt", "echo", "truncate_prompt_tokens", "allowed_token_ids"),
)
INTEGERS = (0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400)
FLOATS = (0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"))
TEXTS = ("", "keydiff", "none", "snapkv", "auto", "snapkv+criticalkv", "../../etc/passwd", "%s%n")
CHARACTERS = (0, 9, 34, 0x200B, 0x202E, 0xD7FF, 0x1F600)
MEGABYTE = "x" * 1_000_000


def odd(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, and some that are none."""
    nested: Any = []
    for _ in range(chance.choice((5, 50, 900))):
        nested = [nested]
    characters = [chr(chance.choice(CHARACTERS)) for _ in range(chance.randrange(20))]
    leaves = (
        *(None, chance.random() < 0.5, chance.choice(INTEGERS), chance.choice(FLOATS)),
        *(chance.choice(TEXTS), "".join(characters), "y" * chance.randrange(200)),
        *(0.25, 32, "0.25", MEGABYTE if chance.random() < 0.1 else "1e999"),
    )
    pick = chance.randrange(len(leaves) + (3 if depth < 3 else 0))
    if pick < len(leaves):
        return leaves[pick]
    if pick == len(leaves):
        return nested
    parts = [odd(chance, depth + 1) for _ in range(chance.randrange(4))]
    if pick == len(leaves) + 1:
        return parts
    return {str(odd(chance, 3))[:30]: part for part in parts}


def body(chance: random.Random, model: str) -> dict[str, Any]:
    """A request with something wrong in it, mostly."""
    words = " ".join(f"w{chance.randrange(4, 250)}" for _ in range(chance.choice((1, 40, 300))))
    body: dict[str, Any] = {"model": model, "max_tokens": chance.choice((1, 2, 8))}
    body |= {"messages": [{"role": "user", "content": words}], "prompt": words}
    if chance.random() < 0.6:
        keys = (*OURS, str(odd(chance, 3))[:50])
        xargs = {chance.choice(keys): odd(chance) for _ in range(chance.randrange(1, 4))}
        body["vllm_xargs"] = xargs if chance.random() < 0.9 else odd(chance)
    if chance.random() < 0.5:
        body |= {chance.choice(FIELDS): odd(chance) for _ in range(chance.randrange(1, 3))}
    if isinstance(body.get("n"), int) and body["n"] > 4:
        body["n"] = 3  # what vLLM takes, it computes
    if chance.random() < 0.1 and body["messages"] == [{"role": "user", "content": words}]:
        place = chance.choice(("role", "content", "name", "tool_calls"))
        body["messages"] = [{**body["messages"][0], place: odd(chance)}]
    return body


def post(url: str, data: bytes) -> tuple[int, str]:
    """Status and text of the answer; 0 if there is none."""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, repr(error)


def has_reason(text: str) -> bool:
    """Whether a refusal says why, in vLLM's form."""
    try:
        return bool(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("address")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--model", default="tiny")
    arguments = parser.parse_args()
    chance, counts, failures = random.Random(arguments.seed), Counter[int](), 0
    for number in range(arguments.requests):
        data = json.dumps(body(chance, arguments.model)).encode()
        path = chance.choice(("/v1/chat/completions", "/v1/completions"))
        status, text = post(arguments.address + path, data)
        counts[status] += 1
        if status >= 500 or status == 0 or (status >= 400 and not has_reason(text)):
            failures += 1
            print(f"request {number}: {status}\n  {data[:600]!r}\n  {text[:300]}", flush=True)
    print(f"seed {arguments.seed}, by status: {dict(sorted(counts.items()))}, failed: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
