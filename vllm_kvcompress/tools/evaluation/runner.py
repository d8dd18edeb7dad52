"""Asks every question at every setup; a run that was killed goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.engine import Engine, Question
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.metrics import METRICS
from vllm_kvcompress.tools.evaluation.prompts import (
    load_tokenizer,
    longest_prompt,
    repetition_of,
    split_prompt,
)
from vllm_kvcompress.tools.evaluation.server import Server
from vllm_kvcompress.tools.evaluation.setups import (
    AGNOSTIC,
    PREPARED,
    SERVER,
    TEXT,
    Setup,
    SharedEngine,
    shared_engines,
)
from vllm_kvcompress.tools.files import append, make_folder, named, read_within, write_whole

Key = tuple[str, str, int]  # setup, mode, item

BLOCK_SIZE = 32  # of engines, unless --engine says another
PLAN, ANSWERS, LOG = "plan.json", "answers.jsonl", "engine.log"


@dataclass(frozen=True)
class Plan:
    """One evaluation.

    Attributes:
        model: name or directory.
        items: the questions.
        setups: the settings to compare.
        modes: query-aware, query-agnostic, or both; or prepared.
        params: further compression settings, the same for all setups (trigger, params, profile).
        engine: further keyword arguments of `vllm.LLM`.
        base_url, served_name: the server asked at the setup `server`, and its name for the model.
        concurrency: questions asked at once.
    """

    model: str
    items: Sequence[Item]
    setups: Sequence[Setup]
    modes: Sequence[str]
    params: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    base_url: str = ""
    served_name: str = ""
    concurrency: int = 1

    def answers_key(self) -> dict[str, Any]:
        """What answers depend on besides the setup; if it is the same, they are reused."""
        questions = json.dumps([asdict(item) for item in self.items]).encode()
        return {
            "model": self.model,
            "questions": hashlib.sha256(questions).hexdigest(),
            "params": self.params,
            "engine": self.engine,
            "server": self.base_url,
        }

    def open_questions(self, setup: Setup, done: set[Key]) -> list[tuple[str, int]]:
        """Mode and item number of the questions of a setup without an answer.

        Texts are predicted as prompts, which read everything, so a sparse read is asked for none.
        """
        return [
            (mode, number)
            for mode in (*setup.modes(self.modes), *([TEXT] if setup.read is None else []))
            for number, item in enumerate(self.items)
            if (mode == TEXT) == bool(item.continuation) and (setup.name, mode, number) not in done
        ]


def run(
    plan: Plan, folder: Path, progress: Callable[[int, int], Callable[[str], None]]
) -> list[dict[str, Any]]:
    """Asks whatever the folder has no answer to yet.

    Args:
        plan: the evaluation.
        folder: takes the answers, as they come.
        progress: called with (answered, all); returns what to call after every answer.

    Returns:
        All answers, in the order of setups, modes and items.

    Raises:
        ConfigError: the folder holds answers of another evaluation.
        EngineError: an engine ended.
        FileError: the folder cannot be written to.
    """
    make_folder(folder)
    _claim(folder, plan)
    answers = list(_read(folder / ANSWERS))
    done = {_key(answer) for answer in answers}
    still_open = {setup: plan.open_questions(setup, done) for setup in plan.setups}
    num_all = sum(len(plan.open_questions(setup, set())) for setup in plan.setups)
    advance = progress(num_all - sum(map(len, still_open.values())), num_all)
    prompts = _prompts(plan) if any(still_open.values()) else []
    waiting = [setup for setup, questions in still_open.items() if questions]
    for shared in shared_engines(waiting, plan.params):
        with _engine(plan, shared, folder / LOG) as engine:
            for setup in shared.setups:
                choice = shared.choice(setup)
                questions = still_open[setup]
                for begin in range(0, len(questions), plan.concurrency):
                    batch = questions[begin : begin + plan.concurrency]
                    new = [
                        {"setup": setup.name, **answer, **_read_part(plan, setup, answer)}
                        for answer in _answers(engine, plan, prompts, batch, choice)
                    ]
                    append(folder / ANSWERS, "".join(json.dumps(one) + "\n" for one in new))
                    answers += new
                    for answer in new:
                        advance(f"{setup.name}, {answer['mode']}")
    order = {setup.name: place for place, setup in enumerate(plan.setups)}
    modes = {setup.name: (*setup.modes(plan.modes), TEXT) for setup in plan.setups}
    wanted = [answer for answer in answers if answer["mode"] in modes.get(answer["setup"], ())]
    return sorted(wanted, key=lambda a: (order[a["setup"]], a["mode"], a["item"]))


def _read_part(plan: Plan, setup: Setup, answer: dict[str, Any]) -> dict[str, float]:
    """The share of the resident tokens that decode steps read, where that is not all."""
    if setup.read is None:
        return {}
    block_size = int(plan.engine.get("block_size", BLOCK_SIZE))
    return {"read_part": setup.read_part(round(answer["resident_tokens"]), block_size)}


def _engine(plan: Plan, shared: SharedEngine, log: Path) -> Engine | Server:
    if shared.setups[0].policy == SERVER:
        return Server(plan.base_url, plan.served_name)
    return Engine(plan.model, shared.settings, plan.engine, log)


def _prompts(plan: Plan) -> list[tuple[list[int], list[int], list[int]]]:
    """Context, question and the preparing request's repetition, as token ids, of every item."""
    tokenizer = load_tokenizer(plan.model)
    longest = plan.engine.get("max_model_len")
    if longest is None and any(item.may_cut for item in plan.items):
        longest = longest_prompt(plan.model)
    parts = [split_prompt(tokenizer, item, longest) for item in plan.items]
    prepared = PREPARED in plan.modes
    return [
        (context, question, repetition_of(tokenizer, context) if prepared else [])
        for context, question in parts
    ]


def _answers(
    engine: Engine | Server,
    plan: Plan,
    prompts: Sequence[tuple[list[int], list[int], list[int]]],
    batch: Sequence[tuple[str, int]],
    choice: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Asks modes and items at once."""
    questions = [
        Question(
            *prompts[number][:2],
            plan.items[number].max_tokens,
            agnostic=mode in (AGNOSTIC, PREPARED, TEXT),
            repetition=prompts[number][2] if mode == PREPARED else [],
            predicted=mode == TEXT,
            **choice,
        )
        for mode, number in batch
    ]
    for (mode, number), reply in zip(batch, engine.ask(*questions), strict=True):
        item = plan.items[number]
        yield {
            "mode": mode,
            "item": number,
            "task": item.task,
            "length": item.length,
            "depth": item.depth,
            "score": None if mode == TEXT else METRICS[item.metric](reply.text, item.answers),
            **vars(reply),
        }


def _claim(folder: Path, plan: Plan) -> None:
    """Records the plan in the folder; refuses a folder with answers to another one."""
    path, key = folder / PLAN, plan.answers_key()
    if path.exists():
        former = _read_plan(path)
        different = [name for name in key if former.get(name) != key[name]]
        if different:
            raise ConfigError(
                f"--out {folder} holds answers of another evaluation (other "
                f"{', '.join(different)}); give another folder, or remove this one."
            )
    write_whole(path, json.dumps(key, indent=2) + "\n")


def _read_plan(path: Path) -> dict[str, Any]:
    """Reads what an earlier run asked."""
    with named(path):
        text = read_within(path, errors="replace")
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError):
        plan = None
    if not isinstance(plan, dict):
        raise ConfigError(
            f"{path}: expected what an earlier run asked, as a JSON object; remove the folder, or "
            "give another one."
        )
    return plan


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields answers of an earlier run; drops a last line that was cut off."""
    if not path.exists():
        return
    with named(path):
        lines = read_within(path, errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        write_whole(path, "".join(lines))
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            _key(answer)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}: expected an answer of an earlier run ({error!r}); remove "
                "the line, or give another folder."
            ) from None
        yield answer


def _key(answer: dict[str, Any]) -> Key:
    return answer["setup"], answer["mode"], answer["item"]
