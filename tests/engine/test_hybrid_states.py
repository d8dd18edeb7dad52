"""Contexts and conversations of models with recurrent states: Mamba and linear attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests.engine.conftest import Run, alone, request
from tests.engine.masked_oracle import MaskedDecoder
from tests.engine.test_divided_blocks import (
    CHECKED,
    DELTA_NETS,
    MODELS,
    SCHEDULERS,
    build,
    kept_of,
)
from tests.tiny_models import prompt

BLOCK, PAGE = 96, 32
TOLERANCE = 0.015  # of log-probabilities; without the recurrent state they differ by 0.07 and more
CONVOLUTIONS = MODELS["convolutions"]
CONTEXT = prompt(400, seed=1)
COMPRESSED = len(CONTEXT) // BLOCK * BLOCK
NAMED = {"kv_context_tokens": len(CONTEXT)}


@pytest.fixture(scope="module")
def delta_nets(model_directory: Path) -> str:
    """A model that remembers for long: at random a state decays within a few tokens."""

    def remember(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data.fill_(-7.0)

    return str(tiny_models.build("qwen3_next", model_directory / "remembering", change=remember))


@pytest.fixture(scope="module")
def convolutions(model_directory: Path) -> str:
    return build(CONVOLUTIONS, model_directory)


def ask(name: str, seed: int, output: int = 12, **more: Any) -> dict[str, Any]:
    return request(name, CONTEXT + prompt(20 + seed, seed=seed), output, xargs=NAMED, **more)


def kept_at_first_event(report: dict[str, Any]) -> list[list[list[int]]]:
    """Returns the positions kept by layer and head at the first event."""
    events = sorted(report["kept"][:2], key=lambda event: event["layer"])
    return [kept_of(event, PAGE) for event in events]


def expect(logits: torch.Tensor, logprobs: dict[str, float]) -> None:
    """Compares a token's log-probabilities with the oracle's."""
    expected = torch.log_softmax(logits, dim=0)
    for candidate, logprob in logprobs.items():
        assert logprob == pytest.approx(float(expected[int(candidate)]), abs=TOLERANCE)


@pytest.mark.parametrize("prepares", [False, True], ids=["asked", "prepared"])
def test_questions_go_on_from_the_context_and_the_recurrent_state_at_its_end(
    delta_nets: str, run_engine: Run, prepares: bool
) -> None:
    """Compares with Hugging Face's model, of whose context the evicted tokens are masked."""
    phases = [[ask("first", 3)], [ask("second", 4)]]
    if prepares:
        tokens, xargs = [*CONTEXT, 7, 8, *CONTEXT], {**NAMED, "kv_prepare": 1}
        phases.insert(0, [request("preparing", tokens, 1, xargs=xargs)])
    report = run_engine(
        delta_nets,
        phases,
        settings={"policy": "adakv", "budget": 0.25, "reuse_contexts": True},
        record_kept=True,
        environment=CHECKED,
        **DELTA_NETS,
    )
    outputs = report["outputs"]
    assert report["contexts_reused"] == 1 + prepares
    assert [event["trigger"] for event in report["events"]] == ["prepare" if prepares else "prompt"]
    assert outputs["first"]["cached"] == prepares * COMPRESSED
    assert outputs["second"]["cached"] == COMPRESSED
    for name in ("first", "second"):
        kept = kept_at_first_event(report)
        oracle = MaskedDecoder(delta_nets, CONTEXT[:COMPRESSED], kept, COMPRESSED)
        for token in report["prompts"][name][COMPRESSED:]:
            logits = oracle.step(token)
        output = outputs[name]
        for token, logprobs in zip(output["tokens"], output["logprobs"], strict=True):
            expect(logits, logprobs)
            logits = oracle.step(token)
    assert report["free_at_end"] == report["num_blocks"] - 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_turn_goes_on_from_what_the_last_one_kept_and_its_recurrent_state(
    delta_nets: str, run_engine: Run, asynchronous: bool
) -> None:
    """Compares the first token behind the question, before the turn's own event."""
    first = request("first", prompt(300, seed=1), 20)
    kind = "AsyncCompressionScheduler" if asynchronous else "CompressionScheduler"
    report = run_engine(
        delta_nets,
        [[first], [request("second", prompt(60, seed=2), 8, follows="first")]],
        settings={"policy": "snapkv", "budget": 0.25, "reuse_conversations": "reuse"},
        record_kept=True,
        environment=CHECKED,
        asynchronous=asynchronous,
        scheduler_cls=f"{SCHEDULERS}.{kind}",
        **DELTA_NETS,
    )
    output = report["outputs"]["second"]
    assert report["conversations_continued"] == 1
    assert output["cached"] == 300 + 19
    oracle = MaskedDecoder(delta_nets, first["prompt"], kept_at_first_event(report), 288)
    for token in report["prompts"]["second"][300:]:
        logits = oracle.step(token)
    expect(logits, output["logprobs"][0])
    assert report["free_at_end"] == report["num_blocks"] - 1


TURN = 192
# Keeps the same tokens however numbers are rounded, as they are by where chunks begin.
CHAT = {
    "policy": "streamingllm",
    "budget": 96,
    "trigger": f"chunk:{TURN}",
    "reuse_conversations": "reuse",
}


def chat(name: str, replies: list[int], seed: int, **more: Any) -> list[dict[str, Any]]:
    """Returns a conversation, whose turns end at multiples of TURN tokens."""
    turns = [request(f"{name}0", prompt(TURN, seed), replies[0], **more)]
    for turn, reply in enumerate(replies[1:], start=1):
        tokens = prompt(TURN - replies[turn - 1], seed=1000 * turn + seed)
        follows = f"{name}{turn - 1}"
        turns.append(request(f"{name}{turn}", tokens, reply, follows=follows, **more))
    return turns


def check_close(outputs: dict[str, Any], name: str) -> None:
    """Compares log-probabilities with those of the same request alone, up to rounding.

    They are those of the same tokens up to the first that differs.
    """
    one, other = outputs[name], outputs[f"alone {name}"]
    assert other["cached"] == 0
    pairs = list(zip(one["tokens"], other["tokens"], strict=False))
    num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    rows = list(zip(one["logprobs"], other["logprobs"], strict=False))
    for found, expected in rows[: num_equal + 1]:
        shared = found.keys() & expected
        assert len(shared) >= 4
        for token in shared:
            assert found[token] == pytest.approx(expected[token], abs=TOLERANCE)


def test_continued_turns_have_the_outputs_of_one_request(delta_nets: str, run_engine: Run) -> None:
    """Turns end within a block, at its end, and behind one that the reply has filled.

    With `chunk:N` a request that reads an entire conversation is compressed where its turns were.
    A branch goes on from the same state; a prompt without the end of the reply reads everything.
    """
    replies = [20, 97, 110, 4]
    turns = chat("c", replies, seed=1)
    branch = {**turns[1], "id": "branch", "prompt": prompt(TURN - 20, seed=77), "max_tokens": 4}
    cut = {**branch, "id": "cut", "taking": 11, "prompt": prompt(TURN - 11, seed=78)}
    salted = {**branch, "id": "salted", "salt": "other"}
    phases = [[turns[0]], [branch], [cut], [salted], [alone(branch)]]
    phases += [[each] for turn in turns[1:] for each in (turn, alone(turn))]
    report = run_engine(delta_nets, phases, settings=CHAT, environment=CHECKED, **DELTA_NETS)
    outputs = report["outputs"]
    computed = [turn * TURN + replies[turn - 1] - 1 for turn in (1, 2, 3)]
    assert computed[1] % BLOCK == 0
    assert [outputs[f"c{turn}"]["cached"] for turn in (1, 2, 3)] == computed
    assert outputs["branch"]["cached"] == computed[0]
    assert outputs["cut"]["cached"] < TURN
    assert outputs["salted"]["cached"] == 0
    assert report["conversations_continued"] == 4
    for name in ("branch", "c1", "c2", "c3"):
        check_close(outputs, name)
    assert report["free_at_end"] == report["num_blocks"] - 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_aborted_reply_is_continued_from_what_was_computed(
    delta_nets: str, run_engine: Run, asynchronous: bool
) -> None:
    """Asynchronously a step is under way, whose token the recurrent state includes."""
    first, second = chat("a", [60, 5], seed=1)
    aborted = {**first, "id": "aborted", "salt": "s", "max_tokens": 100, "abort_at_step": 30}
    again = {**second, "id": "again", "salt": "s", "taking": 40}
    again["prompt"] = prompt(TURN - 40, seed=5)
    kind = "AsyncCompressionScheduler" if asynchronous else "CompressionScheduler"
    report = run_engine(
        delta_nets,
        [[first], [aborted], [again], [alone(again)]],
        settings=CHAT,
        environment=CHECKED,
        asynchronous=asynchronous,
        scheduler_cls=f"{SCHEDULERS}.{kind}",
        **DELTA_NETS,
    )
    assert TURN + 25 < report["outputs"]["again"]["cached"] < TURN + 40
    check_close(report["outputs"], "again")
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_a_small_pool_evicts_states_and_has_the_same_outputs(
    delta_nets: str, run_engine: Run
) -> None:
    """Conversations and a context, one request after the other."""
    chats = [chat(f"c{n} ", [10 + n, 4], seed=10 + n) for n in range(5)]
    phases = [[turn] for turn, _ in chats] + [[ask("first", 30, 4)]]
    phases += [[turn] for _, turn in reversed(chats)] + [[ask("second", 31, 4)]]
    phases += [[alone(turn)] for _, turn in chats] + [[alone(ask("second", 31, 4))]]
    report = run_engine(
        delta_nets,
        phases,
        settings={**CHAT, "reuse_contexts": True},
        environment=CHECKED,
        num_gpu_blocks_override=20,
        max_model_len=576,
        **DELTA_NETS,
    )
    assert 0 < report["conversations_continued"] < 5
    assert report["forgotten"]["evicted"] > 0
    for name in [turn["id"] for _, turn in chats] + ["second"]:
        check_close(report["outputs"], name)
    assert report["free_at_end"] == report["num_blocks"] - 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_crowded_requests_are_those_alone_when_some_are_preempted_and_aborted(
    delta_nets: str, run_engine: Run, asynchronous: bool
) -> None:
    """Answers outgrow the pool; those of turns depend on what is left of the last one."""
    chats = [chat(f"c{n} ", [10, 200], seed=n) for n in range(3)]
    turns = [{**second, "at_step": 2 * n} for n, (_, second) in enumerate(chats)]
    questions = [ask(f"q{n}", 30 + n, 250, at_step=5 * n) for n in range(4)]
    aborted = {**turns[0], "id": "aborted", "abort_at_step": 60}
    phases = [[first] for first, _ in chats] + [[*turns, *questions, aborted]]
    phases += [[alone({**one, "max_tokens": 20})] for one in questions]
    kind = "AsyncCompressionScheduler" if asynchronous else "CompressionScheduler"
    report = run_engine(
        delta_nets,
        phases,
        settings={**CHAT, "trigger": "prompt", "reuse_contexts": True},
        environment=CHECKED,
        asynchronous=asynchronous,
        scheduler_cls=f"{SCHEDULERS}.{kind}",
        num_gpu_blocks_override=24,
        max_model_len=768,
        **DELTA_NETS,
    )
    assert report["preemptions"] >= report["preempted_going_on"] > 0
    assert report["conversations_continued"] > 0
    assert report["contexts_reused"] > 0
    for one in questions:
        check_close(report["outputs"], one["id"])
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_kept_recurrent_states_never_enter_the_prefix_cache(
    delta_nets: str, run_engine: Run
) -> None:
    """A question goes on from a context that was compressed while it was read.

    Of the same prompt, uncompressed, the prefix cache then has all blocks up to the context's end.
    """
    whole = {**ask("whole", 4), "xargs": {"kv_policy": "none"}}
    phases = [[ask("first", 3)], [ask("second", 4)], [whole], [{**whole, "id": "again"}]]
    settings = {**CHAT, "trigger": "chunk:96", "reuse_contexts": True, "request_policies": ["none"]}
    report = run_engine(delta_nets, phases, settings=settings, environment=CHECKED, **DELTA_NETS)
    assert report["contexts_reused"] == 1
    outputs = report["outputs"]
    assert outputs["again"]["cached"] == COMPRESSED
    assert outputs["again"]["logprobs"] == outputs["whole"]["logprobs"]


def test_spilling_recurrent_states_is_refused(convolutions: str, run_engine: Run) -> None:
    settings = {"policy": "adakv", "reuse_contexts": True, "spill": 0.01}
    with pytest.raises(pytest.fail.Exception, match="Mamba or linear-attention layers, whose"):
        run_engine(convolutions, [[ask("a", 1)]], settings=settings, **CONVOLUTIONS.engine)
