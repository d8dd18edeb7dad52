"""What conversations forget that go on compressed: needles of the first turn, and texts.

    python scripts/measure/turns.py MODEL --policies spans,keydiff --budgets 0.25,0.5 --out turns/

Conversations of eight turns, whose second, fourth and eighth ask, in branches, for what the first
one said: in stock vLLM (`full`), with `--kv-reuse-conversations anew`, and with `reuse`. And texts,
a stretch per turn, predicted behind what is left of the former turns: compressed together (`anew`),
or turn by turn as they came (`reuse`). Every setting reads the same. A stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from conversations import LATE, Asked, needles, requests, words
from vllm_kvcompress.cli.eval import engine_option
from vllm_kvcompress.config.auto import profile_beside
from vllm_kvcompress.config.fields import DEFAULT_MIN_TOKENS
from vllm_kvcompress.scheduling.budgets import parse_budget
from vllm_kvcompress.tools.dtypes import fast_dtype
from vllm_kvcompress.tools.evaluation.engine import Engine, Question
from vllm_kvcompress.tools.evaluation.items import load_texts
from vllm_kvcompress.tools.evaluation.prompts import load_tokenizer, split_prompt
from vllm_kvcompress.tools.evaluation.setups import FULL, Setup, setups_of, shared_engines
from vllm_kvcompress.tools.evaluation.summary import interval
from vllm_kvcompress.tools.files import append, make_folder

ANEW, REUSE = "anew", "reuse"
NEEDLES, TEXT = "needles", "text"
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Some conversations or texts, side by side, at one setting.

    Attributes:
        how: FULL, ANEW or REUSE.
        setup: policy and budget.
        task: NEEDLES or TEXT.
        group: which ones.
    """

    how: str
    setup: Setup
    task: str
    group: int

    @property
    def about(self) -> Row:
        """What its rows begin with."""
        return {"how": self.how, "setup": self.setup.name, "task": self.task, "group": self.group}


def ask_needles(engine: Engine, together: Sequence[list[Asked]], choice: Row) -> Iterator[Row]:
    """Every late question of some conversations, which go on side by side."""
    ask = partial(Question, [], agnostic=False, **choice)
    for turn in range(1, 1 + together[0][-1].turn):
        now = [[each for each in one if each.turn == turn] for one in together]
        late = [(number, each) for number, one in enumerate(now) for each in one if each.is_late]
        replies = engine.ask(*(ask(each.tokens, 16) for _, each in late)) if late else []
        for (number, each), reply in zip(late, replies, strict=True):
            yield {
                "number": number,
                "turn": turn,
                "value": fmean(wanted in reply.text for wanted in each.fact.wanted),
                "tokens": reply.prompt_tokens,
                "cached": reply.cached_tokens,
                "resident": reply.resident_tokens,
            }
        # A request's event comes behind its first token, so one of a single token has none.
        engine.ask(*(ask(one[-1].tokens, 2) for one in now))


def ask_texts(
    engine: Engine, together: Sequence[list[int]], choice: Row, size: int, going_on: bool
) -> Iterator[Row]:
    """How well those stretches of some texts are predicted that are late turns.

    Going on is one request that is compressed where its turns end; the tests have it the same.
    """
    for number, tokens in enumerate(together):
        for turn in (turn for turn in LATE if turn * size <= len(tokens)):
            begin, end = (turn - 1) * size, turn * size
            context, given = (size, begin - size + 1) if going_on else (begin, 1)
            question = Question(tokens[:context], tokens[context:end], 1, True, predicted=True)
            (reply,) = engine.ask(replace(question, num_given=given, **choice))
            yield {"number": number, "turn": turn, "value": reply.nats}


class Run:
    """All jobs of the command line, and what they found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file = options.out / "rows.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]
        self.profile = profile_beside(options.model)
        policies = options.policies.split(",")
        self.setups = setups_of(policies, options.budgets, {"profile": self.profile})
        self.groups = {task: self._groups(items) for task, items in self._items().items()}

    def _items(self) -> dict[str, list[Any]]:
        options = self.options
        tokenizer, seeds = load_tokenizer(options.model), range(options.samples)
        build = words if options.words else needles
        turns = (build(options.turns, options.tokens, options.seed + seed) for seed in seeds)
        length = options.turns * options.tokens
        texts = (
            load_texts("text", [length], 1, options.texts, options.seed) if options.texts else []
        )
        return {
            NEEDLES: [list(requests(tokenizer, each)) for each in turns],
            TEXT: [split_prompt(tokenizer, item)[0] for item in texts],
        }

    def _groups(self, items: list[Any]) -> list[list[Any]]:
        size = self.options.together
        return [items[begin : begin + size] for begin in range(0, len(items), size)]

    def jobs(self, how: str, setups: Sequence[Setup]) -> list[Job]:
        """Those of some setups that have no rows yet."""
        done = {(row["how"], row["setup"], row["task"], row["group"]) for row in self.rows}
        jobs = [
            Job(how, setup, task, group)
            for setup in setups
            for task, groups in self.groups.items()
            for group in range(len(groups))
        ]
        return [job for job in jobs if tuple(job.about.values()) not in done]

    def run(self) -> None:
        """Carries out what is missing, in as few engines as it needs."""
        from tqdm import tqdm

        full, *others = self.setups
        plan = [(FULL, [full]), (ANEW, others), (REUSE, others)]
        missing = sum(len(self.jobs(how, setups)) for how, setups in plan)
        with tqdm(total=missing, unit="group") as bar:
            for how, setups in plan:
                trigger = f"prompt,decode:{self.options.tokens}" if how == REUSE else "prompt"
                params = {
                    "trigger": trigger,
                    "reuse_conversations": how,
                    "profile": self.profile,
                    "min_tokens": self.options.min_tokens,
                }
                for shared in shared_engines(setups, params):
                    if not (jobs := self.jobs(how, shared.setups)):
                        continue
                    engine = {"dtype": fast_dtype(), **dict(self.options.engine)}
                    log = self.options.out / "engine.log"
                    with Engine(self.options.model, shared.settings, engine, log) as asked:
                        for job in jobs:
                            bar.set_description(f"{how}, {job.setup.name}, {job.task}")
                            self.carry_out(job, asked, shared.choice(job.setup))
                            bar.update()

    def carry_out(self, job: Job, engine: Engine, choice: Row) -> None:
        """Asks one group, and writes its rows."""
        together = self.groups[job.task][job.group]
        if job.task == NEEDLES:
            replies = ask_needles(engine, together, choice)
        else:
            size, going_on = self.options.tokens, job.how == REUSE
            replies = ask_texts(engine, together, choice, size, going_on)
        rows = [job.about | row for row in replies]
        append(self.file, "".join(json.dumps(row) + "\n" for row in rows))
        self.rows += rows


def table(rows: Sequence[Row], setups: Sequence[Setup]) -> Iterator[str]:
    """Needles found, of those that the full cache finds, and what is lost on texts, by turn."""
    values = {
        (
            row["how"],
            row["setup"],
            row["task"],
            row["turn"],
            row["group"],
            row["number"],
            place,
        ): row
        for place, row in _numbered(rows)
    }
    turns = sorted({row["turn"] for row in rows})
    heads = [f"{task}, turn {turn}" for task in (NEEDLES, TEXT) for turn in turns]
    yield f"| setting | {' | '.join(heads)} | text, all (95%) |"
    yield "|" + "---|" * (len(heads) + 2)
    for setup in setups[1:]:
        for how in (ANEW, REUSE):
            by_key = {key[2:]: row for key, row in values.items() if key[:2] == (how, setup.name)}
            full = {key: values[FULL, FULL, *key] for key in by_key}
            cells = [_num_right(by_key, full, turn) for turn in turns]
            losses = {key: row["value"] - full[key]["value"] for key, row in by_key.items()}
            of_texts = {key: loss for key, loss in losses.items() if key[0] == TEXT}
            for turn in turns:
                some = [loss for key, loss in of_texts.items() if key[1] == turn]
                cells.append(f"{fmean(some):.3f}" if some else "")
            cells.append(_with_interval(of_texts))
            yield f"| `{setup.name}`, {how} | {' | '.join(cells)} |"


def _numbered(rows: Sequence[Row]) -> Iterator[tuple[int, Row]]:
    """Rows with their place among those of the same conversation and turn."""
    seen: dict[tuple[Any, ...], int] = {}
    for row in rows:
        key = tuple(row[name] for name in ("how", "setup", "task", "group", "number", "turn"))
        seen[key] = seen.get(key, -1) + 1
        yield seen[key], row


def _num_right(rows: Row, full: Row, turn: int) -> str:
    """Answers that are right, of those that the full cache has right."""
    able = [key for key, row in full.items() if key[:2] == (NEEDLES, turn) and row["value"] == 1]
    right = sum(rows[key]["value"] == 1 for key in able)
    return f"{right} of {len(able)}" if able else ""


def _with_interval(losses: dict[tuple[Any, ...], float]) -> str:
    """The mean loss over texts, whose turns are no observations of their own."""
    by_text: dict[tuple[Any, ...], list[float]] = {}
    for key, loss in losses.items():
        by_text.setdefault(key[2:], []).append(loss)
    means = [fmean(some) for some in by_text.values()]
    if len(means) < 2:
        return ""
    low, high = interval(means)
    return f"{fmean(means):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="directory")
    parser.add_argument("--policies", default="auto", metavar="P,...", help="(auto)")
    parser.add_argument("--budgets", default="0.25,0.5", metavar="B,...", help="(0.25,0.5)")
    parser.add_argument("--turns", type=int, default=8, help="of a conversation (8)")
    parser.add_argument("--tokens", type=int, default=256, help="that a turn adds, about (256)")
    parser.add_argument("--min-tokens", type=int, default=DEFAULT_MIN_TOKENS, help="(256)")
    parser.add_argument("--samples", type=int, default=12, help="conversations (12)")
    parser.add_argument("--texts", type=int, default=3, help="of each kind (3)")
    parser.add_argument("--words", action="store_true", help="in the reference model's words")
    parser.add_argument("--together", type=int, default=4, help="that are asked side by side (4)")
    parser.add_argument("--seed", type=int, default=0, help="of conversations and texts (0)")
    parser.add_argument("--engine", type=engine_option, action="append", default=[], metavar="K=V")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    options.budgets = [parse_budget(text) for text in options.budgets.split(",")]
    make_folder(options.out)
    run = Run(options)
    run.run()
    print("\n".join(table(run.rows, run.setups)))


if __name__ == "__main__":
    main()
