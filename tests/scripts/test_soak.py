"""The soak run: its schedule, its judgement, and a short run of the engine itself."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import soak
from soak_parts import models
from soak_parts.asks import Answer, Ask, Batch, Choice, Served
from soak_parts.hosts import in_process_host
from soak_parts.judge import difference, problem
from soak_parts.memory import slope
from soak_parts.over_http import _answer
from soak_parts.schedule import Schedule
from soak_parts.setups import SETUPS, Setup
from soak_parts.tally import Tally
from soak_parts.tenants import values_of

ASK = Ask(7, [5, 6, 7], max_tokens=4, stop=["x"])
SAID = Choice("abcd", [1, 2, 3, 4], "length", [{1: -0.5, 9: -1.0}] * 4)


def test_a_request_depends_on_the_seed_and_its_number_alone() -> None:
    """In any order and from any offset; every server has its turn."""
    numbers = range(0, 40 * len(SETUPS), 7)
    schedule = Schedule(3, 40)
    asks = {number: schedule.ask(number) for number in numbers}
    assert {n: Schedule(3, 40).ask(n) for n in reversed(numbers)} == asks
    assert asks != {n: Schedule(4, 40).ask(n) for n in numbers}
    assert {schedule.setup_of(number).name for number in numbers} == {s.name for s in SETUPS}


def test_schedule_mixes_all_kinds_of_requests() -> None:
    schedule = Schedule(1, 200)
    asks = [schedule.ask(number) for number in range(200 * len(SETUPS))]
    sizes = [len(ask.prompt) for ask in asks]
    assert min(sizes) == 1
    assert max(sizes) > max(setup.max_tokens for setup in SETUPS)
    for kind in ("stream", "chat", "xargs", "cache_salt", "guide", "stop", "refused", "alone"):
        assert any(getattr(ask, kind) for ask in asks), kind
    assert {ask.n for ask in asks} == {1, 2, 3}
    assert 0.05 < sum(ask.cut is not None for ask in asks) / len(asks) < 0.12
    assert 0.01 < sum(ask.alone for ask in asks) / len(asks) < 0.03
    chosen = {ask.xargs.get("kv_policy") for ask in asks}
    assert len(chosen) > 15


def test_tenants_share_no_secret_word() -> None:
    one, other = ({*first, *second} for first, second in map(values_of, range(2)))
    assert one.isdisjoint(other)


@pytest.mark.parametrize(
    ("ask", "answer", "reason"),
    [
        (ASK, Answer("answered", [SAID]), ""),
        (ASK, Answer("failed", reason="500"), "failed: 500"),
        (ASK, Answer("lost"), "lost: "),
        (ASK, Answer("cut"), "was cut, though its client stayed"),
        (replace(ASK, cut=3), Answer("cut"), ""),
        (replace(ASK, refused=True), Answer("refused"), ""),
        (replace(ASK, refused=True), Answer("answered", [SAID]), "expected a refusal"),
        (replace(ASK, refused=True), Answer("failed", reason="500"), "refusal, got failed 500"),
        (replace(ASK, refused=True), Answer("cut"), "was cut, though its client stayed"),
        (replace(ASK, refused=True, cut=0), Answer("cut"), ""),
        (replace(ASK, n=2), Answer("answered", [SAID]), "expected 2 answers, got 1"),
        (ASK, Answer("answered", [replace(SAID, reason="abort")]), "ended by abort"),
        (ASK, Answer("answered", [replace(SAID, tokens=[1] * 5)]), "expected at most 4 tokens"),
        (ASK, Answer("answered", [replace(SAID, tokens=[1])]), "ended by its length with 1 of 4"),
        (ASK, Answer("answered", [replace(SAID, text="axb")]), "has a text that ends answers"),
        (ASK, Answer("answered", [replace(SAID, logprobs=[{1: float("nan")}])]), "log-prob"),
        (
            replace(ASK, stop=[], guide={"choice": ["yes"]}),
            Answer("answered", [replace(SAID, reason="stop")]),
            "'abcd' is nothing that",
        ),
    ],
)
def test_answers_are_judged_by_what_the_request_asked(
    ask: Ask, answer: Answer, reason: str
) -> None:
    assert problem(ask, answer).startswith(reason) or reason in problem(ask, answer)
    assert bool(problem(ask, answer)) == bool(reason)


def test_error_in_a_stream_is_a_refusal_or_failure() -> None:
    """Such an error comes as a part, since the status has been sent."""
    refused, failed = (_answer(ASK, [{"error": {"code": code}}]) for code in (400, 500))
    assert (refused.outcome, failed.outcome) == ("refused", "failed")


def test_difference_is_the_first_token_and_its_gap() -> None:
    assert difference(SAID, SAID) is None
    assert difference(replace(SAID, tokens=[1, 9, 3, 4]), replace(SAID, tokens=[1, 1, 3, 4])) == (
        1,
        0.5,
    )
    assert difference(replace(SAID, tokens=[1, 2]), SAID) == (2, float("inf"))


@pytest.mark.parametrize(
    ("alone", "problems"),
    [(["far"], []), (["near"], ["7: alone it differs from token 0 on, 2.0000 nats apart"])],
)
def test_word_of_another_tenant_is_a_leak_unless_also_said_alone(
    tmp_path: Path, alone: list[str], problems: list[str]
) -> None:
    words = {"near": 3, "far": 4}

    def said(text: str) -> Answer:
        likely = {token: -0.1 if word == text else -2.1 for word, token in words.items()}
        return Answer("answered", [Choice(text, [words[text]], "stop", [likely])])

    class Alone:
        def call(self, argument: Batch) -> Served:
            return Served({each.index: said(alone[0]) for each in argument.asks})

    run = soak.Run(soak.parse([]), tmp_path)
    ask = replace(ASK, stop=[], secrets=("near",), foreign=("far",))
    run.see([ask], Served({7: said("far")}))
    assert ask.alone, "it is asked again"
    run.ask_alone(Alone(), ask, said("far"))
    assert run.tally.problems == problems
    assert run.tally.counts["words of the other tenant"] == 1


def test_stopped_run_continues_from_its_tally(tmp_path: Path) -> None:
    path = tmp_path / "tally.json"
    tally = Tally("key", 10, done=5)
    tally.outcomes["answered"] += 5
    tally.problems.append("12: lost")
    tally.save(path)
    again = Tally.load(path, "key", 10)
    assert again == tally
    assert again.next_index == 15
    again.outcomes["answered"] += 1  # still a counter
    assert not again.passed(5), "a problem stays one"
    assert Tally.load(path, "another key", 10).done == 0
    assert Tally.load(path, "key", 0).done == 0


def test_growing_memory_fails_the_run() -> None:
    """Growth at first is warm-up; later significant growth is a leak."""
    rng = random.Random(1)

    def samples(per_batch: int) -> list[tuple[int, int]]:
        sizes = (min(n, 4) * 50 * 2**20 + max(0, n - 4) * per_batch for n in range(12))
        return [(200 * n, size + rng.randint(0, 2**20)) for n, size in enumerate(sizes)]

    tally = Tally("key", 0, done=5)
    tally.see_memory("prompt", samples(0))
    tally.see_memory("storm", samples(0))
    assert tally.passed(5)
    tally.see_memory("storm", samples(4 * 2**20))
    assert tally.passed(5) is False
    assert "PROBLEM storm: memory grows by" in tally.summary(5, "again")
    fitted = slope([(1000 * n, 7 * n * 2**20 + (-1) ** n) for n in range(12)])
    assert fitted is not None
    assert fitted[0] == pytest.approx(7 * 2**20, rel=1e-4)
    assert 0 < fitted[1] < 1
    assert slope(samples(0)[:6]) is None, "too few"


def test_storm_without_preemptions_fails_the_run() -> None:
    tally = Tally("key", 0, done=300)
    tally.by_setup["storm"] = 99
    assert tally.passed(300), "too few to say"
    tally.by_setup["storm"] = 300
    assert not tally.passed(300)
    assert "PROBLEM storm: none of 300 requests was preempted" in tally.summary(300, "again")
    tally.preempted["storm"] = 1
    assert tally.passed(300)


def test_answers_that_wait_to_be_scored_are_not_requests_left_over(tmp_path: Path) -> None:
    """The three arrive and end together; each one's answer is scored in a step behind it."""
    models.prepare(tmp_path)
    setup = Setup("canary", "snapkv", num_blocks=400, more=(("shadow", 1.0),))
    asks = [Ask(number, [5 + number] * 160, max_tokens=8) for number in range(3)]
    with in_process_host(setup, tmp_path) as engine:
        served = engine.call(Batch(asks, seed="b", concurrency=3))
    assert served.left_over == ""
    assert served.counts["events"] == 3


def test_soak_runs_two_tenants_on_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the debug mode; an incomplete run does not pass."""
    for name in ("KVCOMPRESS_CHECK", "TORCH_COMPILE_DISABLE"):
        monkeypatch.setenv(name, "1")  # which the script sets, and other tests must not see
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    arguments = ["--per-setup=20", "--in-process", f"--folder={tmp_path}", "--setups", "tenants"]
    status = soak.main(["--requests=20", *arguments])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "passed; again: python scripts/checks/soak.py --requests=20 --seed=1" in said
    assert soak.main(["--requests=20", *arguments, "--minutes=0"]) == 0, "all ran"
    assert soak.main(["--requests=30", *arguments, "--minutes=0"]) == 1, "10 did not"
