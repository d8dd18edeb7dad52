"""Generates problems whose answers need written steps, with exact answers. No torch.

A prompt shows one worked example of the same kind, so that small models write their steps as well.
The worked solution of the problem itself says how long an answer has to be: `--lengths` are its
tokens, and the harder a problem, the longer it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.item import Item

NAMES = ("Ana", "Ben", "Cem", "Dora", "Emil", "Fay", "Gus", "Hana")
_EXAMPLE_STEPS = 4


@dataclass(frozen=True)
class Problem:
    """A problem, the steps that solve it, a line each, and the answer."""

    text: str
    steps: list[str]
    answer: str

    @property
    def solution(self) -> str:
        """What a right answer looks like."""
        return "\n".join([*self.steps, f"Answer: {self.answer}"])


def _updates(size: int, rng: random.Random) -> Problem:
    """A number that is changed again and again."""
    start = value = rng.randint(20, 80)
    changes, steps = [], []
    for number in range(1, size + 1):
        amount = rng.randint(2, 19)
        adds = value < 20 or (value < 90 and rng.random() < 0.5)
        new = value + amount if adds else value - amount
        changes.append(f"{number}. {'add' if adds else 'subtract'} {amount}")
        steps.append(f"{changes[-1]}: {value} {'+' if adds else '-'} {amount} = {new}")
        value = new
    text = f"Begin with {start} and make these changes in order:\n" + "\n".join(changes)
    return Problem(f"{text}\nWhich number is left at the end?", steps, str(value))


def _ledger(size: int, rng: random.Random) -> Problem:
    """Accounts that gain and spend; one balance is asked for."""
    balances = {name: rng.randint(30, 70) for name in rng.sample(NAMES, 4)}
    opening = ", ".join(f"{name} {balance}" for name, balance in balances.items())
    entries, steps = [], []
    for number in range(1, size + 1):
        name, amount = rng.choice(list(balances)), rng.randint(2, 19)
        value = balances[name]
        gains = value < 20 or (value < 90 and rng.random() < 0.5)
        balances[name] = value + amount if gains else value - amount
        entries.append(f"{number}. {name} {'gains' if gains else 'spends'} {amount}")
        steps.append(
            f"{entries[-1]}: {name} has {value} {'+' if gains else '-'} {amount} = {balances[name]}"
        )
    asked = rng.choice(list(balances))
    text = f"Four people have: {opening}. Then this happens:\n" + "\n".join(entries)
    return Problem(f"{text}\nHow much does {asked} have at the end?", steps, str(balances[asked]))


def _table(size: int, rng: random.Random) -> Problem:
    """Rows of numbers; the row with the largest sum is asked for."""
    rows: dict[int, list[int]] = {}
    while len(rows) < size:
        row = [rng.randint(2, 30) for _ in range(4)]
        if sum(row) not in map(sum, rows.values()):
            rows[len(rows) + 1] = row
    steps = []
    for number, row in rows.items():
        sums = [sum(row[:end]) for end in range(1, 5)]
        parts = [f"{sums[i]} + {row[i + 1]} = {sums[i + 1]}" for i in range(3)]
        steps.append(f"Row {number}: {', '.join(parts)}")
    largest = max(rows, key=lambda number: sum(rows[number]))
    steps.append(f"The largest sum is {sum(rows[largest])}, of row {largest}.")
    lines = [f"Row {number}: {' '.join(map(str, row))}" for number, row in rows.items()]
    text = "Add up every row of this table:\n" + "\n".join(lines)
    return Problem(f"{text}\nWhich row has the largest sum?", steps, str(largest))


def _multiplication(size: int, rng: random.Random) -> Problem:
    """Products by hand, in parts; the sum of all is asked for."""
    steps, tasks, total = [], [], 0
    for number in range(1, size + 1):
        left, tens, ones = rng.randint(11, 49), 10 * rng.randint(1, 4), rng.randint(2, 9)
        product = left * (tens + ones)
        tasks.append(f"{number}. {left} x {tens + ones}")
        steps.append(
            f"{tasks[-1]}: {left} x {tens} = {left * tens}, {left} x {ones} = {left * ones}, "
            f"{left * tens} + {left * ones} = {product}, total {total} + {product} = "
            f"{total + product}"
        )
        total += product
    text = "Work out these products by hand:\n" + "\n".join(tasks)
    return Problem(f"{text}\nWhat is the sum of all products?", steps, str(total))


def _trace(size: int, rng: random.Random) -> Problem:
    """A loop with a branch, value by value; what it prints is asked for."""
    a, b = rng.randint(10, 30), rng.randint(10, 30)
    values = [rng.randint(2, 19) for _ in range(size)]
    code = (
        f"a, b = {a}, {b}\nfor v in {values}:\n    if v % 2 == 0:\n        a = a + v\n"
        "    else:\n        b = b + v\nprint(a - b)"
    )
    steps = []
    for number, v in enumerate(values, 1):
        if v % 2 == 0:
            steps.append(f"{number}. v = {v} is even: a = {a} + {v} = {a + v}, b = {b}")
            a += v
        else:
            steps.append(f"{number}. v = {v} is odd: a = {a}, b = {b} + {v} = {b + v}")
            b += v
    steps.append(f"a - b = {a} - {b} = {a - b}")
    return Problem(f"What does this program print?\n{code}", steps, str(a - b))


TASKS: dict[str, Callable[[int, random.Random], Problem]] = {
    "updates": _updates,
    "ledger": _ledger,
    "table": _table,
    "multiplication": _multiplication,
    "trace": _trace,
}


def problem(task: str, num_tokens: int, seed: int, count_tokens: Callable[[str], int]) -> Problem:
    """The problem of a task in TASKS whose solution comes nearest to `num_tokens` from below.

    Raises:
        ConfigError: not even the shortest one fits.
    """

    def build(size: int) -> Problem:
        return TASKS[task](size, random.Random(f"{task}/{num_tokens}/{seed}"))

    if count_tokens(build(1).solution) > num_tokens:
        raise ConfigError(f"--lengths {num_tokens}: too short for reasoning/{task}; give more.")
    size = 1
    while count_tokens(build(size + 1).solution) <= num_tokens:
        size += 1
    return build(size)


def generate(task: str, num_tokens: int, seed: int, count_tokens: Callable[[str], int]) -> Item:
    """A problem behind a worked example; replies may be half as long again as the worked solution.

    Args:
        task: one of TASKS.
        num_tokens: of the worked solution.
        seed: seed of the draws.
        count_tokens: number of tokens of a text.

    Raises:
        ConfigError: not even the shortest problem fits.
    """
    shown = TASKS[task](_EXAMPLE_STEPS, random.Random(task))
    asked = problem(task, num_tokens, seed, count_tokens)
    return Item(
        context="Solve the second problem in the same way as the first one: write every step in a "
        'line of its own, then a last line of "Answer:" and the answer.\n\n'
        f"Problem 1:\n{shown.text}\n\nSolution 1:\n{shown.solution}\n\nProblem 2:\n{asked.text}\n",
        question="Solution 2:",
        answers=(asked.answer,),
        metric="last_answer",
        max_tokens=num_tokens * 3 // 2,
        task=f"reasoning/{task}",
        length=num_tokens,
    )
