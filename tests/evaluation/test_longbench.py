"""LongBench from files in its published format."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation import longbench
from vllm_kvcompress.tools.evaluation.items import load_longbench
from vllm_kvcompress.tools.evaluation.metrics import METRICS

PUBLISHED_PROMPTS = "70171ab95ae90275adc377ca2739f044fee50457d04e0055c60651f63787e897"


def write(folder: Path, task: str, *rows: dict[str, Any]) -> None:
    lines = [json.dumps(row) for row in rows]
    (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n")


def row(**more: Any) -> dict[str, Any]:
    """Makes a row as the published files have them."""
    return {
        "input": "Who?",
        "context": "Some {braces} and a story.",
        "answers": ["Anna", "Ann"],
        "length": 5,
        "dataset": "narrativeqa",
        "language": "en",
        "all_classes": None,
        "_id": "0",
        **more,
    }


def test_prompts_are_the_published_ones() -> None:
    """Their digest, taken from the published file's 16 English prompts by name."""
    assert len(longbench.TASKS) == 16
    prompts = "\0".join(f"{name}\0{task.prompt}" for name, task in sorted(longbench.TASKS.items()))
    assert hashlib.sha256(prompts.encode()).hexdigest() == PUBLISHED_PROMPTS


def test_a_prompt_is_cut_behind_its_context(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa", row(), row(input="Where?"))
    items = load_longbench("longbench/hotpotqa", tmp_path, 10)
    assert [item.task for item in items] == ["longbench/hotpotqa"] * 2
    first = items[0]
    assert first.context.endswith("The following are given passages.\nSome {braces} and a story.")
    assert first.question.startswith("\n\nAnswer the question based on the given passages.")
    assert first.question.endswith("Question: Who?\nAnswer:")
    assert (first.answers, first.metric, first.max_tokens) == (("Anna", "Ann"), "f1", 32)
    assert (first.separator, first.chat, first.may_cut) == ("", True, True)
    assert len(load_longbench("longbench/hotpotqa", tmp_path, 1)) == 1


def test_classes_follow_the_right_one(tmp_path: Path) -> None:
    write(tmp_path, "trec", row(answers=["City"], all_classes=["City", "State"]))
    (item,) = load_longbench("longbench/trec", tmp_path, 10)
    assert item.answers == ("City", "City", "State")
    assert not item.chat
    assert METRICS[item.metric]("City\nState", item.answers) == 1.0


def test_all_tasks_are_read(tmp_path: Path) -> None:
    for task in longbench.TASKS:
        write(tmp_path, task, row(answers=["Paragraph 1"]))
    items = load_longbench("longbench", tmp_path, 10)
    assert [item.task for item in items] == [f"longbench/{task}" for task in longbench.TASKS]
    for item in items:
        assert METRICS[item.metric]("Paragraph 1", item.answers) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"lcc.jsonl: cannot be read .* one TASK.jsonl per task"),
        ("\n", "no questions in it"),
        ("{", r"lcc.jsonl, line 1: expected LongBench's .input., .context. and .answers."),
        ('{"input": "", "context": ""}', "line 1: expected LongBench's"),
        ("[]", "line 1: expected LongBench's"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "lcc.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_longbench("longbench/lcc", tmp_path, 10)


def test_without_a_folder_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="give --longbench-data"):
        load_longbench("longbench/lcc", None, 10)
