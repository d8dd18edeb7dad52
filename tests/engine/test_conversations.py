"""Conversations whose compressed state goes on from turn to turn.

With `chunk:N`, prompts of N, 2 N, 3 N tokens and a budget in tokens, a request that reads a whole
conversation at once is compressed where its turns were. So going on has to say what reading it all
says, token for token, whatever was evicted, interleaved or cut off meanwhile.
"""

from __future__ import annotations

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
CHECKED = {"KVCOMPRESS_CHECK": "1"}  # a block that nobody may read is poisoned
Phases = list[list[dict[str, Any]]]


def turns(name: str, replies: list[int], seed: int, **more: Any) -> list[dict[str, Any]]:
    """A conversation: a turn ends a multiple of TURN tokens after its beginning."""
    found = [request(f"{name}0", prompt(TURN, seed), replies[0], **more)]
    for turn, reply in enumerate(replies[1:], start=1):
        tokens = prompt(TURN - replies[turn - 1], seed=1000 * turn + seed)
        follows = f"{name}{turn - 1}"
        found.append(request(f"{name}{turn}", tokens, reply, follows=follows, **more))
    return found


def check(report: dict[str, Any], names: list[str]) -> None:
    """What was said going on is what is said reading it all."""
    check_as_alone(report["outputs"], names)
    assert report["free_at_end"] == report["num_blocks"] - 1


def conversation(name: str, replies: list[int], seed: int, **more: Any) -> Phases:
    """Its turns, one after the other, each beside the same read alone."""
    own = turns(name, replies, seed, **more)
    return [[one, alone(one)] if turn else [one] for turn, one in enumerate(own)]


def side_by_side(*several: Phases) -> Phases:
    """Conversations of as many turns."""
    return [[one for phase in phases for one in phase] for phases in zip(*several, strict=True)]


EVICTING = ["adakv", "streamingllm", "keydiff", "h2o", "pyramidkv", "d2o", "spans"]
WINDOWS = {"adakv": 32, "pyramidkv": 32, "momentkv": 32, "streamingllm": 0, "keydiff": 0}


@pytest.mark.parametrize(
    "policies", [EVICTING, ["momentkv"], ["kvmerger"]], ids=lambda names: names[0]
)
def test_turns_that_go_on_say_what_one_request_says(
    llama: str, run_engine: Run, policies: list[str]
) -> None:
    """Of every family: windows, none, sums of attention, layers, merging, moments, biases.

    Of what is kept, the queries that the next event looks at are computed anew.
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


def test_anew_says_what_a_first_request_says(llama: str, run_engine: Run) -> None:
    """Behind as much of the prefix cache as the window leaves, also where a turn is shorter."""
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


def test_branches_cuts_and_strangers(llama: str, run_engine: Run) -> None:
    """One history with two next questions at once; a reply that is cut; a first turn that differs.

    A question that is shorter than the window of queries, and one that leaves out the reply.
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


def test_many_conversations_in_a_pool_for_a_few(llama: str, run_engine: Run) -> None:
    """States are forgotten, requests preempted: all say what they would say in a large one.

    Those that spoke last go on first, when the others' states have not all been forgotten.
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


def test_every_choice_of_several_goes_on(llama: str, run_engine: Run) -> None:
    """Two replies to one prompt, whose events and replies are their own."""
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


def test_a_reply_that_is_aborted(llama: str, run_engine: Run) -> None:
    """What had been computed of it is kept."""
    first, second = turns("a", [60, 5], seed=1)
    aborted = {**first, "id": "aborted", "salt": "s", "max_tokens": 100, "abort_at_step": 50}
    again = {**second, "id": "again", "salt": "s", "taking": 40}
    again["prompt"] = prompt(TURN - 40, seed=5)
    report = run_engine(llama, [[first, aborted], [again, alone(again)]], settings=REUSE)
    assert report["outputs"]["again"]["cached"] == TURN + 40
    check(report, ["again"])


def twice(one: dict[str, Any]) -> list[dict[str, Any]]:
    return [one, {**one, "id": f"{one['id']} twin"}]


def test_what_goes_on_may_be_preempted(llama: str, run_engine: Run) -> None:
    """Replies that outgrow the pool: whoever is preempted goes on again, or reads it all again."""
    several = [turns(f"c{n} ", [10, 110], seed=n) for n in range(6)]
    phases = [[own[0] for own in several], [two for own in several for two in twice(own[1])]]
    small = {"num_gpu_blocks_override": 56, "max_model_len": 512}
    report = run_engine(llama, phases, settings=REUSE, environment=CHECKED, **small)
    assert report["preempted_going_on"] >= 2
    for own in several:
        outputs = [report["outputs"][each["id"]] for each in twice(own[1])]
        assert outputs[0]["tokens"] == outputs[1]["tokens"]
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_long_replies_and_asynchronous_scheduling(no_padding: str, run_engine: Run) -> None:
    """Events while replies grow. Two requests that go on from the same say the same.

    Their events run together, so that what is equal for a query of zeros is so up to rounding:
    the model has none.
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


def test_under_pressure(llama: str, run_engine: Run) -> None:
    """What was compressed for room goes on compressed; whether it was depends on the load."""
    several = [turns(f"c{n} ", [70, 50, 20], seed=n) for n in range(5)]
    phases = [list(turn) for turn in zip(*several, strict=True)]
    settings = {**REUSE, "trigger": "pressure:0.3"}
    report = run_engine(
        llama, phases, settings=settings, num_gpu_blocks_override=60, max_model_len=512
    )
    assert report["conversations_continued"] > 0
    assert report["free_at_end"] == report["num_blocks"] - 1
