"""Biases by distance (ALiBi): stock at budget 1.0, and dense attention over what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.engine.latent_cases import check_stock
from tests.engine.oracle import visible_positions
from tests.tiny_models import prompt

BLOCK, LAYERS = 32, 3
LONG, SHORT = prompt(700, seed=1), prompt(50, seed=2)
CHECKED = {"KVCOMPRESS_CHECK": "1"}
SETTINGS = {
    "policy": "adakv",
    "budget": 0.25,
    "min_request_budget": 0.25,
    "max_request_budget": 1.0,
    "request_policies": ["keydiff", "h2o"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.build("bloom", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def report(model: str, run_engine: Run) -> dict[str, Any]:
    phases = [
        [request("long", LONG, 24), request("short", SHORT, 24)],
        [request("whole", LONG, 24, salt="whole", xargs={"kv_budget": 1.0})],
        [
            request("again", LONG, 24),
            request("keydiff", LONG[:300], 9, xargs={"kv_policy": "keydiff"}),
        ],
    ]
    return run_engine(model, phases, settings=SETTINGS, record_kept=True, environment=CHECKED)


def test_budget_one_gives_the_tokens_of_stock(
    model: str, report: dict[str, Any], run_engine: Run
) -> None:
    stock = run_engine(model, [[request("long", LONG, 24), request("short", SHORT, 24)]])
    outputs, expected = report["outputs"], stock["outputs"]
    check_stock(outputs["whole"], expected["long"])
    check_stock(outputs["short"], expected["short"])
    assert outputs["long"]["tokens"][0] == expected["long"]["tokens"][0]
    assert outputs["again"]["tokens"] == outputs["long"]["tokens"]
    assert report["free_at_end"] == report["num_blocks"] - 1


def logits_over(
    model: str, tokens: list[int], ends: list[int], visible: list[list[list[list[int]]]]
) -> Tensor:
    """Returns all tokens' logits where those behind an event see what it has kept.

    Hugging Face's model, whose tokens stay where they are: what heads have evicted is hidden.
    """
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    for layer in range(LAYERS):
        hidden = torch.zeros(len(visible[0][layer]), len(tokens), len(tokens))
        for end, event in zip(ends, visible, strict=True):
            for head, positions in enumerate(event[layer]):
                for token in set(range(end // BLOCK * BLOCK)) - set(positions):
                    hidden[head, end:, token] = -torch.inf

        def hide(module: Any, args: Any, kwargs: Any, hidden: Tensor = hidden) -> Any:
            return args, {**kwargs, "attention_mask": kwargs["attention_mask"] + hidden}

        attention = reference.transformer.h[layer].self_attention
        attention.register_forward_pre_hook(hide, with_kwargs=True)
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def check_log_probabilities(
    model: str,
    tokens: list[int],
    output: dict[str, Any],
    records: list[dict[str, Any]],
    ends: list[int],
) -> None:
    """Asserts the log-probabilities of the answer to a prompt, with events at these ends."""
    num_prompt, tokens = len(tokens), [*tokens, *output["tokens"]]
    logits = logits_over(model, tokens, ends, visible_positions(records, LAYERS, ends))
    logprobs = torch.log_softmax(logits[num_prompt - 1 :], dim=-1)
    for number, found in enumerate(output["logprobs"]):
        for token, value in found.items():
            assert value == pytest.approx(float(logprobs[number, int(token)]), abs=2e-3), number


def test_kept_tokens_are_read_at_their_own_distances(model: str, report: dict[str, Any]) -> None:
    check_log_probabilities(model, LONG, report["outputs"]["long"], report["kept"], [len(LONG)])


def test_tokens_keep_their_positions_from_event_to_event(model: str, run_engine: Run) -> None:
    """Events follow chunks, the prompt and 32 tokens each."""
    report = run_engine(
        model,
        [[request("long", LONG, 90)]],
        settings={"policy": "adakv", "budget": 0.25, "trigger": ["chunk:256", "decode:32"]},
        record_kept=True,
        environment=CHECKED,
    )
    ends = [256, 512, 700, 732, 764]
    check_log_probabilities(model, LONG, report["outputs"]["long"], report["kept"], ends)


def test_a_turn_goes_on_from_kept_tokens_at_their_distances(model: str, run_engine: Run) -> None:
    more = prompt(90, seed=4)
    report = run_engine(
        model,
        [[request("first", LONG, 24)], [request("second", more, 12, follows="first")]],
        settings={"policy": "adakv", "budget": 0.25, "reuse_conversations": "reuse"},
        record_kept=True,
        environment=CHECKED,
    )
    assert report["conversations_continued"] == 1
    outputs = report["outputs"]
    tokens = [*LONG, *outputs["first"]["tokens"], *more]
    ends = [len(LONG), len(tokens)]
    check_log_probabilities(model, tokens, outputs["second"], report["kept"], ends)


def test_preempted_requests_resume_with_their_positions(model: str, run_engine: Run) -> None:
    requests = [request(f"r{n}", prompt(300 + 7 * n, seed=n), 160) for n in range(6)]
    settings = {"policy": "adakv", "budget": 0.25}
    roomy = run_engine(model, [requests], settings=settings)
    tight = run_engine(
        model,
        [requests],
        settings=settings,
        environment=CHECKED,
        num_gpu_blocks_override=36,
        max_model_len=512,
    )
    assert tight["preemptions"] > roomy["preemptions"] == 0
    for name, output in roomy["outputs"].items():
        assert tight["outputs"][name]["tokens"] == output["tokens"], name
