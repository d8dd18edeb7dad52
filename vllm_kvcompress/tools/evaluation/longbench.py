"""Reads LongBench's 16 English tasks (arXiv 2308.14508) from local files in the published format.

Prompts, reply lengths, metrics and the rules below are those of THUDM/LongBench (MIT). Its data are
not ours to ship: the published archive holds one `TASK.jsonl` per task.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.item import Item
from vllm_kvcompress.tools.files import read_within


@dataclass(frozen=True)
class Task:
    """How one data set is asked and scored.

    Attributes:
        prompt: with `{context}` and, except for summaries, `{input}` after it.
        max_tokens: length limit of the reply.
        metric: a name in METRICS.
        chat: whether the model's chat template goes around the prompt.
    """

    prompt: str
    max_tokens: int
    metric: str
    chat: bool = True


TASKS = {
    name: Task(**fields)
    for name, fields in json.loads(
        Path(__file__).with_name("longbench_tasks.json").read_text()
    ).items()
}


def load(task: str, folder: Path, num_samples: int) -> list[Item]:
    """The first questions of a task in TASKS, from `TASK.jsonl` in a folder.

    Raises:
        ConfigError: the file is missing or not in LongBench's format.
    """
    path = folder / f"{task}.jsonl"
    try:
        lines = read_within(path).splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); --longbench-data is the folder with "
            "LongBench's published files, one TASK.jsonl per task."
        ) from None
    rows = [line for line in lines if line.strip()][:num_samples]
    if not rows:
        raise ConfigError(f"{path}: no questions in it.")
    return [_item(task, f"{path}, line {number}", row) for number, row in enumerate(rows, 1)]


def _item(name: str, place: str, line: str) -> Item:
    """One question: its context ends where what may be compressed does.

    For a classification `answers` holds the right class, then all classes.
    """
    try:
        row: dict[str, Any] = json.loads(line)
        context, question, answers = row["context"], row["input"], row["answers"]
        classes = row.get("all_classes") or []
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f'{place}: expected LongBench\'s "input", "context" and "answers", got {error!r}.'
        ) from None
    task = TASKS[name]
    before, _, after = task.prompt.partition("{context}")
    return Item(
        task=f"longbench/{name}",
        context=before + context,
        question=after.replace("{input}", question),
        answers=(*answers[:1], *classes) if classes else tuple(answers),
        metric=task.metric,
        max_tokens=task.max_tokens,
        separator="",
        chat=task.chat,
        may_cut=True,
    )
