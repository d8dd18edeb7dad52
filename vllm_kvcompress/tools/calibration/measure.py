"""Measures the losses of a calibration with the engines and the questions of `eval`."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import json_or_text
from vllm_kvcompress.tools.calibration.bounds import upper_bound
from vllm_kvcompress.tools.calibration.record import Calibration, TextLosses, smallest_budget
from vllm_kvcompress.tools.evaluation import runner, texts
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.setups import FULL, setups_of

_SEED = 7  # of the order of texts


@dataclass(frozen=True)
class Request:
    """What is to be calibrated.

    Attributes:
        model: name or directory.
        policy: as users name it.
        params: further compression settings, as `runner.Plan` has them.
        budgets: of the ladder, fractions below 1.
        items: texts, in the order of `drawn`.
        engine: further keyword arguments of `vllm.LLM`.
        concurrency: texts at once.
    """

    model: str
    policy: str
    params: dict[str, Any]
    budgets: tuple[float, ...]
    items: Sequence[Item]
    engine: dict[str, Any] = field(default_factory=dict)
    concurrency: int = 1


def measure(
    request: Request, folder: Path, progress: Callable[[int, int], Callable[[str], None]]
) -> list[TextLosses]:
    """Returns every text's losses; a run that was stopped goes on where it was.

    Of the texts of each kind and length every second one calibrates.

    Args:
        request: what is measured.
        folder: takes the answers of a run while it lasts, in a folder of its own.
        progress: as `runner.run` has it.

    Raises:
        ConfigError: at a budget nothing was compressed.
    """
    setups = setups_of([request.policy], request.budgets, request.params)
    plan = runner.Plan(
        model=request.model,
        items=request.items,
        setups=setups,
        modes=(),
        params=request.params,
        engine=request.engine,
        concurrency=request.concurrency,
    )
    key = json.dumps([plan.answers_key(), [setup.name for setup in setups]], sort_keys=True)
    folder = folder / f"calibrating-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    answers = runner.run(plan, folder, progress)
    nats = {(answer["setup"], answer["item"]): answer["nats"] for answer in answers}
    _check_compressed(answers)
    rows, seen = [], dict.fromkeys(((item.task, item.length) for item in request.items), 0)
    for number, item in enumerate(request.items):
        full = nats[FULL, number]
        losses = [nats[setup.name, number] - full for setup in setups if setup.budget is not None]
        calibrates = seen[item.task, item.length] % 2 == 0
        seen[item.task, item.length] += 1
        rounded = tuple(round(loss, 5) for loss in losses)
        rows.append(TextLosses(item.task, item.length, calibrates, rounded))
    shutil.rmtree(folder, ignore_errors=True)
    return rows


def _check_compressed(answers: Sequence[dict[str, Any]]) -> None:
    """Refuses a ladder at which some text was left whole, whose loss of 0 would say nothing."""
    for answer in answers:
        if answer["setup"] != FULL and answer["resident_tokens"] >= answer["prompt_tokens"]:
            raise ConfigError(
                f"{answer['setup']} compressed nothing of a text of {answer['prompt_tokens']} "
                "tokens, so its loss says nothing; give longer texts (--length), or budgets that "
                "leave out at least a block."
            )


def own_texts(
    lengths: Sequence[int], continuation: int, samples: int, tokenizer: Any
) -> list[Item]:
    """Texts that come with Python; of each kind and length `samples` at most, one per document."""
    items = []
    for kind, length in product(texts.KINDS, lengths):
        pieces = list(dict.fromkeys(texts.documents(kind, length + continuation)))
        random.Random(_SEED).shuffle(pieces)
        fitting = (
            piece for piece in pieces if len(tokenizer(piece)["input_ids"]) >= length + continuation
        )
        chosen = [piece for piece, _ in zip(fitting, range(samples), strict=False)]
        items += [_item(kind, piece, length, continuation) for piece in chosen]
    return drawn(items)


def user_texts(path: Path, lengths: Sequence[int], continuation: int, tokenizer: Any) -> list[Item]:
    """Texts of a user's file: one of each line (JSON, `{"text": ...}`), or pieces of a text.

    A line is compressed to the longest of the lengths that leaves it a continuation; what is behind
    that does not count, and lines too short for any are left out. A text is cut into pieces of each
    length, of which every second one is taken.

    Raises:
        ConfigError: the file cannot be read, or no text in it is long enough.
    """
    content = texts.read(path)
    if path.suffix == ".txt":
        cut = [(each, texts.cut(content, each + continuation)[::2]) for each in lengths]
        pieces = [(piece, [length]) for length, some in cut for piece in some]
    else:
        lines = enumerate(content.splitlines(), 1)
        every = [_text_of(path, number, line) for number, line in lines if line.strip()]
        pieces = [(piece, sorted(lengths)) for piece in every]
    items = []
    for piece, able in pieces:
        room = len(tokenizer(piece)["input_ids"]) - continuation
        fitting = [length for length in able if length <= room]
        items += [_item(path.stem, piece, length, continuation) for length in fitting[-1:]]
    for length in lengths:
        if all(item.length != length for item in items):
            raise ConfigError(
                f"--data {path}: expected texts of at least {length + continuation} tokens, "
                f"{length} to compress (--length) and {continuation} to predict (--continuation), "
                f"found {len(pieces)} shorter or longer ones; give such texts, or other lengths."
            )
    return drawn(items)


def _text_of(path: Path, number: int, line: str) -> str:
    row = json_or_text(line)
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigError(
            f'--data {path}, line {number}: expected a JSON object with a text, {{"text": "..."}}; '
            "put the prompt and what was answered into it, one after the other."
        )
    return text


def drawn(items: list[Item]) -> list[Item]:
    """Shuffles texts, always alike: bounds follow from an order that is no choice of anybody."""
    random.Random(_SEED).shuffle(items)
    return items


def _item(kind: str, piece: str, length: int, continuation: int) -> Item:
    return Item(
        context=piece,
        question="",
        answers=(),
        metric="",
        max_tokens=1,
        task=kind,
        length=length,
        chat=False,
        continuation=continuation,
    )


@dataclass(frozen=True)
class LeftOut:
    """A promise on texts of a kind that no bound follows from.

    Attributes:
        length: of the texts.
        kind: the kind.
        limit: what was promised, in nats per token.
        budget: chosen from the other kinds.
        mean: loss of the kind's texts at that budget.
    """

    length: int
    kind: str
    limit: float
    budget: float
    mean: float

    @property
    def holds(self) -> bool:
        """Whether the texts of the kind lose no more than was promised."""
        return self.mean <= self.limit


def left_out(calibration: Calibration, limits: Sequence[float]) -> list[LeftOut]:
    """Calibrates on all kinds but one, both halves of them, and checks the promise on that one."""
    cases = []
    for length in calibration.lengths:
        texts = [text for text in calibration.texts if text.length == length]
        kinds = dict.fromkeys(text.kind for text in texts)
        for kind in kinds if len(kinds) > 1 else ():
            bounds, means = [], {1.0: 0.0}
            for place, budget in enumerate(calibration.budgets):
                own = [text.losses[place] for text in texts if text.kind == kind]
                others = [text.losses[place] for text in texts if text.kind != kind]
                bound = upper_bound(others, calibration.cap, calibration.confidence_of_one)
                bounds.append((budget, bound))
                means[budget] = fmean(min(calibration.cap, loss) for loss in own)
            for limit in limits:
                chosen = smallest_budget(bounds, limit)
                cases.append(LeftOut(length, kind, limit, chosen, means[chosen]))
    return cases
