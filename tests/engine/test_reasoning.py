"""The event behind the end of reasoning, on the real engine and in ledgers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.conftest import Run, alone, check_as_alone, request
from tests.engine.oracle import kept_positions
from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.scheduling.ledger import STEPS_UNTIL_KNOWN, RequestLedger
from vllm_kvcompress.scheduling.rule import TRIGGER_REASONING, CompressionRule

BLOCK, LAYERS, HEADS = 32, 3, 2
CHECKED = {"KVCOMPRESS_CHECK": "1"}


SERVERS: dict[str, dict[str, Any]] = {
    "alone": {"policy": "snapkv", "after_reasoning": 0.25},
    "prompts stay": {"policy": "auto", "after_reasoning": 0.1, "keep_prompt": True},
    "in any order": {"policy": "keydiff", "budget": 352, "trigger": "decode:64"}
    | {"after_reasoning": 0.25},
    "ceiling": {"policy": "adakv", "ceiling": 384, "after_reasoning": 0.25},
}

LENGTHS = {"ceiling": 1}  # of the end, where the answer is not stock's


@pytest.fixture(scope="module")
def thinking(llama: str, run_engine: Run) -> dict[str, Any]:
    """What stock vLLM answers, and a hundred tokens that first stand together at its token 120."""
    one = request("one", prompt(300, 1), 200)
    stock = run_engine(llama, [[one]])["outputs"]["one"]["tokens"]
    end = next(n for n in range(120, 200) if find(stock[n - 100 : n], stock) == n - 100)
    return {"request": one, "stock": stock, "end": 300 + end, "tokens": stock[end - 100 : end]}


def find(some: list[int], tokens: list[int]) -> int:
    """Returns the first place of some tokens in others."""
    return next(n for n in range(len(tokens)) if tokens[n : n + len(some)] == some)


def expected_position(end: int, window: int) -> int:
    """Counts up to the first whole block with enough queries behind the end."""
    position = end + STEPS_UNTIL_KNOWN + window
    while position % BLOCK:
        position += 1
    return position


@pytest.mark.parametrize("asynchronous", [False, True])
def test_reasoning_is_dropped_and_the_prompt_and_the_answer_stay(
    thinking: dict[str, Any], llama: str, run_engine: Run, asynchronous: bool
) -> None:
    """Up to the event the answer is stock's, which then reads prompt and answer alone."""
    report = run_engine(
        llama,
        [[thinking["request"]]],
        settings={"policy": "keydiff", "after_reasoning": 0, "keep_prompt": True},
        record_kept=True,
        environment=CHECKED,
        asynchronous=asynchronous,
        reasoning_end=thinking["tokens"],
    )
    (event,) = report["events"]
    position, end = expected_position(thinking["end"], window=1), thinking["end"]
    assert event["trigger"] == TRIGGER_REASONING
    assert event["source_tokens"] == position
    protected = {*range(300), *range(end, position)}
    kept = kept_positions(report["kept"], len(report["kept"]))
    for layer in kept:
        for places in layer:
            assert protected <= set(places)
            assert len(places) <= len(protected) + 2 * BLOCK
    tokens = report["outputs"]["one"]["tokens"]
    assert tokens[: position - 300] == thinking["stock"][: position - 300]


@pytest.mark.parametrize("name", SERVERS)
def test_preempted_requests_have_their_events_where_they_had_them(
    thinking: dict[str, Any], llama: str, run_engine: Run, name: str
) -> None:
    """A small pool preempts; answers are those that the requests have alone."""
    requests = [thinking["request"]]
    requests += [request(f"other {n}", prompt(300, 2 + n), 200) for n in range(3)]
    report = run_engine(
        llama,
        [requests, *([alone(each)] for each in requests)],
        settings=SERVERS[name],
        environment=CHECKED,
        reasoning_end=thinking["tokens"][-LENGTHS.get(name, 100) :],
        num_gpu_blocks_override=34,
        max_model_len=512,
    )
    assert bool(report["preemptions"]) == (name != "ceiling")  # where growth is reserved
    check_as_alone(report["outputs"], [each["id"] for each in requests])
    assert any(event["trigger"] == TRIGGER_REASONING for event in report["events"])


@given(
    prompt_tokens=st.integers(1, 400),
    reasoning=st.integers(1, 900),
    part=st.floats(0, 0.99),
    protected=st.integers(0, 400),
    window=st.integers(0, 64),
)
def test_what_is_kept_holds_the_part_and_all_protected_tokens(
    prompt_tokens: int, reasoning: int, part: float, protected: int, window: int
) -> None:
    rule = CompressionRule(
        block_size=BLOCK,
        fraction=1.0,
        at_prompt_end=False,
        window_size=window,
        after_reasoning=part,
    )
    protected = min(protected, prompt_tokens)
    ledger = RequestLedger(prompt_tokens, rule, num_prompt_tokens=prompt_tokens)
    ledger.protected = ((0, protected),) if protected else ()
    assert ledger.next_position(prompt_tokens) is None
    end = prompt_tokens + reasoning
    ledger.end_reasoning(end)
    position = ledger.next_position(prompt_tokens)
    assert position == expected_position(end, max(1, window))
    assert all(ledger.decide(other) is None for other in (position - 1, position + BLOCK))
    decision = ledger.decide(position)
    others = [n for n in range(end) if n >= protected]
    wanted = position - len(others) + part * len(others)
    assert decision.trigger == TRIGGER_REASONING
    assert wanted - 1e-3 <= decision.num_kept_blocks * BLOCK < wanted + 2 * BLOCK + 1
    assert bool(decision.skipped) == (decision.num_kept_blocks >= position // BLOCK)
    assert ledger.observed_window(position) == window
    kept = ledger.protected_at(position)
    assert {n for start, stop in kept for n in range(start, stop)} == (
        {*range(protected)} | {*range(end, position)}
    )
    ledger.commit(position, decision.num_kept_blocks)
    assert ledger.next_position(position) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "none", "after_reasoning": 0.5}, "found policy none"),
        ({"policy": "adakv", "after_reasoning": 0.5, "read": "quest:0.5"}, "found read quest"),
        ({"policy": "kvslimmer", "after_reasoning": 0.5}, "--kv-after-reasoning: kvslimmer"),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(Settings.from_dict(settings))


def test_a_model_whose_end_of_reasoning_is_unknown_is_refused(llama: str, run_engine: Run) -> None:
    with pytest.raises(pytest.fail.Exception, match="reasoning-config"):
        run_engine(llama, [[]], settings={"policy": "adakv", "after_reasoning": 0.5})
