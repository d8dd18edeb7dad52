"""Kept states that go to host memory while the pool has another use for their blocks.

What comes back is what went: with `chunk:N` and a budget in tokens, a turn that continues a state
has the outputs of a request that reads the whole conversation (see `test_conversations.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, alone, check_as_alone, request
from tests.engine.test_conversations import BLOCK, CHECKED, REUSE, TURN, check, turns
from tests.tiny_models import prompt

SLOT = 3 * 2 * 2 * BLOCK * 32 * 4  # layers, heads, keys and values, tokens, head size, bytes
ROOM = 400 * SLOT / 2**30  # GiB for 400 blocks
SPILL = {**REUSE, "spill": ROOM, "request_policies": ["none"]}


def filler(number: int, num_blocks: int) -> dict[str, Any]:
    """Returns a request that is not compressed, and takes the blocks of kept states."""
    tokens = prompt(num_blocks * BLOCK - 8, seed=500 + number)
    return request(f"filler {number}", tokens, 4, xargs={"kv_policy": "none"})


def pool(num_blocks: int) -> dict[str, int]:
    return {"num_gpu_blocks_override": num_blocks, "max_model_len": (num_blocks - 2) * BLOCK}


EVICTING = ["adakv", "h2o", "adakv+criticalkv", "pyramidkv"]


@pytest.mark.parametrize(
    ("policies", "asynchronous"),
    [(EVICTING, False), (["kvmerger"], True)],
    ids=["evicting", "merging"],
)
def test_spilled_turns_have_the_outputs_of_one_request(
    llama: str, run_engine: Run, policies: list[str], asynchronous: bool
) -> None:
    """Policies have state or none, differ by layer, and some remember norms."""
    several = [
        turns(policy, [20, 45, 33], seed, xargs={"kv_policy": policy})
        for seed, policy in enumerate(policies, start=1)
    ]
    phases, size = [], 14 + 6 * len(policies)
    for number, turn in enumerate(zip(*several, strict=True)):
        phases += [[*turn], [filler(number, size)]]
    later = [one for turn in several for one in turn[1:]]
    phases += [[alone(one)] for one in later]
    settings = {**SPILL, "policy": policies[0], "params": {}, "budget": 96}
    settings["request_policies"] = [*policies[1:], "none"]
    report = run_engine(
        llama,
        phases,
        settings=settings,
        environment=CHECKED,
        asynchronous=asynchronous,
        **pool(size + 2),
    )
    number = 2 * len(policies)
    assert report["states_restored"] == report["conversations_continued"] == number
    assert report["states_spilled"] > number
    check(report, [one["id"] for one in later])


def test_host_memory_of_one_state_has_the_latest_and_a_reset_clears_it(
    llama: str, run_engine: Run
) -> None:
    """The older of two conversations reads its history again; then both do."""
    a, b = turns("a", [20, 10], seed=1), turns("b", [20, 10], seed=2)
    again = [{**one[1], "id": f"{one[1]['id']} again"} for one in (a, b)]
    phases = [[a[0]], [b[0]], [filler(0, 14)], [b[1]], [filler(1, 14)], [a[1]], [filler(2, 14)]]
    phases += [again, [alone(a[1])], [alone(b[1])]]
    room = 5 * SLOT / 2**30  # a state has 3 blocks, or 4 after its second turn
    report = run_engine(
        llama,
        phases,
        settings={**SPILL, "spill": room},
        environment=CHECKED,
        calls=[[7, "reset_prefix_cache", {}]],
        **pool(16),
    )
    assert report["states_restored"] == 1
    assert report["spilled_bytes"] <= 5 * SLOT
    assert report["forgotten"]["host_full"] >= 1
    cached = {name: output["cached"] for name, output in report["outputs"].items()}
    assert cached["b1"] == TURN + 19
    assert cached["a1"] == cached["a1 again"] == cached["b1 again"] == 0
    check(report, ["a1", "b1"])


def test_spilled_context_comes_back_for_the_next_question(llama: str, run_engine: Run) -> None:
    context = prompt(10 * BLOCK, seed=7)
    asks = [
        request(
            f"ask {n}", context + prompt(40, seed=n), 8, xargs={"kv_context_tokens": len(context)}
        )
        for n in (1, 2)
    ]
    phases = [[asks[0]], [filler(0, 10), filler(1, 10)], [asks[1]], [alone(asks[1])]]
    settings = {"policy": "adakv", "budget": 0.25, "reuse_contexts": True, "spill": ROOM}
    settings["request_policies"] = ["none"]
    small = {"num_gpu_blocks_override": 22, "max_model_len": 480}
    report = run_engine(llama, phases, settings=settings, environment=CHECKED, **small)
    assert report["states_restored"] == report["contexts_reused"] == 1
    assert report["outputs"]["ask 2"]["cached"] == len(context)
    check_as_alone(report["outputs"], ["ask 2"])


@pytest.mark.parametrize(
    ("settings", "engine", "message"),
    [
        ({"policy": "adakv", "spill": 1}, {}, "found neither; add --kv-reuse-conversations"),
        ({"policy": "auto", "spill": 1}, {"enable_prefix_caching": False}, "need prefix caching"),
        ({**REUSE, "read": "quest:0.5", "spill": 1}, {}, "by summaries, which are not copied"),
        ({**REUSE, "spill": 1e-9}, {}, "expected room for a block, 4.58e-05 GiB, found 1e-09"),
        ({**REUSE, "spill": 1e6}, {}, "1000000.0 GiB of host memory on this rank, found"),
    ],
)
def test_host_memory_that_cannot_work_is_refused(
    llama: str, run_engine: Run, settings: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match=message):
        run_engine(llama, [], settings=settings, **engine)
