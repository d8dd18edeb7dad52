"""No first token waits for compression: the prompt's event runs in the step behind it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.engine.oracle import check_decoding
from tests.tiny_models import prompt

LAYERS = 3
PROMPTS = {"short": prompt(500, seed=1), "long": prompt(900, seed=2)}
QUARTER = {"policy": "adakv", "budget": 0.25}


def requests(max_tokens: int) -> list[dict[str, Any]]:
    """Makes a request of each prompt, the second one while the first one decodes."""
    return [
        request(name, tokens, max_tokens, at_step=step)
        for step, (name, tokens) in enumerate(PROMPTS.items())
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["adakv", "keydiff"])
def test_first_token_is_stocks_and_the_second_comes_from_kept_tokens(
    llama: str, run_engine: Run, policy: str, asynchronous: bool
) -> None:
    """Whether the policy looks at queries, which are recorded until the event, or at keys alone."""
    stock = run_engine(llama, [requests(4)], asynchronous=asynchronous)
    ours = run_engine(
        llama,
        [requests(4)],
        settings={"policy": policy, "budget": 0.25},
        record_kept=True,
        asynchronous=asynchronous,
        environment={"KVCOMPRESS_CHECK": "1"},
    )
    assert ours["prompt_events"] == {"after_first_token": 2}
    for number, (name, tokens) in enumerate(PROMPTS.items()):
        expected, output = stock["outputs"][name], ours["outputs"][name]
        assert output["tokens"][0] == expected["tokens"][0]
        assert output["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=1e-4)
        kept = ours["kept"][LAYERS * number : LAYERS * (number + 1)]
        check_decoding(llama, tokens, kept, output)


def test_event_runs_in_the_step_behind_the_first_token(llama: str, run_engine: Run) -> None:
    """Blocks held: all of the prompt in two steps, then what is kept.

    The step that reads the prompt's end holds fresh blocks already, so that the next one, in which
    the event runs, needs none.
    """
    report = run_engine(llama, [[request("one", prompt(512, seed=5), 5)]], settings=QUARTER)
    held = [step["one"] for step in report["held"] if "one" in step]
    assert held == [16 + 4, 16 + 4 + 1, 4 + 1, 4 + 1]  # the last token is not computed


def test_requests_of_one_token_have_no_event(llama: str, run_engine: Run) -> None:
    """Nobody would read what such an event keeps; a named context is compressed all the same."""
    named = request("named", prompt(700, seed=3), 1, xargs={"kv_context_tokens": 600})
    report = run_engine(llama, [[*requests(1), named]], settings=QUARTER)
    assert [event["trigger"] for event in report["events"]] == ["prompt"]
    assert report["skipped"] == {"adakv ends_with_first_token": 2}
    assert report["prompt_events"] == {}
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_event_comes_at_once_where_the_next_prompt_waits_for_its_blocks(
    llama: str, run_engine: Run
) -> None:
    """The pool holds one uncompressed prompt; the last one of three leaves nobody waiting."""
    three = [request(f"r{i}", prompt(1000, seed=i), 12) for i in range(3)]
    report = run_engine(
        llama, [three], settings=QUARTER, num_gpu_blocks_override=60, max_model_len=1100
    )
    assert report["prompt_events"] == {"at_once_for_room": 2, "after_first_token": 1}
    assert report["preemptions"] == 0


def test_prompts_beyond_the_buffers_for_last_queries_are_compressed_at_once(
    llama: str, run_engine: Run
) -> None:
    """Ten prompts end in one step; eight buffers are there, one of them for a prompt in prefill."""
    ten = [request(f"r{i}", prompt(100, seed=i), 6) for i in range(10)]
    engine = {"settings": QUARTER, "max_num_batched_tokens": 1024}
    report = run_engine(llama, [ten], **engine)
    assert report["prompt_events"] == {"after_first_token": 7, "at_once_for_buffers": 3}
    each = run_engine(llama, [[one] for one in ten], **engine)
    assert each["prompt_events"] == {"after_first_token": 10}
    for name, output in each["outputs"].items():
        assert report["outputs"][name]["tokens"] == output["tokens"], name


def test_short_answers_are_left_whole_while_there_is_room(llama: str, run_engine: Run) -> None:
    """One alone; not one that waits with others, or whose answer may be long, or in a full pool."""
    phases = [
        [request("alone", prompt(600, seed=1), 10)],
        [request("long answer", prompt(600, seed=2), 20)],
        [request(f"together {i}", prompt(600, seed=3 + i), 10) for i in range(2)],
        [
            request("large", prompt(1800, seed=8), 60, xargs={"kv_policy": "none"}),
            request("beside", prompt(600, seed=9), 10, at_step=8),
        ],
    ]
    settings = {**QUARTER, "min_answer_tokens": 20, "request_policies": ["none"]}
    report = run_engine(llama, phases, settings=settings, num_gpu_blocks_override=100)
    assert report["skipped"] == {"adakv short_answer": 2}  # alone, and the first one of two
    assert len(report["events"]) == 3
    assert report["free_at_end"] == report["num_blocks"] - 1
