"""Prefix caching of models that have other attention beside the layers that are compressed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiny_models
from tests.engine.conftest import Run, alone, check_as_alone, request
from tests.tiny_models import prompt
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.scheduler_side.scheduler import CompressionMixin

CHECKED = {"KVCOMPRESS_CHECK": "1"}
# Of gated delta nets, by 96 tokens; on some CPUs vLLM else takes float32, by 160.
STATES = {
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "bfloat16",
    "environment": CHECKED,
}
SCHEDULERS = "vllm_kvcompress.vllm_plugin.scheduler_side.scheduler"
# Tokens between which every block of sliding windows, and every state, is cached; vLLM's default is
# 0, for the prompt's last ones alone. Of attention within chunks all blocks are.
EVERY_BLOCK: dict[str, dict[str, Any]] = {
    "gemma3": {"prefix_cache_retention_interval": 32},
    "llama4": {},
    "qwen3_next": {"prefix_cache_retention_interval": 96, **STATES},
}


@pytest.mark.parametrize(
    ("family", "num_prompt", "num_answer", "second", "third"),
    [
        ("gemma3", 1000, 200, 992, 1184),
        ("llama4", 1000, 200, 992, 1184),
        ("qwen3_next", 300, 100, 288, 384),
    ],
)
def test_blocks_computed_after_an_event_are_not_shared(
    model_directory: Path,
    run_engine: Run,
    family: str,
    num_prompt: int,
    num_answer: int,
    second: int,
    third: int,
) -> None:
    """A second turn must not hit blocks that the first computed after its event.

    The second turn puts the full-attention blocks behind the first one's event into the prefix
    cache, computed from uncompressed attention, so that the third request finds blocks of every
    group there. Those of the sliding windows, of chunks, or states have to be the second's too.
    """
    model = str(tiny_models.build(family, model_directory))
    settings = {"policy": "keydiff", "budget": 0.25}
    turn = [request(name, prompt(10, seed=2), 8, follows="first") for name in ("second", "third")]
    phases = [[request("first", prompt(num_prompt, seed=1), num_answer)], *([e] for e in turn)]
    report = run_engine(model, phases, settings=settings, **EVERY_BLOCK[family])
    outputs = report["outputs"]
    assert outputs["second"]["cached"] == second, "all that the first computed before its event"
    assert outputs["third"]["cached"] == third, "a part of it the first had computed too"
    for logprobs, expected in zip(
        outputs["third"]["logprobs"], outputs["second"]["logprobs"], strict=True
    ):
        assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def states(model_directory: Path) -> str:
    """A model with gated delta nets, whose blocks have 96 tokens and whose states last."""

    def remember(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # at random a state decays within a few tokens
                parameter.data.fill_(-7.0)

    return str(tiny_models.build("qwen3_next", model_directory / "states", change=remember))


def crowd(**more: Any) -> list[list[dict[str, Any]]]:
    """Prompts that share a beginning, more than fit, and repetitions of what may be evicted."""
    shared = prompt(200, seed=9)
    first = [
        request(f"{n}", shared + prompt(90 * n, seed=n), 60, at_step=2 * n, **more)
        for n in range(4)
    ]
    again = [request(f"again {n}", first[n]["prompt"], 4, **more) for n in (3, 0)]
    return [first, *([each] for each in again)]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_uncompressed_requests_beside_states_are_those_of_stock_vllm(
    states: str, run_engine: Run, asynchronous: bool
) -> None:
    """With hits, evictions, preemptions and prompts that are read in several chunks."""
    options: dict[str, Any] = {
        **STATES,
        "asynchronous": asynchronous,
        "num_gpu_blocks_override": 16,
        "max_model_len": 576,
        "max_num_batched_tokens": 192,
    }
    stock = run_engine(states, crowd(), **options)
    settings = {"policy": "snapkv", "budget": 0.25, "request_policies": ["none"]}
    name = "AsyncCompressionScheduler" if asynchronous else "CompressionScheduler"
    options["scheduler_cls"] = f"{SCHEDULERS}.{name}"  # as on GPUs, and on CPUs
    requests = crowd(xargs={"kv_policy": "none"})
    report = run_engine(states, requests, settings=settings, **options)
    assert report["outputs"] == stock["outputs"]
    assert report["preemptions"] == stock["preemptions"] > 0
    assert {stock["outputs"][f"again {n}"]["cached"] for n in (3, 0)} == {384, 0}, "one is evicted"


def check_repetition(outputs: dict[str, Any]) -> None:
    """Asserts that a repetition goes on exactly as the same request does alone.

    Chunks end at the same tokens. Others begin elsewhere, so their numbers are rounded otherwise.
    """
    assert outputs["repeated"]["logprobs"] == outputs["alone repeated"]["logprobs"]


def test_hits_of_compressed_requests_are_those_of_stock_vllm(states: str, run_engine: Run) -> None:
    """Where an event needs queries of the last block, the state before it is kept, too."""
    first, trunk = request("first", prompt(490, seed=1), 4), prompt(300, seed=3)
    repeated = {**first, "id": "repeated"}
    longer = {**first, "id": "longer", "prompt": [*first["prompt"], *prompt(150, seed=2)]}
    branches = [request(f"{n}", trunk + prompt(190, seed=4 + n), 4) for n in range(3)]
    last = {**branches[1], "id": "branch repeated"}
    phases = [[each] for each in (first, repeated, longer, *branches, last)]
    stock = run_engine(states, phases, **STATES)
    found = {name: output["cached"] for name, output in stock["outputs"].items()}
    assert list(found.values()) == [0, 480, 480, 0, 0, 288, 480]
    compared = [repeated, longer, branches[2], last]
    phases += [[alone(each)] for each in compared]
    settings = {"policy": "snapkv", "budget": 0.25}
    outputs = run_engine(states, phases, settings=settings, **STATES)["outputs"]
    for name in found:  # of 490 tokens 32 have to be new
        needed = (len(stock["prompts"][name]) - 32) // 96 * 96
        assert outputs[name]["cached"] == min(found[name], needed), name
    check_as_alone(outputs, [each["id"] for each in compared])
    check_repetition(outputs)


TRIGGERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "chunk": ({"policy": "keydiff", "budget": 128, "trigger": "chunk:100"}, {}, [288, 288]),
    "context": ({"trigger": "prompt,decode:40"}, {"kv_context_tokens": 250}, [192, 192]),
    "pressure": ({"trigger": "pressure:0.01"}, {}, [384, 480]),
}


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_compressed_requests_beside_states_are_the_same_with_and_without_hits(
    states: str, run_engine: Run, trigger: str
) -> None:
    settings, options, cached = TRIGGERS[trigger]
    first = request("first", prompt(490, seed=1), 50, xargs=options)
    repeated = {**first, "id": "repeated"}
    longer = {**first, "id": "longer", "prompt": [*first["prompt"], *prompt(150, seed=2)]}
    phases = [[each] for each in (first, repeated, longer, alone(repeated), alone(longer))]
    settings = {"policy": "snapkv", "budget": 0.25, **settings}
    report = run_engine(states, phases, settings=settings, **STATES)
    outputs = report["outputs"]
    assert [outputs[name]["cached"] for name in ("repeated", "longer")] == cached
    assert {event["trigger"] for event in report["events"]} >= {
        trigger.replace("context", "decode")
    }
    assert len(report["events"]) >= len(phases)
    check_as_alone(outputs, ["repeated", "longer"])
    check_repetition(outputs)


def test_windows_are_kept_where_a_repeated_prompt_begins(
    model_directory: Path, run_engine: Run
) -> None:
    """vLLM keeps only the last window of a prompt, whose queries the event needs."""
    model = str(tiny_models.build("gemma3", model_directory))
    first = request("first", prompt(390, seed=1), 4)
    repeated = {**first, "id": "repeated"}
    named = {**first, "id": "named", "xargs": {"kv_context_tokens": 250}}
    again = {**named, "id": "named again"}
    report = run_engine(
        model,
        [[each] for each in (first, repeated, named, again, alone(repeated), alone(again))],
        settings={"policy": "snapkv", "budget": 0.25},
        environment=CHECKED,
    )
    outputs = report["outputs"]
    assert outputs["repeated"]["cached"] == 352
    assert outputs["named again"]["cached"] == 192
    check_as_alone(outputs, ["repeated", "named again"])


class Managers(CompressionMixin):
    """A scheduler reduced to its look at block managers."""

    def __init__(self) -> None:
        self.table = None


def test_groups_whose_prefix_hits_cannot_be_limited_are_refused() -> None:
    managers = Managers()
    other = SimpleNamespace(enable_caching=True, kv_cache_spec=SimpleNamespace())
    with pytest.raises(UnsupportedError, match="add --no-enable-prefix-caching"):
        managers._share_table(other)
    other.enable_caching = False
    managers._share_table(other)
