"""Questions about contexts: generated, from LongBench, from texts or from a user's file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation import longbench, reasoning, ruler, texts
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.evaluation.metrics import check_metric

RULER, REASONING, LONGBENCH, TEXT = "ruler", "reasoning", "longbench", "text"
_TASKS: dict[str, tuple[str, ...]] = {
    RULER: tuple(ruler.TASKS),
    REASONING: tuple(reasoning.TASKS),
    LONGBENCH: tuple(longbench.TASKS),
    TEXT: tuple(texts.KINDS),
}


def generate(
    task: str,
    lengths: Sequence[int],
    num_samples: int,
    seed: int,
    count_tokens: Callable[[str], int],
) -> list[Item]:
    """Generates questions of `ruler` or `reasoning`, or of a single task, such as `ruler/vt`.

    Args:
        task: the task or suite.
        lengths: tokens of prompt and reply together; of `reasoning`, of the worked solution.
        num_samples: questions per task and length.
        seed: seed of the first question; each further one adds 1.
        count_tokens: counts a text's tokens.

    Raises:
        ConfigError: no such task, or a length that it does not work with.
    """
    suite, names = split_task(task)
    generate_one = (reasoning if suite == REASONING else ruler).generate
    return [
        generate_one(name, length, seed + number, count_tokens)
        for name, length, number in product(names, lengths, range(num_samples))
    ]


def split_task(task: str) -> tuple[str, tuple[str, ...]]:
    """Splits a task into its suite and names: `ruler` has all of them, `ruler/vt` one.

    Raises:
        ConfigError: there is no such task.
    """
    suite, _, name = task.partition("/")
    names = _TASKS.get(suite, ())
    if not names or (name and name not in names):
        known = [f"{suite}/{name}".rstrip("/") for suite in _TASKS for name in ("", *_TASKS[suite])]
        raise ConfigError(f"--tasks {task}: no such task; known are {', '.join(known)}.")
    return suite, (name,) if name else names


def load_longbench(task: str, folder: Path | None, num_samples: int) -> list[Item]:
    """Loads the first questions of `longbench`, or of `longbench/TASK`, from the published files.

    `folder` holds one TASK.jsonl per task.

    Raises:
        ConfigError: no folder was given, a file is missing or not in the published format, or a
            metric's library is not installed.
    """
    suite, names = split_task(task)
    if folder is None:
        raise ConfigError(
            f"--tasks {task}: give --longbench-data, the folder with LongBench's published files."
        )
    items = []
    for name in names:
        check_metric(longbench.TASKS[name].metric, f"--tasks {suite}/{name}: metric")
        items += longbench.load(name, folder, num_samples)
    return items


def load_texts(
    task: str, lengths: Sequence[int], continuation: int, num: int, seed: int
) -> list[Item]:
    """Loads pieces of texts that come with Python: `text` for every kind, or `text/KIND`.

    Args:
        task: the task or suite.
        lengths, continuation: tokens that are compressed, and that are predicted behind them.
        num: pieces of each kind and length.
        seed: number of the first piece; `seed + num` gives other pieces, while there are any.

    Raises:
        ConfigError: there are not `num` pieces.
    """
    return [
        _text_item(f"{TEXT}/{kind}", piece, length, continuation)
        for kind, length in product(split_task(task)[1], lengths)
        for piece in texts.pieces(kind, length + continuation, seed, num)
    ]


def load_text(path: Path, lengths: Sequence[int], continuation: int, num: int) -> list[Item]:
    """Loads the first pieces of a user's text; one that is short is a single piece.

    Raises:
        ConfigError: it cannot be read.
    """
    text = texts.read(path)
    return [
        _text_item(path.stem, piece, length, continuation)
        for length in lengths
        for piece in (texts.cut(text, length + continuation) or [text])[:num]
    ]


def _text_item(task: str, piece: str, length: int, continuation: int) -> Item:
    return Item(
        task=task,
        length=length,
        context=piece,
        question="",
        answers=(),
        metric="",
        max_tokens=1,
        chat=False,
        continuation=continuation,
    )


def load(path: Path, metric: str, max_tokens: int) -> list[Item]:
    """Loads a user's questions: JSON lines of `{"context", "question", "answers"}`.

    `answers` is a text or a list of texts, any of which is right; `metric` and `max_tokens` may
    be given per line.

    Raises:
        ConfigError: the file cannot be read, or a line, which the message names, is wrong.
    """
    items = [
        _user_item(path, number, line, metric, max_tokens)
        for number, line in enumerate(texts.read(path).splitlines(), 1)
        if line.strip()
    ]
    if not items:
        raise ConfigError(f"--data {path}: no questions in it; expected one JSON object a line.")
    return items


def _user_item(path: Path, number: int, line: str, metric: str, max_tokens: int) -> Item:
    place = f"--data {path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON ({error}).") from None
    if not isinstance(row, dict) or not {"context", "question", "answers"} <= row.keys():
        raise ConfigError(f'{place}: expected an object with "context", "question" and "answers".')
    answers = [row["answers"]] if isinstance(row["answers"], str) else row["answers"]
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise ConfigError(f'{place}: "answers": expected a text or a list of texts.')
    max_tokens = row.get("max_tokens", max_tokens)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ConfigError(f'{place}: "max_tokens" {max_tokens!r}: expected at least 1.')
    metric = row.get("metric", metric)
    check_metric(metric, f'{place}: "metric"')
    return Item(
        task=path.stem,
        context=str(row["context"]),
        question=str(row["question"]),
        answers=tuple(answers),
        metric=metric,
        max_tokens=max_tokens,
    )
