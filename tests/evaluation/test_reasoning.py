"""Problems that need written steps: solved again from their texts, and asked of a real engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.server_process import ROOT
from vllm_kvcompress.cli.main import main
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation import reasoning
from vllm_kvcompress.tools.evaluation.items import generate
from vllm_kvcompress.tools.evaluation.metrics import METRICS

MODEL = str(ROOT / "models" / "reference")


def count_tokens(text: str) -> int:
    """Digits, words and punctuation marks."""
    return len(re.findall(r"\d|[a-zA-Z]+|[^\w\s]", text))


def solved(task: str, text: str) -> str:
    """The answer to a problem's text."""
    if task == "trace":
        printed: list[str] = []
        exec(text.partition("\n")[2], {"print": lambda value: printed.append(str(value))})
        return printed[0]
    lines = text.splitlines()
    if task == "updates":
        value = int(re.findall(r"\d+", lines[0])[0])
        for line in lines[1:-1]:
            _, change, amount = line.split()
            value = value + int(amount) if change == "add" else value - int(amount)
        return str(value)
    if task == "ledger":
        held = {name: int(amount) for name, amount in re.findall(r"(\w+) (\d+)[,.]", lines[0])}
        for line in lines[1:-1]:
            _, name, does, amount = line.split()
            held[name] += int(amount) if does == "gains" else -int(amount)
        return str(held[re.findall(r"does (\w+) have", lines[-1])[0]])
    if task == "table":
        sums = {}
        for line in lines[1:-1]:
            name, _, row = line.partition(":")
            sums[name.split()[1]] = sum(map(int, row.split()))
        best = [name for name, total in sums.items() if total == max(sums.values())]
        assert len(best) == 1
        return best[0]
    products = [line.split()[1::2] for line in lines[1:-1]]
    return str(sum(int(left) * int(right) for left, right in products))


@pytest.mark.parametrize("task", reasoning.TASKS)
def test_the_answer_is_that_of_the_text(task: str) -> None:
    for seed in range(8):
        for length in (60, 300):
            item = reasoning.generate(task, length, seed, count_tokens)
            shown, _, rest = item.context.partition("\n\nSolution 1:\n")
            answer = rest.partition("\n\nProblem 2:\n")[0].rpartition("Answer: ")[2]
            assert answer == solved(task, shown.partition("Problem 1:\n")[2])
            asked = rest.partition("\n\nProblem 2:\n")[2].removesuffix("\n")
            assert item.answers == (solved(task, asked),)


@pytest.mark.parametrize("task", reasoning.TASKS)
def test_worked_solutions_compute_rightly_and_fill_their_length(task: str) -> None:
    for seed in range(5):
        problem = reasoning.problem(task, 400, seed, count_tokens)
        assert 340 < count_tokens(problem.solution) <= 400
        sums = re.findall(r"(\d+ [-+x] \d+) = (-?\d+)", problem.solution)
        assert len(sums) >= 10
        for left, right in sums:
            assert eval(left.replace("x", "*")) == int(right)
        assert METRICS["last_answer"](problem.solution, (problem.answer,)) == 1
    longer = reasoning.problem(task, 800, 0, count_tokens)
    assert len(longer.steps) > 1.5 * len(problem.steps)


def test_problems_follow_from_the_seed() -> None:
    items = generate("reasoning", [100, 200], 2, 7, count_tokens)
    assert items == generate("reasoning", [100, 200], 2, 7, count_tokens)
    assert items != generate("reasoning", [100, 200], 2, 9, count_tokens)
    assert [item.length for item in items] == [100, 100, 200, 200] * len(reasoning.TASKS)
    assert len({item.context for item in items}) == len(items)
    with pytest.raises(ConfigError, match="--lengths 5: too short for reasoning/updates"):
        generate("reasoning/updates", [5], 1, 0, count_tokens)


def test_the_reference_model_s_replies_are_scored_and_counted(tmp_path: Path) -> None:
    """It knows no arithmetic; rows say how long it wrote, and what the prompt was cut to."""
    arguments = ["eval", MODEL, "--tasks", "reasoning/updates", "--lengths", "100"]
    arguments += ["--samples", "2", "--mode", "aware", "--concurrency", "2"]
    arguments += ["--policies", "snapkv", "--budgets", "64", "--kv-trigger", "prompt,decode:32"]
    arguments += ["--kv-min-tokens", "0", "--engine", "enforce_eager=true"]
    arguments += ["--engine", "max_model_len=1024", "--out", str(tmp_path)]
    assert main(arguments) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [row["setup"] for row in rows] == ["full", "snapkv@64"]
    for row in rows:
        own = [answer for answer in answers if answer["setup"] == row["setup"]]
        lengths = [len(answer["tokens"]) for answer in own]
        assert row["tasks"] == {"reasoning/updates@100": row["score"]}
        assert row["reply_tokens"] == sum(lengths) / 2 <= 150
        assert row["score_error"] is not None
    assert rows[0]["kept"] == 1 > rows[1]["kept"]
    assert "query-aware: tokens" in (tmp_path / "results.md").read_text()
