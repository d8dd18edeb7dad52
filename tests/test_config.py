from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.config.auto import (
    DEFAULT_POLICY,
    PROFILED_FROM,
    PROFILED_POLICY,
    PROFILED_POLICY_BELOW,
    PROFILED_POLICY_IN_TOKENS,
)
from vllm_kvcompress.config.fields import AUTO_MIN_ANSWER_TOKENS, DEFAULT_MIN_TOKENS
from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.config.texts import budget_text
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.scheduling.budgets import parse_budget
from vllm_kvcompress.scheduling.rule import PolicyDemand
from vllm_kvcompress.scheduling.triggers import DEFAULT_CHUNK_TOKENS, Trigger, parse_triggers

BUDGETS = st.one_of(
    st.floats(min_value=1e-4, max_value=1.0, exclude_min=True),
    st.integers(min_value=2, max_value=10**6),
)
TRIGGERS = st.lists(
    st.one_of(
        st.just("prompt"),
        st.integers(1, 10**5).map("chunk:{}".format),
        st.integers(1, 10**5).map("decode:{}".format),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda trigger: trigger.partition(":")[0],
).map(",".join)
SCALARS = st.one_of(
    st.integers(),
    st.booleans(),
    st.text(max_size=5),
    st.floats(allow_nan=False).filter(math.isfinite),
)
SETTINGS = st.builds(
    Settings,
    policy=st.sampled_from(["snapkv", "adakv+criticalkv"]),
    budget=BUDGETS,
    trigger=TRIGGERS,
    params=st.dictionaries(st.text(min_size=1, max_size=8), SCALARS, max_size=3),
    profile=st.one_of(st.none(), st.just("heads.json")),
    min_tokens=st.integers(0, 10**4),
)


@given(SETTINGS)
def test_settings_survive_a_dictionary_json_and_pickle(settings: Settings) -> None:
    through_json = json.loads(json.dumps(settings.to_dict()))
    assert Settings.from_dict(through_json) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert hash(Settings.from_dict(through_json)) == hash(settings)


def test_equal_settings_have_one_hash_whatever_the_order_of_parameters() -> None:
    one, other = (
        Settings.from_dict({"policy": "snapkv", "params": params})
        for params in ({"a": 1, "b": True}, {"b": 1, "a": 1.0})
    )
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [("0.25", 0.25), ("2048", 2048), ("1.0", 1.0), (0.25, 0.25), (1.0, 1.0), (2048, 2048)],
)
def test_budget_is_a_fraction_or_tokens(given_value: object, expected: float | int) -> None:
    budget = parse_budget(given_value)
    assert budget == expected
    assert type(budget) is type(expected)


@pytest.mark.parametrize(
    ("given_settings", "trigger", "budget"),
    [
        ({"policy": "kvslimmer"}, "chunk:512", 2048),
        ({"policy": "kvslimmer", "budget": 0.25}, "chunk:512", 0.25),
        ({"policy": "asymkv", "request_policies": "kvslimmer,none"}, "chunk:512", 2048),
        ({"policy": "keydiff+window", "budget": 4096}, "chunk:128,decode:16", 4096),
        ({"policy": "adakv+keydiff"}, "chunk:128,decode:16", 0.5),
        ({"policy": "momentkv"}, "prompt,decode:16", 0.5),
        ({"policy": "adakv+criticalkv"}, "prompt", 0.5),
        ({"policy": "auto"}, "prompt", 0.5),
    ],
)
def test_paper_stands_for_the_policy_s_protocol(
    given_settings: dict[str, object], trigger: str, budget: float
) -> None:
    """A budget that is given stays; the settings name what `paper` stands for."""
    settings = Settings.from_dict(given_settings | {"trigger": "paper"})
    assert (settings.trigger, settings.budget) == (trigger, budget)
    assert Settings.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("given_settings", "error"),
    [
        ({"policy": "mine"}, "whose paper's protocol is known"),
        ({"policy": "none", "read": "quest:0.5"}, "found none; name triggers"),
        ({"policy": "keydiff", "request_policies": "snapkv"}, "share a protocol, found keydiff"),
    ],
)
def test_paper_without_a_protocol_is_refused(given_settings: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Settings.from_dict(given_settings | {"trigger": "paper"})


@pytest.mark.parametrize(
    "value",
    [
        *("1", 1, "0", "0.0", "-3", "nan", "inf", math.nan, "2048.0", "a quarter", "", True, None),
        *([0.25], 2**60),
    ],
)
def test_budgets_that_mean_nothing_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"such as 0\.25, or tokens .* such as 2048") as caught:
        parse_budget(value)
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def kept_blocks(budget: float | int, num_full_blocks: int, block_size: int) -> int:
    rule = Settings(policy="snapkv", budget=budget).rule(block_size, PolicyDemand())
    num_tokens = num_full_blocks * block_size
    return min(num_full_blocks, rule.target_blocks(num_tokens, num_tokens))


@given(BUDGETS, st.integers(0, 5000), st.sampled_from([16, 32, 128]))
def test_kept_blocks_are_the_budget_rounded_up(
    budget: float | int, num_full_blocks: int, block_size: int
) -> None:
    kept = kept_blocks(budget, num_full_blocks, block_size)
    # Counting up by hand: the fewest blocks that hold the budget.
    wanted_tokens = budget * num_full_blocks * block_size if isinstance(budget, float) else budget
    fewest = 1
    while fewest * block_size < wanted_tokens * (1 - 1e-4) - 1e-3:
        fewest += 1
    at_most = min(num_full_blocks, fewest + 1)
    assert min(num_full_blocks, fewest) <= kept <= at_most


@pytest.mark.parametrize(
    ("budget", "num_full_blocks", "expected"),
    [
        (0.25, 16, 4),
        (0.25, 17, 5),
        (0.25, 1, 1),
        (0.25, 0, 0),
        (1.0, 17, 17),
        (0.1, 30, 3),  # 0.1 * 30 is 3.0000000000000004 in floats when summed
        (0.07, 100, 7),  # 0.07 * 100 is 7.000000000000001
        (0.001, 16, 1),
        (64, 16, 2),
        (65, 16, 3),
        (2, 16, 1),
        (10**6, 16, 16),
    ],
)
def test_kept_blocks(budget: float | int, num_full_blocks: int, expected: int) -> None:
    assert kept_blocks(budget, num_full_blocks, 32) == expected


def test_triggers_combine_with_commas() -> None:
    triggers = parse_triggers("prompt, chunk,decode:256")
    assert triggers == (
        Trigger("prompt"),
        Trigger("chunk", DEFAULT_CHUNK_TOKENS),
        Trigger("decode", 256),
    )
    assert parse_triggers(["prompt", "decode:256"]) == (triggers[0], triggers[2])
    assert parse_triggers("pressure") == parse_triggers("pressure:0.9")
    assert str(Settings(policy="snapkv", budget=0.5, trigger="chunk:64,pressure:0.85").trigger) == (
        "chunk:64,pressure:0.85"
    )
    assert (
        Settings(policy="snapkv", budget=0.5, trigger="pressure:0.8")
        .rule(32, PolicyDemand(window_size=8))
        .pressure_mark
        == 0.8
    )


@pytest.mark.parametrize(
    "value",
    [
        *("pressure:1", "pressure:0", "pressure:high", "pressure:nan", "pressure:0.5,pressure:0.9"),
        *("sometimes", "", "prompt:3", "decode", "decode:0", "decode:-5", "decode:2.5", "decode:x"),
        *("decode:1,decode:2", 7, [], [7], "decode:" + "9" * 5000),
    ],
)
def test_triggers_that_mean_nothing_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="expected triggers joined by commas, each kind once"):
        parse_triggers(value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"budget": 0.5}, "policy (--kv-policy) is missing; give for example auto."),
        ({"policy": None, "budget": 0.5}, "policy (--kv-policy) is missing"),
        ({}, "policy (--kv-policy) is missing"),
        ("snapkv", "kvcompress: expected names with values, found 'snapkv'."),
        (
            {"policy": "snapkv", "bugdet": 1},
            "kvcompress: bugdet is not known; valid are after",
        ),
        ({"policy": ""}, "policy (--kv-policy) should have at least 1 character, found ''"),
        ({"policy": 3}, "policy (--kv-policy) should be a valid string, found 3"),
        ({"policy": "snapkv", "params": {"a": [1]}}, "params (--kv-param) should be"),
        ({"policy": "snapkv", "params": {"a": math.nan}}, "a: expected a finite number, found nan"),
        (
            {"policy": "snapkv", "min_tokens": -1},
            "min_tokens (--kv-min-tokens) should be greater than or equal to 0, found -1; leave it "
            "out for the default.",
        ),
        ({"policy": "snapkv", "trigger": "now"}, "trigger (--kv-trigger): expected triggers"),
        (
            {"policy": "none", "prompts": {"compressor": "llmlingua2:m", "rate": 2}},
            "rate (--prompt-rate) should be less than or equal to 1, found 2",
        ),
        ({"policy": "none", "prompts": {}}, "compressor (--prompt-compressor) is missing"),
        ({"policy": 3, "min_tokens": "x"}, "found 3; give for example auto. min_tokens"),
    ],
)
def test_refusals_say_what_was_expected_what_came_and_what_to_do(
    values: object, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_dict(values)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [{}, {"budget": None}])
def test_without_a_budget_half_is_kept_and_said_with_how_to_change_it(values: dict) -> None:
    settings = Settings.from_dict({"policy": "snapkv", **values})
    assert settings == Settings(policy="snapkv", budget=0.5)
    assert settings.to_dict()["budget"] == 0.5
    assert budget_text(settings).startswith("0.5 of each prompt (the default; --kv-budget")


@pytest.mark.parametrize(("budget", "text"), [(0.25, "0.25 of each"), (512, "512 tokens per KV")])
def test_a_chosen_budget_is_said_without_advice(budget: float | int, text: str) -> None:
    said = budget_text(Settings(policy="snapkv", budget=budget))
    assert said.startswith(text)
    assert "default" not in said


def test_dashes_in_keys_and_missing_values_are_understood() -> None:
    settings = Settings.from_dict(
        {"policy": "snapkv", "budget": "0.5", "min-tokens": 7, "profile": None, "params": None}
    )
    assert settings.min_tokens == 7
    assert settings.profile is None
    assert settings.params == {}


def test_only_a_policy_and_a_budget_below_the_whole_prompt_compress() -> None:
    assert Settings(policy="snapkv", budget=0.999).compresses
    assert Settings(policy="snapkv", budget=10**9).compresses
    assert not Settings(policy="snapkv", budget=1.0).compresses
    assert not Settings(policy="none", budget=0.25).compresses


def test_rule_rounds_chunks_up_to_whole_blocks() -> None:
    settings = Settings(policy="snapkv", budget=0.25, trigger="chunk:100,decode:70")
    rule = settings.rule(32, PolicyDemand(window_size=5))
    assert (rule.chunk_tokens, rule.decode_tokens, rule.at_prompt_end) == (128, 70, False)
    assert (rule.fraction, rule.tokens, rule.window_size) == (0.25, None, 5)
    assert (rule.block_size, rule.min_tokens) == (32, DEFAULT_MIN_TOKENS)
    tokens = Settings(policy="snapkv", budget=300).rule(16, PolicyDemand())
    assert (tokens.fraction, tokens.tokens, tokens.at_prompt_end) == (None, 300, True)
    assert (tokens.chunk_tokens, tokens.decode_tokens) == (None, None)


@pytest.mark.parametrize(
    "module",
    [
        "vllm_kvcompress.config.settings",
        "vllm_kvcompress.metrics.stats",
        "vllm_kvcompress.metrics.prometheus",
    ],
)
def test_settings_and_statistics_need_neither_torch_nor_vllm(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def limited(**values: object) -> Settings:
    return Settings.from_dict({"policy": "adakv", "budget": 0.25, **values})


def test_requests_may_choose_what_the_operator_allows() -> None:
    settings = limited(
        params={"window_size": 16},
        request_policies="keydiff, none",
        min_request_budget="0.1",
        max_request_budget=0.5,
        reuse_contexts=True,
        reuse_conversations="anew",
        attention="own",
    )
    assert settings.policies == ("adakv", "keydiff")
    assert Settings.from_dict(settings.to_dict()) == settings
    assert settings.for_request(RequestOptions()) == settings
    assert settings.for_request(RequestOptions(policy="adakv", budget=0.5)).params == {
        "window_size": 16
    }
    other = settings.for_request(RequestOptions(policy="keydiff", budget=0.1))
    assert (other.policy, other.budget, other.params) == ("keydiff", 0.1, {})
    assert not settings.for_request(RequestOptions(policy="none")).compresses
    with pytest.raises(ConfigError, match="allows adakv and keydiff and none; choose one"):
        settings.for_request(RequestOptions(policy="snapkv"))
    with pytest.raises(ConfigError, match=r"kv_budget 0\.51: this server allows 0\.1 to 0\.5"):
        settings.for_request(RequestOptions(budget=0.51))
    with pytest.raises(ConfigError, match=r"kv_budget 0\.3: this server lets no request choose"):
        limited(request_policies=["none"]).for_request(RequestOptions(policy="none", budget=0.3))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"min_request_budget": 0.1}, "expected both"),
        ({"min_request_budget": 0.5, "max_request_budget": 0.1}, "in this order"),
        ({"min_request_budget": 100, "max_request_budget": 200}, "as fractions"),
        ({"min_request_budget": 0, "max_request_budget": 0.5}, "expected a budget: a fraction"),
        ({"reuse_conversations": True}, "should be 'reuse', 'anew', 'auto' or 'off', found True"),
        ({"attention": "xformers"}, "should be 'auto', 'flash', 'triton' or 'own', found 'xform"),
    ],
)
def test_limits_of_requests_that_cannot_work(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        limited(**values)


@pytest.mark.parametrize(
    ("values", "may"),
    [
        ({}, True),
        ({"policy": "none"}, False),
        ({"budget": 1.0}, False),
        ({"policy": "none", "request_policies": ["none"]}, False),
        ({"policy": "none", "request_policies": ["snapkv"]}, True),
        ({"budget": 1.0, "request_policies": ["snapkv"]}, False),
        ({"budget": 1.0, "min_request_budget": 0.5, "max_request_budget": 1.0}, True),
        ({"policy": "none", "min_request_budget": 0.5, "max_request_budget": 1.0}, False),
    ],
)
def test_a_server_may_compress_what_requests_ask_for(values: dict[str, object], may: bool) -> None:
    assert limited(**values).may_compress == may


def test_what_is_left_whole_has_no_events() -> None:
    rule = Settings(policy="none", budget=0.25, trigger="chunk:64,decode:32").rule(
        32, PolicyDemand(window_size=32)
    )
    assert rule.next_position(1000, 0) is None
    assert rule.admission_blocks(1000) == rule.held_blocks(1000) == 32


def test_auto_is_the_default_policy_wherever_one_is_named() -> None:
    for measures, default in ((True, PROFILED_POLICY), (False, DEFAULT_POLICY)):
        more: dict[str, Any] = {"measure_heads": measures}
        settings = Settings(policy="auto", request_policies=("snapkv", "auto"), **more)
        assert settings.policy == default
        assert settings.request_policies == ("snapkv", default)
        other = Settings(policy="keydiff", request_policies=("auto",), **more)
        assert other.for_request(RequestOptions(policy="auto")).policy == default
        with pytest.raises(ConfigError, match=rf'policy "{re.escape(default)}": this server allow'):
            Settings(policy="snapkv", **more).for_request(RequestOptions(policy="auto"))
    assert resolve("auto").name == DEFAULT_POLICY


@pytest.mark.parametrize(
    ("budget", "policy"),
    [
        (1.0, PROFILED_POLICY),
        (PROFILED_FROM, PROFILED_POLICY),
        (0.2499, PROFILED_POLICY_BELOW),
        (0.01, PROFILED_POLICY_BELOW),
        (2048, PROFILED_POLICY_IN_TOKENS),
    ],
)
def test_auto_with_measured_heads_depends_on_the_budget(budget: float | int, policy: str) -> None:
    settings = Settings(policy="auto", budget=budget, request_policies=("auto", "keydiff"))
    assert settings.policy == policy
    assert settings.request_policies == (policy, "keydiff")
    assert Settings.from_dict(settings.to_dict()) == settings
    alone = Settings(policy="auto", budget=budget, measure_heads=False)
    assert alone.policy == DEFAULT_POLICY


@pytest.mark.parametrize("budget", [0.5, 0.1])
def test_a_request_for_auto_has_the_policy_and_file_of_the_servers_auto(budget: float) -> None:
    more: dict[str, Any] = {"profile": "heads.json", "measure_heads": False, "budget": budget}
    settings = Settings(policy="auto", request_policies=("auto",), **more)
    asked = settings.for_request(RequestOptions(policy="auto"))
    assert (asked.policy, asked.profile) == (settings.policy, "heads.json")


def test_auto_alone_leaves_prompts_of_short_answers_whole() -> None:
    assert Settings(policy="auto").min_answer_tokens == AUTO_MIN_ANSWER_TOKENS == 64
    assert Settings(policy="auto", min_answer_tokens=0).min_answer_tokens == 0
    assert Settings(policy="spans").min_answer_tokens == 0
    asked = Settings(policy="auto", request_policies=("snapkv",))
    assert asked.for_request(RequestOptions(policy="snapkv")).min_answer_tokens == 0
    assert asked.for_request(RequestOptions()).min_answer_tokens == 64
    assert Settings.from_dict(asked.to_dict()) == asked


def test_conversations_go_on_compressed_by_themselves_where_that_was_measured() -> None:
    base: dict[str, Any] = {"policy": "auto", "budget": 0.25}
    settings = Settings(**base)
    assert settings.continues_unasked
    assert settings.repeats
    assert settings.conversations is None
    assert Settings.from_dict(settings.to_dict()) == settings
    for others in (
        {"budget": 0.2},
        {"budget": 256},
        {"budget": 1.0},
        {"trigger": "prompt,decode:64"},
        {"measure_heads": False},
        {"reuse_conversations": "off"},
        {"reuse_conversations": "anew"},
        {"prompts": {"compressor": "llmlingua2:some/model"}},
    ):
        other = Settings(**base | others)
        assert not other.continues_unasked, others
        asked = others.get("reuse_conversations")
        assert other.conversations == (None if asked == "off" else asked), others
    limits: dict[str, Any] = {"min_request_budget": 0.1, "max_request_budget": 0.5}
    requests = Settings(**base, request_policies=("adakv",), **limits)
    assert not requests.for_request(RequestOptions(policy="adakv")).continues_unasked
    assert not requests.for_request(RequestOptions(budget=0.1)).continues_unasked


def test_auto_reads_a_profile_of_its_own() -> None:
    """Where heads were measured it stands for what uses that; not beside another policy's file."""
    more: dict[str, Any] = {"profile": "heads.json", "measure_heads": False}
    settings = Settings(policy="auto", request_policies=("auto", "snapkv"), **more)
    assert settings.policy == PROFILED_POLICY
    assert settings.request_policies == (PROFILED_POLICY, "snapkv")
    assert settings.for_request(RequestOptions(policy="auto")).profile == "heads.json"
    other = Settings(policy="headkv", request_policies=("auto",), **more)
    assert other.for_request(RequestOptions(policy="auto")).policy == DEFAULT_POLICY
    assert other.for_request(RequestOptions(policy="auto")).profile is None
    assert Settings.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"protect": ["system"], "read": "quest:0.5"}, ("--kv-protect", "--kv-read")),
        (
            {"keep_prompt": 0.25, "ceiling": 512, "reuse_conversations": "anew"},
            ("--kv-keep-prompt", "--kv-reuse-conversations"),
        ),
    ],
)
def test_refusals_of_protection_name_both_options(
    settings: dict[str, Any], options: tuple[str, str]
) -> None:
    own, other = options
    with pytest.raises(ConfigError, match=rf"\({own}\): expected no {other} beside it"):
        Settings.from_dict({"policy": "spans", **settings})
