"""Conversations that continue from the compressed state that their last turn left.

With `chunk:N`, prompts of N, 2 N, 3 N tokens and a budget in tokens, a request that reads an entire
conversation is compressed where its turns were. So both have the same outputs, token for token,
whatever was evicted, interleaved or aborted meanwhile.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Run, alone, check_as_alone, request
from tests.tiny_models import prompt

BLOCK, TURN = 32, 128
REUSE = {
    "policy": "adakv",
    "budget": 64,
    "trigger": f"chunk:{TURN}",
    "params": {"window_size": 16},
    "min_tokens": 0,
    "reuse_conversations": "reuse",
}
CHECKED = {"KVCOMPRESS_CHECK": "1"}  # blocks that must not be read are poisoned
Phases = list[list[dict[str, Any]]]


def turns(name: str, replies: list[int], seed: int, **more: Any) -> list[dict[str, Any]]:
    """Returns a conversation, whose turns end at multiples of TURN tokens."""
    requests = [request(f"{name}0", prompt(TURN, seed), replies[0], **more)]
    for turn, reply in enumerate(replies[1:], start=1):
        tokens = prompt(TURN - replies[turn - 1], seed=1000 * turn + seed)
        follows = f"{name}{turn - 1}"
        requests.append(request(f"{name}{turn}", tokens, reply, follows=follows, **more))
    return requests


def check(report: dict[str, Any], names: list[str]) -> None:
    """Compares the outputs of continued turns with those of requests that read everything."""
    check_as_alone(report["outputs"], names)
    assert report["free_at_end"] == report["num_blocks"] - 1


def conversation(name: str, replies: list[int], seed: int, **more: Any) -> Phases:
    """Returns the phases of a conversation: each turn beside a request that reads everything."""
    own = turns(name, replies, seed, **more)
    return [[one, alone(one)] if turn else [one] for turn, one in enumerate(own)]


def side_by_side(*several: Phases) -> Phases:
    """Merges conversations with equal numbers of turns."""
    return [[one for phase in phases for one in phase] for phases in zip(*several, strict=True)]


EVICTING = ["adakv", "streamingllm", "keydiff", "h2o", "pyramidkv", "d2o", "spans"]
WINDOWS = {"adakv": 32, "pyramidkv": 32, "momentkv": 32, "streamingllm": 0, "keydiff": 0}


@pytest.mark.parametrize(
    "policies", [EVICTING, ["momentkv"], ["kvmerger"]], ids=lambda names: names[0]
)
def test_continued_turns_have_the_outputs_of_one_request(
    llama: str, run_engine: Run, policies: list[str]
) -> None:
    """Covers every family of policies: windows, none, sums of attention, layers, merging, moments.

    The queries that the next event observes are computed anew.
    """
    phases = side_by_side(
        *(
            conversation(policy, [20, 45, 33, 10], seed, xargs={"kv_policy": policy})
            for seed, policy in enumerate(policies, start=1)
        )
    )
    settings = {**REUSE, "policy": policies[0], "request_policies": policies[1:], "params": {}}
    report = run_engine(llama, phases, settings={**settings, "budget": 96})
    for turn in (1, 2, 3):
        computed = turn * TURN + [20, 45, 33][turn - 1] - 1  # all but the last token
        for policy in policies:
            window = WINDOWS.get(policy, 256)
            expected = max(turn * TURN, min(computed, (turn + 1) * TURN - window))
            assert report["outputs"][f"{policy}{turn}"]["cached"] == expected, (policy, turn)
    assert report["conversations_continued"] == 3 * len(policies)
    check(report, [f"{policy}{turn}" for policy in policies for turn in (1, 2, 3)])


def test_anew_has_the_outputs_of_a_first_request(llama: str, run_engine: Run) -> None:
    """The prefix cache is used up to the window, even if a turn is shorter than that."""
    policies, window, first, question = ("h2o", "spans"), 256, 400, 60
    phases = []
    for seed, policy in enumerate(policies, start=1):
        xargs = {"kv_policy": policy}
        begin = request(f"{policy}0", prompt(first, seed), 20, xargs=xargs)
        more = prompt(question, seed=100 + seed)
        second = request(f"{policy}1", more, 20, follows=f"{policy}0", xargs=xargs)
        phases.append([[begin], [second, alone(second)]])
    settings = {**REUSE, "policy": "h2o", "request_policies": ["spans"], "params": {}}
    settings |= {"budget": 0.25, "trigger": "prompt", "reuse_conversations": "anew"}
    report = run_engine(llama, side_by_side(*phases), settings=settings)
    usable = first + 20 + question - window
    for policy in policies:
        assert report["outputs"][f"{policy}1"]["cached"] == usable // BLOCK * BLOCK, policy
    assert report["conversations_continued"] == 0
    check(report, [f"{policy}1" for policy in policies])


@pytest.mark.parametrize(
    ("settings", "engine", "continued"),
    [
        ({}, {}, 1),
        ({"min_answer_tokens": 64}, {}, 0),
        ({"reuse_conversations": "off"}, {}, 0),
        ({"reuse_conversations": "anew"}, {}, 0),
        ({"budget": 0.2}, {}, 0),
        ({}, {"enable_prefix_caching": False}, 0),
        ({"read": "longcache:prefill=64"}, {}, 0),
    ],
)
def test_auto_goes_on_compressed_without_being_asked_to(
    llama: str,
    run_engine: Run,
    tmp_path: Path,
    settings: dict[str, Any],
    engine: dict[str, Any],
    continued: int,
) -> None:
    """Where an explicit option would be refused, it reads prompts again instead."""
    heads = tmp_path / "heads.json"
    heads.write_text(json.dumps({f"{i}-{h}": [1.0 + i + h] for i in range(3) for h in range(4)}))
    size = 1024
    first = request("a", prompt(size, 1), 20)
    phases = [[first], [request("b", prompt(100, 2), 20, follows="a")]]
    auto = {"policy": "auto", "budget": 0.25, "profile": str(heads), "min_answer_tokens": 0}
    report = run_engine(llama, phases, settings=auto | settings, **engine)
    assert report.get("conversations_continued", 0) == continued
    cached = report["outputs"]["b"]["cached"]
    if continued:  # all but the last token of the reply, which was not computed
        asked = auto | {"reuse_conversations": "reuse"}
        assert run_engine(llama, phases, settings=asked)["outputs"] == report["outputs"]
        assert cached == size + 20 - 1
    else:
        assert cached <= size


def test_turn_continues_from_all_tokens_that_it_shares_with_a_kept_state(
    llama: str, run_engine: Run
) -> None:
    """Continues one history in several ways at once.

    Two different questions; a question behind a part of the reply, and behind none of it; one that
    is shorter than the window of queries; another salt; and another first turn.
    """
    first, second = turns("a", [40, 5], seed=1)
    branch = {**second, "id": "branch", "prompt": prompt(TURN - 40, seed=77)}
    cut = {**second, "id": "cut", "taking": 21, "prompt": prompt(TURN - 21, seed=78)}
    short = {**second, "id": "short", "taking": 39, "prompt": prompt(2, seed=79), "max_tokens": 9}
    left_out = {**second, "id": "left out", "taking": 0, "prompt": prompt(TURN, seed=80)}
    salted = {**second, "id": "salted", "salt": "other"}
    other = request("other", prompt(TURN, seed=2), 40)
    stranger = {**second, "id": "stranger", "follows": "other"}
    ones = [second, branch, cut, left_out, salted, stranger]
    phases = [[first, other], [*ones, short], [alone(one) for one in ones]]
    report = run_engine(llama, phases, settings=REUSE, environment=CHECKED)
    cached = {name: output["cached"] for name, output in report["outputs"].items()}
    computed = TURN + 39
    assert cached["a1"] == cached["branch"] == cached["stranger"] == computed
    assert cached["cut"] == TURN + 21
    assert cached["left out"] == TURN
    assert cached["short"] == computed + 2 - 16  # its event looks at 16 queries
    assert cached["salted"] == 0
    check(report, [one["id"] for one in ones])


def test_conversations_have_the_same_outputs_in_a_pool_that_evicts_their_states(
    llama: str, run_engine: Run
) -> None:
    """Compares a small pool, in which states are evicted and requests preempted, with a large one.

    The latest conversations continue first, before the states of all others are evicted.
    """
    several = [turns(f"c{n} ", [10 + n % 40, 30, 10], seed=10 + n) for n in range(32)]
    phases = [
        [{**one, "at_step": n // 2} for n, one in enumerate(turn[:: 1 if number % 2 else -1])]
        for number, turn in enumerate(zip(*several, strict=True))
    ]
    roomy = run_engine(llama, phases, settings=REUSE, num_gpu_blocks_override=800)
    small = {"num_gpu_blocks_override": 80, "max_model_len": 512}
    tight = run_engine(llama, phases, settings=REUSE, environment=CHECKED, **small)
    assert roomy["conversations_continued"] == 64
    assert roomy["forgotten"].get("evicted", 0) == 0
    assert 0 < tight["conversations_continued"] < 64
    assert tight["forgotten"]["evicted"] > 10
    for name, output in roomy["outputs"].items():
        assert tight["outputs"][name]["tokens"] == output["tokens"], name
    assert tight["free_at_end"] == tight["num_blocks"] - 1


def test_each_of_several_choices_can_be_continued(llama: str, run_engine: Run) -> None:
    """Continues both replies to one prompt (n = 2)."""
    first, second = turns("a", [40, 20], seed=1)
    nexts = [
        {**second, "id": "of the first", "prompt": prompt(TURN - 40, seed=6)},
        {**second, "id": "of the other", "prompt": prompt(TURN - 40, seed=7), "follows": "a0/1"},
    ]
    phases = [[{**first, "n": 2}], [*nexts, *map(alone, nexts)]]
    report = run_engine(llama, phases, settings=REUSE)
    choices = [report["outputs"][name]["tokens"] for name in ("a0", "a0/1")]
    assert choices[0] != choices[1]
    names = [one["id"] for one in nexts]
    assert [report["outputs"][name]["cached"] for name in names] == [TURN + 39] * 2
    check(report, names)


def test_aborted_reply_is_continued_from_what_was_computed(llama: str, run_engine: Run) -> None:
    first, second = turns("a", [60, 5], seed=1)
    aborted = {**first, "id": "aborted", "salt": "s", "max_tokens": 100, "abort_at_step": 50}
    again = {**second, "id": "again", "salt": "s", "taking": 40}
    again["prompt"] = prompt(TURN - 40, seed=5)
    report = run_engine(llama, [[first, aborted], [again, alone(again)]], settings=REUSE)
    assert report["outputs"]["again"]["cached"] == TURN + 40
    check(report, ["again"])


def twice(one: dict[str, Any]) -> list[dict[str, Any]]:
    return [one, {**one, "id": f"{one['id']} twin"}]


def test_preempted_turns_continue_or_read_everything_again(llama: str, run_engine: Run) -> None:
    """Replies outgrow the pool, so that requests are preempted."""
    several = [turns(f"c{n} ", [10, 110], seed=n) for n in range(6)]
    phases = [[own[0] for own in several], [two for own in several for two in twice(own[1])]]
    small = {"num_gpu_blocks_override": 56, "max_model_len": 512}
    report = run_engine(llama, phases, settings=REUSE, environment=CHECKED, **small)
    assert report["preempted_going_on"] >= 2
    for own in several:
        outputs = [report["outputs"][each["id"]] for each in twice(own[1])]
        assert outputs[0]["tokens"] == outputs[1]["tokens"]
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_equal_turns_have_equal_outputs_under_asynchronous_scheduling(
    no_padding: str, run_engine: Run
) -> None:
    """Two equal requests continue from each state, with events while their replies grow.

    Their events run in one batch, where scores that tie may differ in rounding; a model without
    padding has no ties.
    """
    several = [turns(f"c{n} ", [70, 50, 20], seed=n) for n in range(3)]
    phases = [[two for own in several for two in twice(own[turn])] for turn in range(3)]
    settings = {**REUSE, "trigger": "prompt,decode:32"}
    report = run_engine(no_padding, phases, settings=settings, asynchronous=True)
    assert report["conversations_continued"] == 2 * 3 * 2
    for own in several:
        for turn, one in enumerate(own):
            outputs = [report["outputs"][each["id"]] for each in twice(one)]
            assert turn == 0 or outputs[0]["cached"] > turn * TURN
            assert outputs[0]["tokens"] == outputs[1]["tokens"]


def test_state_left_under_memory_pressure_is_continued(llama: str, run_engine: Run) -> None:
    """Which turns were compressed depends on the load, so that outputs are not compared."""
    several = [turns(f"c{n} ", [70, 50, 20], seed=n) for n in range(5)]
    phases = [list(turn) for turn in zip(*several, strict=True)]
    settings = {**REUSE, "trigger": "pressure:0.3"}
    report = run_engine(
        llama, phases, settings=settings, num_gpu_blocks_override=60, max_model_len=512
    )
    assert report["conversations_continued"] > 0
    assert report["free_at_end"] == report["num_blocks"] - 1


CROWDED: dict[str, Any] = {"policy": "keydiff", "budget": 0.25, "reuse_conversations": "reuse"}
CROWDED |= {"min_tokens": 0}


def test_waiting_turns_find_their_states_in_a_pool_for_three_whole_histories(
    llama: str, run_engine: Run
) -> None:
    """Turns whose states were evicted before they came do not evict those of the others."""
    first = [[request(f"a{i}", prompt(320, seed=i), 8)] for i in range(6)]
    second = [request(f"b{i}", prompt(160, seed=10 + i), 24, follows=f"a{i}") for i in range(6)]
    small = {"num_gpu_blocks_override": 48, "max_model_len": 544}
    tight, roomy = (
        run_engine(llama, [*first, second], settings=CROWDED, environment=CHECKED, **pool)
        for pool in (small, {})
    )
    assert roomy["conversations_continued"] == 6
    assert tight["conversations_continued"] == 4
    for name in ("b2", "b3", "b4", "b5"):
        assert tight["outputs"][name] == roomy["outputs"][name], name
    assert tight["free_at_end"] == tight["num_blocks"] - 1


@pytest.mark.parametrize(("num_answered", "num_continued"), [(180, 1), (15, 2)])
def test_a_new_request_waits_for_others_to_end_as_long_as_reading_a_state_again_takes(
    num_answered: int, num_continued: int, llama: str, run_engine: Run
) -> None:
    """Then it takes the states of the last in the queue, fewer where another has ended by then."""
    first = [[request(f"a{i}", prompt(320, seed=i), 8)] for i in range(4)]
    second = [
        request("running", prompt(128, seed=20), num_answered),
        request("new", prompt(790, seed=21), 8, at_step=12),
    ]
    for i in reversed(range(4)):  # states of the last turns are still in the pool
        tokens = prompt(160, seed=10 + i)
        second.append(request(f"b{i}", tokens, 8, follows=f"a{i}", at_step=12))
    small = {"num_gpu_blocks_override": 42, "max_model_len": 800}
    report = run_engine(llama, [*first, second], settings=CROWDED, environment=CHECKED, **small)
    begun, running = (
        [step for step, held in enumerate(report["held"]) if name in held]
        for name in ("new", "running")
    )
    num_waits = 328 // 64  # a state of 328 tokens; 64 are read in the time of a decode step
    assert begun[0] == min(running[0] + 12 + num_waits, running[-1] + 2)
    assert len(running) == num_answered - 1
    assert report["conversations_continued"] == num_continued
