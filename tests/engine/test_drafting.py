"""Drafts by the model itself, which read a part: outputs are stock's, drafts an oracle's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.engine.oracle import BLOCK, PagesDecoder
from tests.tiny_models import prompt
from vllm_kvcompress.scheduling.draft_pace import MAX_DRAFTS, DraftPace

LAYERS, HEADS = 3, 2
RULE = "quest:0.2,score=mean,global=0,local=0"
SETTINGS = {"policy": "none", "draft": RULE}
ALWAYS = "tests.engine.test_drafting:always_drafts"
NEVER = "tests.engine.test_drafting:never_drafts"
LONG = prompt(500, seed=21)
CLEAR = 1e-5  # the least difference of scores that rounding does not turn around


def always_drafts(report: dict[str, Any]) -> None:
    """Drafts in every cycle, whatever it takes; reports what is drafted."""
    note_proposals(report)
    DraftPace.choose = lambda *_: 3


def never_drafts(report: dict[str, Any]) -> None:
    """Has measured times say that drafting does not pay."""
    note_proposals(report)
    note = DraftPace.note_cycle

    def slow(self: DraftPace, *sizes: Any) -> None:
        *sizes, number, _ = sizes
        note(self, *sizes, number, 1.0 + 2 * number)

    DraftPace.note_cycle = slow


def note_proposals(report: dict[str, Any]) -> None:
    """Reports, by request, the tokens that drafts follow, and the drafts."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_kvcompress.vllm_plugin.worker_side.drafting import Drafter

    report["proposals"], report["verified"] = [], [0, 0]
    propose, count = Drafter.propose, Scheduler.make_spec_decoding_stats

    def noting(self: Any, sampled: list[list[int]], num_tokens: Any) -> list[list[int]]:
        drafts = propose(self, sampled, num_tokens)
        batch = self._runner.input_batch
        for row, (name, tokens) in enumerate(zip(batch.req_ids, drafts, strict=True)):
            end = int(num_tokens[row])
            if tokens:
                former = batch.token_ids_cpu[row, :end].tolist()
                report["proposals"].append([name.rpartition("-")[0], former, tokens])
        report.setdefault("numbers", []).append([len(tokens) for tokens in drafts])
        return drafts

    def counting(self: Any, *args: Any, **given: Any) -> Any:
        report["verified"][0] += given["num_draft_tokens"]
        report["verified"][1] += given["num_accepted_tokens"]
        return count(self, *args, **given)

    Drafter.propose, Scheduler.make_spec_decoding_stats = noting, counting


def batch() -> list[dict[str, Any]]:
    """Returns requests of several lengths that come and go, one of which is aborted."""
    return [
        request("long", LONG, 40),
        request("middle", prompt(321, seed=12), 60, at_step=1),
        request("short", prompt(60, seed=3), 40, at_step=2),
        request("gone", prompt(200, seed=4), 60, at_step=2, abort_at_step=12),
        request("late", prompt(290, seed=10), 20, at_step=12),
    ]


def again() -> list[dict[str, Any]]:
    """Returns a request that hits the blocks of an answer whose drafts were verified."""
    return [request("turn", prompt(30, seed=8), 12, follows="middle")]


def tokens_of(report: dict[str, Any]) -> dict[str, list[int]]:
    return {name: output["tokens"] for name, output in report["outputs"].items() if name != "gone"}


@pytest.fixture(scope="module")
def stock(no_padding: str, run_engine: Run) -> dict[str, Any]:
    return run_engine(no_padding, [batch(), again()])


@pytest.fixture(scope="module")
def report(no_padding: str, run_engine: Run) -> dict[str, Any]:
    probes, checked = [ALWAYS], {"KVCOMPRESS_CHECK": "1"}
    return run_engine(
        no_padding, [batch(), again()], settings=SETTINGS, probes=probes, environment=checked
    )


def test_outputs_are_those_of_stock_vllm(stock: dict[str, Any], report: dict[str, Any]) -> None:
    """Some drafts are accepted, and some rejected."""
    drafted, accepted = report["verified"]
    assert 0 < accepted < drafted
    assert tokens_of(report) == tokens_of(stock)
    assert report["outputs"]["turn"]["cached"] == stock["outputs"]["turn"]["cached"] > 321
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_drafts_are_the_likeliest_tokens_behind_what_is_read(
    no_padding: str, report: dict[str, Any]
) -> None:
    """Behind verified tokens, which read everything, a draft reads its pages and former drafts."""
    some = [each for each in report["proposals"] if each[0] == "long"][1:8:3]
    assert some
    checked = 0
    for _, former, drafts in some:
        num_full = (len(former) - 1) // BLOCK * BLOCK
        kept = [[list(range(num_full))] * HEADS] * LAYERS
        decoder = PagesDecoder(no_padding, former[:-1], kept, num_full, part=0.2)
        token = former[-1]
        for draft in drafts:
            logits = decoder.step(token)
            best, second = logits.topk(2).values.tolist()
            if best - second > CLEAR and decoder.closest > CLEAR:
                assert int(logits.argmax()) == draft
                checked += 1
            token = draft
    assert checked


def test_drafts_of_many_pages_are_rejected_without_a_trace(
    no_padding: str, run_engine: Run, stock: dict[str, Any]
) -> None:
    """A pool too small for all requests preempts some between drafting and verifying."""
    requests = [request(f"r{i}", prompt(300, seed=i), 150, at_step=2 * i) for i in range(4)]
    options = {"max_model_len": 512, "num_gpu_blocks_override": 40}
    plain = run_engine(no_padding, [requests], **options)
    crowded = run_engine(no_padding, [requests], settings=SETTINGS, probes=[ALWAYS], **options)
    assert crowded["preemptions"] > 0
    assert tokens_of(crowded) == tokens_of(plain)
    assert crowded["free_at_end"] == crowded["num_blocks"] - 1


def test_greedy_requests_stay_stocks_beside_one_with_a_temperature(
    no_padding: str, run_engine: Run, stock: dict[str, Any]
) -> None:
    """It joins while drafts wait to be verified; from then on nothing is drafted."""
    drawn = request("drawn", prompt(100, seed=5), 30, at_step=7, n=2)
    report = run_engine(no_padding, [[*batch(), drawn]], settings=SETTINGS, probes=[ALWAYS])
    tokens = tokens_of(report)
    assert {name: tokens[name] for name in tokens if "drawn" not in name} == {
        name: each for name, each in tokens_of(stock).items() if name != "turn"
    }
    assert len(tokens["drawn"]) == len(tokens["drawn/1"]) == 30
    assert any(not any(each) for each in report["numbers"])


def test_drafting_ends_where_it_does_not_pay(
    no_padding: str, run_engine: Run, stock: dict[str, Any]
) -> None:
    report = run_engine(no_padding, [batch(), again()], settings=SETTINGS, probes=[NEVER])
    assert tokens_of(report) == tokens_of(stock)
    numbers = [max(each, default=0) for each in report["numbers"]]
    assert 0 < sum(map(bool, numbers)) < len(numbers) / 2
    assert not any(number == MAX_DRAFTS for number in numbers)
