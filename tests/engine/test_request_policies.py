"""Requests that choose their policy and budget, and operators who limit the choice."""

from __future__ import annotations

import pickle
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options
from vllm_kvcompress.vllm_plugin.request_options import RequestCheck

SERVER = {
    "policy": "adakv",
    "budget": 0.25,
    "request_policies": ["keydiff", "snapkv+criticalkv", "none"],
    "min_request_budget": 0.1,
    "max_request_budget": 0.75,
}
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "keydiff": {"kv_policy": "keydiff"},
    "half": {"kv_budget": 0.5},
    "both": {"kv_policy": "snapkv+criticalkv", "kv_budget": 0.75},
    "whole": {"kv_policy": "none"},
}


def alone(name: str) -> dict[str, Any] | None:
    """Returns settings of a server with a request's choice as default; None: stock."""
    choice = CHOICES[name]
    if choice.get("kv_policy") == "none":
        return None
    return {"policy": choice.get("kv_policy", "adakv"), "budget": choice.get("kv_budget", 0.25)}


def test_each_request_is_compressed_with_its_own_policy_and_budget(
    llama: str, run_engine: Run
) -> None:
    """In one batch, each has the output of a server with that policy and budget."""
    trigger = "chunk:256,decode:32"
    tokens = {name: prompt(900, seed=seed) for seed, name in enumerate(CHOICES)}
    together = run_engine(
        llama,
        [[request(name, tokens[name], 40, xargs=xargs) for name, xargs in CHOICES.items()]],
        settings={**SERVER, "trigger": trigger},
        max_num_batched_tokens=300,
    )
    for name in CHOICES:
        own = alone(name)
        expected = run_engine(
            llama,
            [[request(name, tokens[name], 40)]],
            settings=own and {**own, "trigger": trigger},
        )
        assert together["outputs"][name]["tokens"] == expected["outputs"][name]["tokens"], name
        last = [held[name] for held in together["held"] if name in held][-1]
        if own is None:
            assert last == -(-940 // 32)
        else:
            assert last == [held[name] for held in expected["held"] if name in held][-1]
    assert {event["policy"] for event in together["events"]} == {
        "adakv",
        "keydiff",
        "snapkv+criticalkv",
    }


def test_longer_prompts_have_the_budget_of_their_length(llama: str, run_engine: Run) -> None:
    """A context is as long as it is itself, and what a request asks for goes first."""
    settings = {"policy": "snapkv", "budget": 0.5, "longer_budgets": {"600": 0.25}}
    settings |= {"min_request_budget": 0.5, "max_request_budget": 0.75}
    asked: dict[str, tuple[int, dict[str, Any], int]] = {  # tokens, options, blocks that are kept
        "short": (599, {}, 9),
        "long": (600, {}, 5),
        "asks": (800, {"kv_budget": 0.75}, 19),
        "context": (800, {"kv_context_tokens": 448}, 7),
    }
    for name, (number, xargs, num_kept) in asked.items():
        one = request(name, prompt(number, seed=number), 4, xargs=xargs)
        report = run_engine(llama, [[one]], settings=settings)
        (event,) = report["events"]
        assert event["blocks_written"] == num_kept, name


def test_server_with_policy_none_compresses_requests_that_choose_a_policy(
    llama: str, run_engine: Run
) -> None:
    tokens = prompt(900, seed=1)
    report = run_engine(
        llama,
        [[request("whole", tokens, 8), request("asks", tokens, 8, xargs={"kv_policy": "snapkv"})]],
        settings={"policy": "none", "budget": 0.25, "request_policies": ["snapkv"]},
    )
    stock = run_engine(llama, [[request("whole", tokens, 8)]])
    assert report["outputs"]["whole"]["tokens"] == stock["outputs"]["whole"]["tokens"]
    assert [event["policy"] for event in report["events"]] == ["snapkv"]


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"kv_policy": "tova"}, 'policy "tova": this server allows adakv and keydiff and'),
        ({"kv_policy": 3}, "kv_policy should be a valid string, found 3"),
        ({"kv_budget": 0.05}, "kv_budget 0.05: this server allows 0.1 to 0.75"),
        ({"kv_budget": 0}, "kv_budget should be greater than 0, found 0; give for example 0.5"),
        ({"kv_budget": 2048}, "less than or equal to 1, found 2048"),
        ({"kv_budget": "0.5"}, "found '0.5'"),
        ({"kv_budget": True}, "found True"),
    ],
)
def test_choices_outside_the_operators_limits_are_refused(
    xargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_of(Settings.from_dict(SERVER)).validate_params(params(xargs))


@pytest.mark.parametrize("xargs", CHOICES.values(), ids=CHOICES)
def test_choices_within_the_operators_limits_are_accepted(xargs: dict[str, Any]) -> None:
    check_of(Settings.from_dict(SERVER)).validate_params(params(xargs))


@pytest.mark.parametrize("xargs", [{"kv_budget": 0.5}, {"kv_read": 0.5}, {"kv_read": 1.0}])
@pytest.mark.parametrize("read", [None, "longcache:prefill=512"])
def test_choices_are_refused_where_the_operator_allows_none(
    xargs: dict[str, Any], read: str | None
) -> None:
    check = check_of(Settings(policy="adakv", budget=0.25, read=read))
    assert (check is RequestCheck) == (read is None)  # such a server refuses kv_protect, too
    with pytest.raises(ValueError, match="this server lets no request choose"):
        check.validate_params(params(xargs))


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        *(
            ({"kv_read": part}, "kv_read .*: this server lets no request choose")
            for part in (0.5, 1, 1.0)
        ),
        *(
            ({"kv_read": part}, f"vllm_xargs kv_read should be .*, found {re.escape(repr(part))}")
            for part in (0, -0.5, 1.5, 512, "0.5", True, [0.5])
        ),
        ({"kv_policy": "none", "kv_read": 0.5}, "kv_read .*: this server lets no request choose"),
        ({"kv_prepare": True, "kv_context_tokens": 600}, "keeps no contexts"),
        ({"kv_prefill": 512}, "kv_prefill is not known"),
    ],
)
def test_kv_read_is_refused_where_prompts_are_read_in_part(
    xargs: dict[str, Any], message: str
) -> None:
    """On a server that lets requests choose other things."""
    check = check_of(Settings.from_dict({**SERVER, "read": "longcache:prefill=512"}))
    check.validate_params(params({"kv_policy": "none", "kv_context_tokens": 600}))
    with pytest.raises(ValueError, match=message):
        check.validate_params(params(xargs))


def test_request_check_survives_pickling() -> None:
    check = check_of(Settings.from_dict(SERVER))
    assert pickle.loads(pickle.dumps(check)).settings == check.settings


@pytest.mark.parametrize(
    "settings", [Settings(policy="adakv", budget=0.25), Settings.from_dict(SERVER)]
)
def test_request_check_loads_for_both_model_runners(settings: Settings) -> None:
    """Loaded by the name that vLLM is given, in the API process and in the worker."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.sample import logits_processor as v1
    from vllm.v1.worker.gpu.sample import logits_processor as v2

    names = [plugin_options(settings)["logits_processors"]]
    refused, accepted = params({"kv_policy": "tova"}), params({"theirs": 1})
    v1.validate_logits_processors_parameters(names, accepted)
    with pytest.raises(VLLMValidationError, match="this server"):
        v1.validate_logits_processors_parameters(names, refused)
    validate = v2.build_custom_logits_processors_params_validator(names)
    validate(accepted)
    with pytest.raises(VLLMValidationError, match="this server"):
        validate(refused)

    config: Any = SimpleNamespace(
        speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=2)
    )
    under_v1 = v1.build_logitsprocs(config, torch.device("cpu"), False, False, names)
    (first,) = [p for p in under_v1.argmax_invariant if isinstance(p, RequestCheck)]
    (second,) = v2.build_custom_logits_processors(config, MagicMock(), False, names)
    logits = torch.randn(2, 5)
    assert first.apply(logits) is logits
    assert second.apply(logits, MagicMock()) is logits
    assert second.add_request(0, accepted) is False


def test_policies_that_need_different_attention_are_refused_at_start_up(
    llama: str, run_engine: Run
) -> None:
    with pytest.raises(pytest.fail.Exception, match="momentkv changes the attention"):
        run_engine(
            llama,
            [[request("a", prompt(300, seed=1), 2)]],
            settings={"policy": "adakv", "budget": 0.5, "request_policies": ["momentkv"]},
        )


def check_of(settings: Settings) -> Any:
    """Returns the class behind the name that vLLM is given."""
    import importlib

    module, _, name = plugin_options(settings)["logits_processors"].partition(":")
    return getattr(importlib.import_module(module), name)


def params(xargs: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(extra_args=xargs)
