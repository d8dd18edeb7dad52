"""What draft steps and verifying steps take, and how many drafts are accepted.

    python scripts/measure/drafting.py costs [--sizes 1x1024,8x1024] [--shape layers=4] --out FILE
    python scripts/measure/drafting.py chosen [--sizes 1x1024,8x1024] [--shape layers=4] --out FILE
    python scripts/measure/drafting.py accepted MODEL [--lengths 1024,4096,8000] --out FILE
    python scripts/measure/drafting.py beside MODEL [--layers 25] [--budget 0.25] --out FILE

`costs` takes a model with random weights, like `bench`. One engine runs all cycles, with 0, 1, 3
and 7 drafts in turns, so that a slow minute of the machine hits all of them. `chosen` lets the
engine choose, and compares it with the same engine that drafts nothing, in turns. `accepted` has a
model continue texts that come with Python, greedily. `beside` does the same with vLLM's drafts, of
ngram or of the model's own first layers, beside a policy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from vllm_kvcompress.scheduling.draft_pace import CHOICES, MAX_DRAFTS, DraftPace
from vllm_kvcompress.tools.benchmark.report import machine
from vllm_kvcompress.tools.benchmark.shapes import VOCABULARY, ModelShape
from vllm_kvcompress.tools.evaluation.texts import CHARACTERS_PER_TOKEN, KINDS
from vllm_kvcompress.vllm_plugin.compat.engine import (
    build_engine,
    engine_parts,
    engine_scheduler,
    greedy,
)

WARM_UP = 1  # turns that are not counted


class InTurns(DraftPace):
    """Drafts 0, 1, 3 and 7 tokens in turns, and notes what cycles take."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = cycle(CHOICES)
        self.seconds: dict[int, list[float]] = {number: [] for number in CHOICES}

    def choose(self, request_ids: list[str], num_tokens: int) -> int:
        """Returns the next number."""
        return next(self._turns)

    def note_cycle(
        self, num_requests: int, num_tokens: int, num_drafts: int, seconds: float
    ) -> None:
        """Notes how long a cycle took."""
        self.seconds.get(num_drafts, []).append(seconds)


class Noting(DraftPace):
    """Chooses as when serving, and notes what."""

    def __init__(self, most: int = MAX_DRAFTS) -> None:
        super().__init__()
        self._most = most
        self.restart()

    def restart(self) -> None:
        """Forgets what was noted, but not what was measured."""
        self.numbers: Counter[int] = Counter()
        self.tokens, self.seconds = 0, 0.0

    def choose(self, request_ids: list[str], num_tokens: int) -> int:
        """Returns the number that serving chooses, up to the most."""
        return min(self._most, super().choose(request_ids, num_tokens))

    def note_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Counts the accepted drafts as tokens."""
        super().note_verified(request_id, num_drafts, num_accepted)
        self.tokens += num_accepted

    def note_cycle(
        self, num_requests: int, num_tokens: int, num_drafts: int, seconds: float
    ) -> None:
        """Counts a cycle, and the token of each request that is no draft."""
        super().note_cycle(num_requests, num_tokens, num_drafts, seconds)
        self.numbers[num_drafts] += 1
        self.tokens += num_requests
        self.seconds += seconds


class Always(DraftPace):
    """Drafts as many tokens as possible, and notes how many are accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[int] = []

    def choose(self, request_ids: list[str], num_tokens: int) -> int:
        """Returns the largest number."""
        return MAX_DRAFTS

    def note_verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Notes how many of seven drafts were accepted."""
        if num_drafts == MAX_DRAFTS:
            self.accepted.append(num_accepted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rule", default="quest:0.1")
    parser.add_argument("--out", type=Path, required=True)
    kinds = parser.add_subparsers(dest="what", required=True)
    costs = kinds.add_parser("costs")
    costs.add_argument("--sizes", default="1x1024,8x1024,32x1024,1x8192,8x8192,1x32768")
    costs.add_argument("--shape", default="")
    costs.add_argument("--turns", type=int, default=8)
    chosen = kinds.add_parser("chosen")
    chosen.add_argument("--sizes", default="1x1024,8x1024,32x1024,1x8192,8x8192,1x32768")
    chosen.add_argument("--shape", default="")
    chosen.add_argument("--output", type=int, default=128)
    chosen.add_argument("--repeats", type=int, default=3)
    accepted = kinds.add_parser("accepted")
    accepted.add_argument("model")
    accepted.add_argument("--lengths", default="1024,4096,8000")
    accepted.add_argument("--output", type=int, default=96)
    accepted.add_argument("--samples", type=int, default=2)
    beside = kinds.add_parser("beside")
    beside.add_argument("model")
    beside.add_argument("--layers", type=int, default=0, help="of the draft model; 0: ngram")
    beside.add_argument("--drafts", type=int, default=3)
    beside.add_argument("--policy", default="adakv")
    beside.add_argument("--budget", type=float, default=1.0)
    beside.add_argument("--length", type=int, default=1024)
    beside.add_argument("--output", type=int, default=96)
    beside.add_argument("--samples", type=int, default=2)
    options = parser.parse_args()
    measures = {"costs": measure_costs, "chosen": measure_chosen, "accepted": measure_accepted}
    measures["beside"] = measure_beside
    measured = measures[options.what](options)
    result = {"machine": machine(), "rule": options.rule, options.what: measured}
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def build(model: str, options: argparse.Namespace, longest: int, **more: Any) -> Any:
    """Builds an engine that drafts, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    settings = {"policy": "none", "draft": options.rule}
    engine = {"max_model_len": longest, "enforce_eager": True, **more}
    return build_engine(model, settings, engine)


def measure_costs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns seconds of cycles by size of the batch: medians and lower quartiles."""
    output, rows = (options.turns + WARM_UP) * sum(1 + number for number in CHOICES) + 1, []
    sizes, llm = random_engine(options, output)
    drafter = engine_parts(llm.llm_engine)[1].compression.drafter
    for number, length in sizes:
        drafter.pace = pace = InTurns()
        generate(llm, number, length, output)
        row: dict[str, Any] = {"setup": f"{number}x{length}", "requests": number, "tokens": length}
        for drafts, seconds in pace.seconds.items():
            counted = sorted(seconds[WARM_UP:])
            row[str(drafts)] = {
                "median": statistics.median(counted),
                "quartile": counted[len(counted) // 4],
                "least": counted[0],
                "cycles": len(counted),
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def random_engine(options: argparse.Namespace, output: int) -> tuple[list[tuple[int, int]], Any]:
    """Returns batches as requests and tokens, and an engine of random weights for them."""
    pairs = [size.split("x") for size in options.sizes.split(",")]
    sizes = [(int(number), int(length)) for number, length in pairs]
    longest = max(length for _, length in sizes) + output + 32
    blocks = max(number * (length + output + 64) // 32 for number, length in sizes) + 64
    shape = ModelShape.parse(options.shape)
    with tempfile.TemporaryDirectory() as directory:
        shape.write(Path(directory), longest)
        llm = build(
            directory,
            options,
            longest,
            load_format="dummy",
            dtype=shape.dtype,
            skip_tokenizer_init=True,
            num_gpu_blocks_override=blocks,
        )
    return sizes, llm


def generate(llm: Any, number: int, length: int, output: int) -> None:
    """Answers random prompts, the same whenever it is called; their blocks are hit then."""
    draw = random.Random(length)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for _ in range(number)]
    params = greedy(max_tokens=output, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)


def measure_chosen(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns cycles by number of drafts, and seconds per token over those of no drafts."""
    rows: list[dict[str, Any]] = []
    sizes, llm = random_engine(options, options.output)
    drafter = engine_parts(llm.llm_engine)[1].compression.drafter
    for number, length in sizes:
        paces, ratios = (Noting(), Noting(most=0)), []
        for repeat in range(options.repeats + 1):
            seconds = []
            for pace in paces:
                pace.restart()
                drafter.pace = pace
                generate(llm, number, length, options.output)
                seconds.append(pace.seconds / pace.tokens)
            if repeat:
                ratios.append(seconds[0] / seconds[1])
        row = {"setup": f"{number}x{length}", "requests": number, "tokens": length}
        row |= {"ratio": statistics.median(ratios)}
        row |= {"ratios": ratios, "seconds": seconds, "cycles": dict(paces[0].numbers)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def measure_accepted(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns how many drafts are accepted, and tokens per cycle, by kind of text and length."""
    lengths = list(map(int, options.lengths.split(",")))
    llm = build(options.model, options, max(lengths) + options.output + 16)
    tokenizer = llm.get_tokenizer()
    drafter = engine_parts(llm.llm_engine)[1].compression.drafter
    params, rows = greedy(max_tokens=options.output, ignore_eos=True), []
    for length in lengths:
        for kind in KINDS:
            drafter.pace = pace = Always()
            prompts = [
                {"prompt_token_ids": tokenizer.encode(text)[:length]}
                for text in texts(kind, length, options.samples)
            ]
            llm.generate(prompts, params, use_tqdm=False)
            row: dict[str, Any] = {"setup": f"{kind}@{length}", "cycles": len(pace.accepted)}
            for number in CHOICES[1:]:
                tokens = statistics.mean(1 + min(number, each) for each in pace.accepted)
                row[f"tokens per cycle of {number}"] = tokens
            row["first accepted"] = statistics.mean(each > 0 for each in pace.accepted)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def measure_beside(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns how many of vLLM's drafts are accepted beside a policy, by kind of text."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    drafts: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    settings = {"policy": options.policy, "budget": options.budget, "trigger": "prompt"}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        if options.layers:
            write_first_layers(options.model, options.layers, directory)
            drafts = {"method": "draft_model", "model": directory}
        engine = {
            "speculative_config": {**drafts, "num_speculative_tokens": options.drafts},
            "max_model_len": options.length + options.output + 16,
            "enforce_eager": True,
        }
        llm = build_engine(options.model, settings, engine)
        accepted = note_accepted(llm, options.drafts)
        tokenizer = llm.get_tokenizer()
        params = greedy(max_tokens=options.output, ignore_eos=True)
        for kind in KINDS:
            prompts = [
                {"prompt_token_ids": tokenizer.encode(text)[: options.length]}
                for text in texts(kind, options.length, options.samples)
            ]
            llm.generate(prompts, params, use_tqdm=False)
            rows.append(
                {
                    "setup": kind,
                    "cycles": len(accepted),
                    "first accepted": statistics.mean(each > 0 for each in accepted),
                    "tokens per cycle": 1 + statistics.mean(accepted),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            accepted.clear()
    return rows


def write_first_layers(model: str, num_layers: int, directory: str) -> None:
    """Writes a model without its later layers."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=num_layers).save_pretrained(
        directory
    )


def note_accepted(llm: Any, num_drafts: int) -> list[int]:
    """Returns a list to which an engine adds how many of a request's drafts it has accepted.

    Steps with fewer drafts, before an event or at an answer's end, are left out.
    """
    scheduler, accepted = engine_scheduler(llm.llm_engine), []
    make_stats = scheduler.make_spec_decoding_stats

    def noting(*args: Any, **given: Any) -> Any:
        if given["num_draft_tokens"] == num_drafts:
            accepted.append(given["num_accepted_tokens"])
        return make_stats(*args, **given)

    scheduler.make_spec_decoding_stats = noting
    return accepted


def texts(kind: str, length: int, samples: int) -> Iterator[str]:
    """Yields texts with enough characters for as many tokens."""
    text = "\n\n".join(KINDS[kind]())
    size = length * CHARACTERS_PER_TOKEN
    starts = range(0, max(1, len(text) - size), size)
    for start in islice(starts, samples):
        yield text[start : start + size]


if __name__ == "__main__":
    main()
