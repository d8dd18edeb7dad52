"""Compares what a server's canary says with the loss of the same answers, computed offline.

    vllm-kvcompress serve MODEL --kv-policy adakv --kv-budget 0.25 --kv-min-answer-tokens 0 \\
        --kv-shadow 1.0 --dtype float32
    python scripts/measure/canary.py MODEL --url http://127.0.0.1:8000

Asks for continuations of pieces of Python's manual, greedily and at temperature 1. Offline is the
log-probability that the server gave each token of an answer, less the one that transformers gives
it with the full cache, in fp32; the mean over an answer's tokens, and then over answers. The
server must have no other requests.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer
from vllm_kvcompress.tools.evaluation.texts import pieces

SECONDS = 120  # in which a server has scored the last answer
TEMPERATURES = {"greedy": 0.0, "at temperature 1": 1.0}


class Answer(NamedTuple):
    """A prompt with its answer, and the server's log-probabilities of the answer's tokens."""

    tokens: list[int]
    logprobs: list[float]


class Scores(NamedTuple):
    """What the canary has counted so far."""

    answers: float
    tokens: float
    nats: float
    changed: float


def ask(url: str, tokens: Sequence[int], max_tokens: int, temperature: float, seed: int) -> Answer:
    """Asks for a continuation."""
    body = {
        "prompt": list(tokens),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), header)
    with urllib.request.urlopen(request) as response:
        choice = json.load(response)["choices"][0]
    return Answer([*tokens, *choice["token_ids"]], choice["logprobs"]["token_logprobs"])


def read_scores(url: str) -> Scores:
    """Reads the canary's counts and sums."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()

    def total(name: str) -> float:
        return sum(map(float, re.findall(rf"^kvcompress_shadow_{name}\{{.*\}} (\S+)$", text, re.M)))

    nats = total("lost_nats_total") - total("gained_nats_total")  # a histogram counts a gain as 0
    changed = total("changed_fraction_sum")
    return Scores(total("loss_count"), total("tokens_total"), nats, changed)


def await_scores(url: str, number: float) -> Scores:
    """Waits until the canary has scored so many answers, and then no other for three seconds."""
    end, last = time.monotonic() + SECONDS, None
    while (scores := read_scores(url)).answers < number or scores != last:
        if time.monotonic() > end:
            raise SystemExit(
                f"expected {number:g} scored answers, found {scores.answers:g}; start the server "
                "with --kv-shadow 1.0 and --kv-min-answer-tokens 0, and send nothing else."
            )
        last = scores
        time.sleep(3)
    return scores


@torch.inference_mode()
def loss_offline(model: AutoModelForCausalLM, answer: Answer) -> float:
    """Returns the mean over an answer's tokens of log p_server - log p_full, in nats."""
    number = len(answer.logprobs)
    logits = model(torch.tensor([answer.tokens[:-1]]), logits_to_keep=number).logits[0]
    chosen = torch.tensor(answer.tokens[-number:])[:, None]
    full = logits.float().log_softmax(-1).gather(1, chosen)[:, 0]
    return float((torch.tensor(answer.logprobs) - full).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--samples", type=int, default=40, help="answers of each kind (40)")
    parser.add_argument("--length", type=int, default=768, help="tokens of a prompt (768)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (64)")
    parser.add_argument("--concurrency", type=int, default=8, help="prompts at a time (8)")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.model)
    texts = pieces("manual", options.length, 0, options.samples)
    prompts = [tokenizer.encode(text)[: options.length] for text in texts]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    print("| answers | canary | offline | standard error over answers | best candidates changed |")
    print("|---|---|---|---|---|")
    for name, temperature in TEMPERATURES.items():
        before = await_scores(options.url, 0)  # behind the answer that warmed the engine up

        def ask_one(seed: int, temperature: float = temperature) -> Answer:
            return ask(options.url, prompts[seed], options.max_tokens, temperature, seed)

        with ThreadPoolExecutor(options.concurrency) as pool:
            numbers = range(options.samples)
            answers = list(tqdm(pool.map(ask_one, numbers), total=options.samples, desc=name))
        after = await_scores(options.url, before.answers + options.samples)
        losses = [loss_offline(model, answer) for answer in tqdm(answers, desc="offline")]
        scored = Scores(*(new - old for new, old in zip(after, before, strict=True)))
        error = statistics.stdev(losses) / math.sqrt(len(losses))
        print(
            f"| {name} | {scored.nats / scored.tokens:.4f} | {statistics.mean(losses):.4f} "
            f"| {error:.4f} | {scored.changed / scored.answers:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
