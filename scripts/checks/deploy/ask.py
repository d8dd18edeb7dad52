"""Asks a server that was started from an image, and exits with an error if it fails the test."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "release"))

from training.tasks import generate_sample

START_SECONDS = 3600  # others may be busy on this machine
LONG_ANSWER = 1500  # tokens: some seconds


def main() -> None:
    """Runs the questions that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--answers", action="store_true", help="it answers, and counts an event")
    parser.add_argument(
        "--drains", metavar="COMMAND", help="COMMAND ends it, while a request goes on to its end"
    )
    arguments = parser.parse_args()
    wait_until_healthy(arguments.address)
    client = OpenAI(base_url=f"{arguments.address}/v1", api_key="none", max_retries=0)
    if arguments.answers:
        check_answer(client, arguments.address)
    if arguments.drains is not None:
        check_drain(client, shlex.split(arguments.drains))


def wait_until_healthy(address: str) -> None:
    """Returns as soon as the server serves."""
    for _ in range(START_SECONDS):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
        except OSError:
            time.sleep(1)
        else:
            return
    raise SystemExit(f"ask: no server at {address} after {START_SECONDS} seconds")


def check_answer(client: OpenAI, address: str) -> None:
    """A question behind 512 words is answered from a compressed cache, and the event counted."""
    sample = generate_sample("multikey", num_tokens=512, seed=7)
    text = f"{sample.context}\n{sample.question}"
    reply = client.chat.completions.create(
        model="reference", messages=[{"role": "user", "content": text}], temperature=0
    )
    answer = reply.choices[0].message.content
    if answer is None or answer.split() != sample.answer.split():
        raise SystemExit(f"ask: expected {sample.answer!r}, found {answer!r}")
    metrics = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    counts = [
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("kvcompress_events_total{")
    ]
    if sum(counts) != 1:
        raise SystemExit(f"ask: expected 1 event in /metrics, found {counts}")
    print(f"ask: {sample.question} -> {answer}; 1 event")


def check_drain(client: OpenAI, command: list[str]) -> None:
    """A request that is under way when the server is told to end is answered to its last token."""
    stream = client.completions.create(
        model="reference",
        prompt="k1 v1 " * 100,
        max_tokens=LONG_ANSWER,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    usage, reason, ending = None, None, None
    for chunk in stream:
        if ending is None:
            ending = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        usage = chunk.usage or usage
        reason = (chunk.choices[0].finish_reason if chunk.choices else None) or reason
    assert ending is not None
    ended = ending.wait(120)
    if ended != 0 or reason != "length" or usage is None or usage.completion_tokens != LONG_ANSWER:
        raise SystemExit(f"ask: cut short: {reason=}, {usage=}, {command} exited with {ended}")
    print(f"ask: {LONG_ANSWER} tokens were finished after the signal")


if __name__ == "__main__":
    main()
