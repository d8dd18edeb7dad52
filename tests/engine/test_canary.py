"""Answers scored again with the full cache, on the real engine, against two engines' numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

CHECKED = {"KVCOMPRESS_CHECK": "1"}
SETTINGS = {"policy": "snapkv", "budget": 0.25}
SHADOW = "kvcompress-shadow"
COMPILES = "tests.engine.test_canary:note_compiles"
LATER = [request("later", prompt(40, 8), 2)]  # what a step counts at its end, the next one reports


def note_compiles(report: dict[str, Any]) -> None:
    """Has torch compile, as in a server, and notes how many requests had come by then."""
    import torch._dynamo
    from torch._dynamo.callback import on_compile_start

    os.environ.pop("TORCH_COMPILE_DISABLE")
    torch._dynamo.config.disable = False
    report["compiled_behind"] = []
    on_compile_start(lambda *_: report["compiled_behind"].append(len(report["prompts"])))


def best(logprobs: dict[str, float]) -> str:
    return max(logprobs, key=logprobs.__getitem__)


def expected_score(compressed: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """Adds up an answer's loss token by token.

    Args:
        compressed: the answer, with the log-probabilities that its client asked for.
        full: an uncompressed engine's output for prompt and answer as one prompt.
    """
    lost, changed, tokens = 0.0, 0, compressed["tokens"]
    scores = full["prompt_logprobs"][-len(tokens) :]
    for token, kept, whole_cache in zip(tokens, compressed["logprobs"], scores, strict=True):
        lost += kept[str(token)] - whole_cache[str(token)]
        changed += best(kept) != best(whole_cache)
    return {"num_tokens": len(tokens), "lost_nats": lost, "num_changed": changed}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_scores_are_those_of_two_engines(llama: str, run_engine: Run, asynchronous: bool) -> None:
    """The client gets the same answer with or without, and only what it asked for."""
    prompts = {"none": prompt(640, 1), "zero": prompt(500, 2), "five": prompt(420, 3)}
    asked = {"none": None, "zero": 0, "five": 5}
    phases = [[request(name, prompts[name], 40, logprobs=asked[name]) for name in prompts]]
    options: dict[str, Any] = {"environment": CHECKED, "asynchronous": asynchronous}
    watched = run_engine(llama, phases, settings={**SETTINGS, "shadow": 1.0}, **options)
    assert watched["shadow_outcomes"] == {"scored": 3}
    assert watched["free_at_end"] == watched["num_blocks"] - 1

    phases = [[request(name, prompts[name], 40) for name in prompts]]
    plain = run_engine(llama, phases, settings=SETTINGS)["outputs"]
    for name, output in watched["outputs"].items():
        assert output["tokens"] == plain[name]["tokens"], name
        numbers = [len(position) for position in output["logprobs"]]
        assert numbers == [] if asked[name] is None else [max(1, asked[name])] * 40, name

    texts = [
        request(name, prompts[name] + plain[name]["tokens"], 1, prompt_logprobs=5)
        for name in prompts
    ]
    stock = run_engine(llama, [texts])["outputs"]
    expected = [expected_score(plain[name], stock[name]) for name in prompts]
    for actual, score in zip(watched["shadows"], expected, strict=True):
        assert actual["num_tokens"] == score["num_tokens"]
        assert actual["num_changed"] == score["num_changed"]
        assert actual["lost_nats"] == pytest.approx(score["lost_nats"], abs=1e-3)
    assert max(abs(score["lost_nats"]) for score in expected) > 0.1


def test_what_reads_everything_loses_nothing(llama: str, run_engine: Run) -> None:
    """A request that is read in part, but wholly; one that nothing was done to is not scored."""
    settings = {"policy": "none", "read": "quest:0.25", "min_request_read": 0.25, "shadow": 1.0}
    whole = request("whole", prompt(640, 1), 40, xargs={"kv_read": 1.0}, logprobs=None)
    report = run_engine(llama, [[whole]], settings=settings, environment=CHECKED)
    (score,) = report["shadows"]
    assert abs(score["lost_nats"]) / 40 < 1e-4
    assert score["num_changed"] == 0
    short = request("short", prompt(40, 2), 10, logprobs=None)
    report = run_engine(llama, [[short], LATER], settings={**SETTINGS, "shadow": 1.0})
    assert report["shadow_outcomes"] == {"uncompressed": 1}
    assert report["shadows"] == []


def test_nothing_waits_for_a_shadow(llama: str, run_engine: Run) -> None:
    """A request that comes while an answer is scored has its blocks and answer in the same steps.

    The shadow is aborted, and scored in the end.
    """
    first, late = request("first", prompt(640, 1), 20, logprobs=None), prompt(450, 2)
    phases = [[first, request("late", late, 20, at_step=23, logprobs=None)]]
    options: dict[str, Any] = {"enable_prefix_caching": False, "environment": CHECKED}
    with_shadow = run_engine(llama, phases, settings={**SETTINGS, "shadow": 1.0}, **options)
    without = run_engine(llama, phases, settings=SETTINGS, **options)
    assert with_shadow["outputs"] == without["outputs"]

    def steps(report: dict[str, Any], name: str) -> list[int]:
        return [step for step, held in enumerate(report["held"]) if name in held]

    assert steps(with_shadow, "late") == steps(without, "late")
    assert steps(with_shadow, SHADOW)[0] < steps(with_shadow, "late")[0]
    assert SHADOW not in with_shadow["held"][steps(with_shadow, "late")[0]]
    assert with_shadow["shadow_outcomes"] == {"scored": 2}


def test_no_step_compiles_log_probabilities(llama: str, run_engine: Run) -> None:
    """vLLM compiles their ranks for the first request that has some, for seconds to half a minute.

    Requests that have none, compressed or not, need nothing compiled.
    """
    phases = [[request("sampled", prompt(640, 1), 5, logprobs=None)], LATER]
    settings = {**SETTINGS, "shadow": 1.0}
    report = run_engine(llama, phases, settings=settings, probes=[COMPILES])
    assert report["shadow_outcomes"] == {"scored": 1}
    assert set(report["compiled_behind"]) == {0}


def test_an_answer_without_room_is_dropped(llama: str, run_engine: Run) -> None:
    """Its shadow would take 32 of 49 blocks, and may take half of the free ones."""
    phases = [[request("long", prompt(1000, 1), 20, logprobs=None)], LATER]
    options = {"num_gpu_blocks_override": 50, "max_model_len": 1100}
    report = run_engine(llama, phases, settings={**SETTINGS, "shadow": 1.0}, **options)
    assert report["shadow_outcomes"] == {"dropped": 1}
    assert report["shadows"] == []


TRIGGERS: dict[str, dict[str, Any]] = {
    "while generating": {"policy": "adakv", "budget": 0.4, "trigger": "chunk:96,decode:24"},
    "ceiling": {"policy": "h2o", "ceiling": 200},
    "drafts": SETTINGS,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


@pytest.mark.parametrize("name", TRIGGERS)
def test_answers_are_the_same_under_any_trigger(llama: str, run_engine: Run, name: str) -> None:
    """Also in a pool so small that requests are preempted, and with drafts."""
    phases = [[request(str(seed), prompt(420, seed), 60) for seed in range(4)]]
    options: dict[str, Any] = {"num_gpu_blocks_override": 46, "max_model_len": 800}
    if name == "drafts":
        options["speculative_config"] = DRAFTS
    watched, plain = (
        run_engine(llama, phases, settings=settings, environment=CHECKED, **options)
        for settings in ({**TRIGGERS[name], "shadow": 1.0}, TRIGGERS[name])
    )
    assert watched["outputs"] == plain["outputs"]
    assert watched["shadow_outcomes"] == {"scored": 4}


def test_conversations_go_on_as_without(llama: str, run_engine: Run) -> None:
    """What a shadow computes of an answer is not put into the prefix cache."""
    settings = {"policy": "snapkv", "budget": 0.5, "reuse_conversations": "auto"}
    turns = [request(name, prompt(200, seed), 60) for seed, name in enumerate(("a", "b", "c"))]
    phases = [[turns[0]], [{**turns[1], "follows": "a"}], [{**turns[2], "follows": "b"}]]
    watched, plain = (
        run_engine(llama, phases, settings=each, environment=CHECKED)
        for each in ({**settings, "shadow": 1.0}, settings)
    )
    assert watched["outputs"] == plain["outputs"]
    assert watched["conversations_continued"] == plain["conversations_continued"]
    assert watched["shadow_outcomes"] == {"scored": 3}
