"""Odd values in flags, YAML and requests are accepted, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_kvcompress.cli import serve
from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.prompts.settings import REQUEST_RATE, PromptSettings
from vllm_kvcompress.vllm_plugin import debug_mode
from vllm_kvcompress.vllm_plugin.request_options import RequestCheck
from vllm_kvcompress.vllm_plugin.startup import lifeline

LONGEST = 1000  # characters of a refusal, whatever was said
HUGE = 10**400
KEYS = sorted(Settings.model_fields)
PROMPT_KEYS = sorted(PromptSettings.model_fields)
FLAGS = [
    action.option_strings[0]
    for action in serve.options_parser()._actions
    if (action.nargs is None or action.const == "auto") and not action.choices
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([HUGE, -HUGE, 2**63, 0, 1, -1]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["x" * 100_000, "\x00", "1e999", "nan", "-0.0", "auto", "snapkv", "a" + "+a" * 999]
    ),
    st.sampled_from(
        ["chunk:0", "chunk:-1", "decode:x", "pressure:nan", "chunk:1e9", "prompt,prompt"]
    ),
)
ANY = st.recursive(
    ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8) | ODD, inner, max_size=3)
    ),
    max_leaves=6,
)
MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def refused_or_taken(call: Any) -> Any:
    """Returns the call's result, or None for a refusal with a short message."""
    try:
        return call()
    except ConfigError as error:
        said = str(error)
    assert 0 < len(said) <= LONGEST
    return None


@MANY
@given(st.dictionaries(st.sampled_from(KEYS), ANY), ANY)
@example({"policy": "snapkv", "min_tokens": HUGE}, None)
@example({"reuse_conversations": ["auto"]}, None)
def test_odd_settings_are_refused_or_survive_json(section: dict[str, Any], document: Any) -> None:
    """Accepted settings survive the JSON that takes them to the engine's processes."""
    refused_or_taken(lambda: Settings.from_dict(document))
    accepted = refused_or_taken(lambda: Settings.from_dict({"policy": "snapkv", **section}))
    if accepted is not None:
        sent = json.loads(json.dumps(accepted.to_dict()))
        assert Settings.from_dict(sent) == accepted
        refused_or_taken(lambda: resolve_settings(accepted))


@MANY
@given(st.dictionaries(st.sampled_from(PROMPT_KEYS), ANY))
@example({"min_tokens": HUGE})
def test_odd_prompt_settings_are_refused_or_survive_json(section: dict[str, Any]) -> None:
    prompts = {"compressor": "llmlingua2:m", **section}
    accepted = refused_or_taken(lambda: Settings.from_dict({"policy": "none", "prompts": prompts}))
    if accepted is not None:
        assert Settings.from_dict(json.loads(json.dumps(accepted.to_dict()))) == accepted


@MANY
@given(st.lists(st.tuples(st.sampled_from(FLAGS), ODD.map(str)), max_size=4))
@example([("--kv-budget", "0.5"), ("--kv-param", "window_size=" + "9" * 5000)])
@example([("--kv-min-tokens", "9" * 5000)])
@example([("--kv-param", "window_size=" + "[" * 100_000)])
def test_odd_flags_are_refused_or_accepted(flags: list[tuple[str, str]]) -> None:
    arguments = ["m", *(f"{name}={value}" for name, value in flags)]
    request = refused_or_taken(lambda: serve.parse_request(arguments))
    if request is not None:
        refused_or_taken(lambda: request.command({}))


@MANY
@given(section=ANY, whole_file=ANY)
def test_odd_yaml_is_refused_or_accepted(section: Any, whole_file: Any, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    for document in (whole_file, {"kvcompress": section}, {"additional-config": section}):
        path.write_text(yaml.safe_dump(document))
        request = ["m", "--config", str(path)]
        refused_or_taken(lambda request=request: serve.parse_request(request))


@pytest.mark.parametrize(
    "text", ["[" * 5000, "\x00", "{", "a: !!python/object:os.system x", "? [1]\n: 2"]
)
def test_a_refused_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        serve.parse_request(["m", "--config", str(path)])


@pytest.mark.parametrize(
    "value",
    ["", "x", "-1", "1e3", "2", "\u00b2", "\u0663" * 20, "9" * 20, "9" * 5000, "\udcff", "," * 9],
)
def test_odd_environment_variables_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVCOMPRESS_CHECK", "VLLM_PLUGINS"):
        monkeypatch.setenv(name, value)
    taken = refused_or_taken(lambda: [debug_mode.switched_on()])
    assert (taken is not None) == (value == "")
    request = ["m", "--kv-policy", "snapkv"]
    assert refused_or_taken(lambda: serve.parse_request(request)) is None
    if value != "2":  # a process that may be there, which this one would end with
        monkeypatch.setenv("KVCOMPRESS_SERVER", value)
        lifeline.follow()


XARGS = [*(f"kv_{name}" for name in RequestOptions.model_fields), REQUEST_RATE]
XARGS.append("kv_transfer_params")


class OwnCheck(RequestCheck):
    """The check of a server that lets requests choose."""

    settings = Settings(
        policy="snapkv",
        request_policies=("keydiff",),
        min_request_budget=0.1,
        max_request_budget=0.5,
        read="quest:0.5",
        min_request_read=0.25,
        reuse_contexts=True,
    )


@MANY
@given(st.dictionaries(st.sampled_from(XARGS), ANY))
@example({"kv_context_tokens": float("inf")})
@example({"kv_context_tokens": HUGE})
@example({"kv_budget": HUGE})
@example({"kv_read": HUGE})
def test_accepted_requests_are_within_the_limits(xargs: dict[str, Any]) -> None:
    """Every refusal is a ValueError, which vLLM answers with HTTP 400."""
    for check in (RequestCheck, OwnCheck):
        try:
            params = SamplingParams(extra_args=xargs)
        except VLLMValidationError:  # vLLM's own
            continue
        taken = refused_or_taken(lambda check=check, params=params: [check.validate_params(params)])
        if taken is None:
            continue
        assert isinstance(xargs.get("kv_transfer_params") or {}, dict)
        assert xargs.get("kv_context_tokens") is None or xargs["kv_context_tokens"] >= 1
        if check is RequestCheck:
            assert xargs.get("kv_policy") is None
            assert xargs.get("kv_budget") is None
            assert xargs.get("kv_read") is None
            assert not xargs.get("kv_prepare")
        else:
            assert xargs.get("kv_policy") in (None, "snapkv", "keydiff")
            assert xargs.get("kv_budget") is None or 0.1 <= xargs["kv_budget"] <= 0.5
            assert xargs.get("kv_read") is None or 0.25 <= xargs["kv_read"] <= 1
            assert not xargs.get("kv_prepare")  # of one token alone


@pytest.mark.parametrize("key", ["kv_" + "x" * 1_000_000, "kv_\x00", "kv_"])
def test_unknown_keys_are_refused_in_short_messages(key: str) -> None:
    with pytest.raises(ValueError, match="is not known") as refusal:
        RequestCheck.validate_params(SamplingParams(extra_args={key: 1}))
    assert len(str(refusal.value)) <= LONGEST
