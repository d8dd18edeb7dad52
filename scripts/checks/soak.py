#!/usr/bin/env python3
"""Serves a seeded mix of requests for a long time, and checks that nothing is lost or mixed up.

    python scripts/checks/soak.py --requests 2000 --seed 1 [--minutes M] [--offset K] [--in-process]
        [--per-setup N] [--setups NAME ...] [--folder FOLDER]

Request i depends on the seed and i alone, as does the server that it goes to: every --per-setup
requests the next one has its turn (`soak_parts/setups.py`). --offset K begins at request K.
--in-process drives the engine itself; there requests also arrive at steps that the seed says, so
that a failure comes again. All run with KVCOMPRESS_CHECK=1. With --folder a run that was stopped
goes on where it was. Ends with 1 unless all requests ran and all checks hold.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "release")]

from tqdm import tqdm  # noqa: E402

from soak_parts import models  # noqa: E402
from soak_parts.asks import Answer, Ask, Batch, Served  # noqa: E402
from soak_parts.hosts import Host, in_process_host, server_host  # noqa: E402
from soak_parts.judge import CLOSE, difference, problem  # noqa: E402
from soak_parts.schedule import Schedule  # noqa: E402
from soak_parts.setups import BY_NAME  # noqa: E402
from soak_parts.tally import Tally  # noqa: E402
from vllm_kvcompress.errors import EngineError  # noqa: E402

MAX_BATCH_REQUESTS = 240  # at whose end few requests are left, and steps cost the same with few


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (%(default)s)")
    parser.add_argument("--offset", type=int, default=0, help="the first request's number")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="then stop")
    parser.add_argument(
        "--per-setup", type=int, default=250, help="requests of a turn (%(default)s)"
    )
    parser.add_argument(
        "--setups", nargs="+", choices=BY_NAME, default=list(BY_NAME), metavar="NAME"
    )
    parser.add_argument("--in-process", action="store_true", help="the engine without a server")
    parser.add_argument("--folder", type=Path, help="where models, logs and counts are kept")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until all is done, or the time is over."""
    options = parse(arguments)
    os.environ["KVCOMPRESS_CHECK"] = "1"
    # oneDNN keeps its last 1,024 matrix products, one for each number of tokens of a step: memory
    # that grows for thousands of requests, and would hide what requests leave behind.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    if options.in_process:  # vLLM compiles how it ranks log-probabilities, 4 s in every process
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        models.prepare(folder)
        run = Run(options, folder)
        run.all()
    print(run.tally.summary(options.requests, run.command()))
    return 0 if run.tally.passed(options.requests) else 1


class Run:
    """A run: its schedule and its tally."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        setups = tuple(BY_NAME[name] for name in options.setups)
        self.schedule = Schedule(options.seed, options.per_setup, setups)
        self.file = folder / "tally.json"
        key = f"{options.seed} {options.per_setup} {options.setups} {options.in_process}"
        self.tally = Tally.load(self.file, key, options.offset)
        self.deadline = time.monotonic() + 60 * options.minutes

    @property
    def left(self) -> int:
        """Requests that are still to come."""
        return self.options.requests - self.tally.done

    def command(self) -> str:
        """Returns the command that repeats this run."""
        options = self.options
        words = ["python", "scripts/checks/soak.py", f"--requests={options.requests}"]
        words += [f"--seed={options.seed}", f"--offset={options.offset}"]
        words += [f"--per-setup={options.per_setup}"]
        if options.setups != list(BY_NAME):
            words += ["--setups", *options.setups]
        return shlex.join(words + ["--in-process"] * options.in_process)

    def all(self) -> None:
        """Serves turn after turn until the requests or the time are used up."""
        done = self.tally.done
        with tqdm(total=self.options.requests, initial=done, unit="req") as self.bar:
            while self.left > 0 and time.monotonic() < self.deadline:
                index = self.tally.next_index
                try:
                    self.turn()
                except EngineError as error:
                    setup = self.schedule.setup_of(index).name
                    self.tally.problems.append(
                        f"{self.tally.next_index} and behind, on {setup}: {error}"
                    )
                    self.tally.done = self.schedule.end_of_turn(index) - self.tally.first
                    self.tally.save(self.file)

    def turn(self) -> None:
        """Starts one server, and serves its requests until its turn ends."""
        index = self.tally.next_index
        setup, end = self.schedule.setup_of(index), self.schedule.end_of_turn(index)
        end = min(end, index + self.left)
        self.bar.set_description(setup.name)
        host = in_process_host if self.options.in_process else server_host
        memory: list[tuple[int, int]] = []
        with host(setup, self.folder) as server:
            while index < end and time.monotonic() < self.deadline:
                started = time.monotonic()
                size = min(MAX_BATCH_REQUESTS, end - index)
                asks = [self.schedule.ask(each) for each in range(index, index + size)]
                served = server.call(Batch(asks, f"{self.options.seed}/{index}", setup.concurrency))
                memory.append((index + size, served.rss))
                self.see(asks, served)
                self.tally.preempted[setup.name] += served.counts["preemptions"]
                for ask in asks:
                    if ask.alone:
                        self.ask_alone(server, ask, served.answers[ask.index])
                index += size
                self.tally.done += size
                self.tally.by_setup[setup.name] += size
                self.tally.seconds += time.monotonic() - started
                self.tally.save(self.file)
                self.bar.update(size)
        self.tally.see_memory(setup.name, memory)
        self.tally.save(self.file)

    def see(self, asks: list[Ask], served: Served) -> None:
        """Checks the answers of a batch, and counts them."""
        tally = self.tally
        for ask in asks:
            answer = served.answers.get(ask.index, Answer("lost"))
            tally.outcomes[answer.outcome] += 1
            tally.counts["tokens answered"] += sum(len(each.tokens) for each in answer.choices)
            tally.counts["prompt tokens cached"] += answer.cached
            if ask.secrets and answer.outcome == "answered":
                said = set(answer.choices[0].text.split())
                tally.counts["secrets asked for"] += 1
                tally.counts["secrets told"] += {*ask.secrets} <= said
                # The model makes words up, too. What is not another's page, it says alone, too.
                ask.alone |= not said.isdisjoint(ask.foreign)
                tally.counts["words of the other tenant"] += not said.isdisjoint(ask.foreign)
            if reason := problem(ask, answer):
                tally.problems.append(f"{ask.index}: {reason}")
        tally.counts.update(served.counts)
        if served.left_over:
            tally.problems.append(f"{asks[0].index} to {asks[-1].index}: {served.left_over}")

    def ask_alone(self, server: Host, ask: Ask, answer: Answer) -> None:
        """Asks again without other requests, and compares the answers."""
        served = server.call(Batch([ask], "alone", 1))
        again = served.answers[ask.index]
        if answer.outcome != "answered" or again.outcome != "answered":
            return  # said already
        parting = difference(answer.choices[0], again.choices[0])
        if parting is None:
            self.tally.counts["alone the same"] += 1
            return
        place, nats = parting
        if nats < CLOSE:
            self.tally.counts["alone another of two equal tokens"] += 1
        else:
            self.tally.counts["alone different"] += 1
            self.tally.problems.append(
                f"{ask.index}: alone it differs from token {place} on, {nats:.4f} nats apart"
            )


if __name__ == "__main__":
    sys.exit(main())
