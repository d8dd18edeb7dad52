"""Each option's flag, key, refusal and docs row follow from one field."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from option_tables import PAGE, with_tables
from vllm_kvcompress.cli import serve
from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import Options
from vllm_kvcompress.prompts.settings import PromptRequestOptions, PromptSettings

NEEDED: dict[type[Options], dict[str, Any]] = {
    Settings: {"policy": "snapkv"},
    PromptSettings: {"compressor": "llmlingua2:m"},
    RequestOptions: {"context_tokens": 9},
    PromptRequestOptions: {},
}
FIELDS = [(options, name) for options in NEEDED for name in options.model_fields]
# What users wrote before options had fields of models, and deployments still write.
FLAGS = {
    *(
        "--kv-policy",
        "--kv-budget",
        "--kv-longer-budget",
        "--kv-trigger",
        "--kv-param",
        "--kv-profile",
    ),
    *(
        "--kv-min-tokens",
        "--kv-min-answer-tokens",
        "--kv-allow-request-policies",
        "--kv-min-request-budget",
    ),
    "--no-kv-measure-heads",
    *(
        "--kv-ceiling",
        "--kv-min-request-ceiling",
        "--kv-protect",
        "--kv-protect-mode",
        "--kv-keep-prompt",
    ),
    "--kv-after-reasoning",
    *("--kv-max-request-budget", "--kv-reuse-contexts", "--kv-reuse-conversations", "--kv-read"),
    "--kv-spill",
    *("--kv-read-min-tokens", "--kv-min-request-read", "--kv-attention", "--kv-shadow"),
    "--kv-draft",
    *("--kv-calibration", "--kv-promised-loss"),
    "--prompt-compressor",
    *("--prompt-rate", "--prompt-target-tokens", "--prompt-role-rate", "--prompt-force-token"),
    *("--prompt-min-tokens", "--prompt-min-request-rate", "--prompt-max-request-rate"),
    *("--prompt-device", "--no-kv-status-page", "--config", "--print-vllm-command"),
}


def rows() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


def test_flags_are_those_that_users_know() -> None:
    shown = re.findall(r"^  (--[a-z-]+)", serve.options_parser().format_help(), re.MULTILINE)
    assert set(shown) == FLAGS
    assert len(shown) == len(FLAGS)


def test_the_docs_tables_are_those_of_the_fields() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "write them anew: python scripts/release/option_tables.py"
    assert with_tables(page.replace("| `policy` |", "| `police` |")) == page


@pytest.mark.parametrize(("options", "name"), FIELDS)
def test_each_option_has_one_row_in_the_docs(options: type[Options], name: str) -> None:
    key = rf"`{options.prefix}{name}\b"
    begins = rf"\| {key}"
    if options.flags:
        flag = f"`{options.flag(name)}[^|]*" if name != "prompts" else " "
        begins = rf"\| {flag}\| {key}` \|"
    assert sum(bool(re.match(begins, row)) for row in rows()) == 1


@pytest.mark.parametrize(("options", "name"), FIELDS)
def test_a_wrong_value_is_refused_under_the_options_own_name(
    options: type[Options], name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        options.from_dict({**NEEDED[options], name: {"no": ["such", "value"]}})
    assert f"{options.prefix}{name}" in str(caught.value)
    if options.flags and name != "prompts":
        assert options.flag(name) in str(caught.value)


# By option: what stands where none is given, values that are taken, and values that are not.
VALUES: dict[tuple[type[Options], str], tuple[Any, list[Any], list[Any]]] = {
    (Settings, "budget"): (0.5, [0.1, 1.0, 2, 2048], [0, 1, 1.5, -1, True, 2**53 + 1]),
    (Settings, "longer_budgets"): (
        {},
        [{4096: 0.25}, {1: 1.0}],
        [{0: 0.5}, {4096: 1.5}, {4096: "x"}, {"4k": 0.5}, {-1: 0.5}, {2**54: 0.5}, 4],
    ),
    (Settings, "trigger"): ("prompt", ["chunk:9,decode:2"], ["now", "chunk,chunk", 3]),
    (Settings, "ceiling"): (None, [512, 2**53], [0, 0.5, 1.0, True, "7", 200, 2**53 + 1]),
    (Settings, "protect"): ((), [("system", "tools")], [5, ["user"]]),
    (Settings, "protect_mode"): ("whole", ["whole", "fair"], ["all", 1]),
    (Settings, "keep_prompt"): (None, [0.25, 1.0], ["yes", 0.0, 1.5]),
    (Settings, "after_reasoning"): (None, [0, 0.25], [-0.1, 1, True, "7"]),
    (Settings, "params"): ({}, [{"a": 1, "b": "x", "c": True}], [{"a": [1]}, {"a": math.inf}, 3]),
    (Settings, "profile"): (None, ["heads.json"], [3]),
    (Settings, "measure_heads"): (True, [False], ["no", 0]),
    (Settings, "min_tokens"): (256, [0, 2**53], [-1, 2**53 + 1, 1.5, True, "7"]),
    (Settings, "min_answer_tokens"): (0, [0, 2**53], [-1, 2**53 + 1, 1.5, True, "7"]),
    (Settings, "request_policies"): ((), [("snapkv", "keydiff")], [5, [5]]),
    (Settings, "min_request_budget"): (None, [0.1], [0, 1.5, True, 100]),
    (Settings, "max_request_budget"): (None, [1.0], [0, 1.5, True, 0.1]),
    (Settings, "min_request_ceiling"): (None, [1, 1024], [0, 0.5, True, 1025]),
    (Settings, "reuse_contexts"): (False, [True], ["yes", 1]),
    (Settings, "reuse_conversations"): (None, ["reuse", "anew", "auto", "off"], ["always", True]),
    (Settings, "spill"): (None, [0.5, 4], [0, -1, True, "4"]),
    (Settings, "read"): (None, ["quest:0.5", "longcache"], ["half", 0.5]),
    (Settings, "read_min_tokens"): (None, [0, 2**53], [-1, 1.5, True]),
    (Settings, "min_request_read"): (None, [0.01, 1.0], [0, 1.01, True, "0.5"]),
    (Settings, "draft"): (None, ["quest:0.1", "longcache"], ["half", 0.5, "longcache:prefill=512"]),
    (Settings, "attention"): ("auto", ["flash", "triton", "own"], ["xformers"]),
    (Settings, "calibration"): (None, ["losses.json"], [3]),
    (Settings, "promised_loss"): (None, [0.02, 1], [0, -0.1, True, "0.02"]),
    (Settings, "shadow"): (0.0, [0.01, 1.0], [-0.1, 1.01, True, "0.5"]),
    (PromptSettings, "rate"): (0.5, [0.01, 1.0], [0.009, 1.1, True, "0.5"]),
    (PromptSettings, "target_tokens"): (None, [1], [0, 1.5, True]),
    (PromptSettings, "roles"): ({}, [{"tool": 0.3}], [{"robot": 0.5}, {"tool": 2}]),
    (PromptSettings, "force_tokens"): ((), [(".", "x")], [[""], ["."] * 101, 3]),
    (PromptSettings, "min_tokens"): (64, [0], [-1, True]),
    (PromptSettings, "min_request_rate"): (None, [0.01, 0.3], [0, 0.9]),
    (PromptSettings, "max_request_rate"): (None, [0.5, 1.0], [1.1, 0.2]),
    (PromptSettings, "device"): ("cpu", ["cuda:1"], ["", 1]),
    (RequestOptions, "context_tokens"): (None, [1, 10.0], [0, 2.5, "10", True]),
    (RequestOptions, "prepare"): (False, [True, 1], [2, 1.0, "yes"]),
    (RequestOptions, "policy"): (None, ["none"], [3]),
    (RequestOptions, "budget"): (None, [0.01, 1], [0, 1.1, "0.5", True]),
    (RequestOptions, "ceiling"): (None, [1, 512.0], [0, 0.5, "512", True]),
    (RequestOptions, "protect"): ((), [((0, 5), (7, 9))], [5, [5], [9, 5], ["0", "5"]]),
    (RequestOptions, "read"): (None, [0.01, 1], [0, 1.1, "0.5", True]),
    (PromptRequestOptions, "rate"): (None, [0.01, 1], [0, 1.1, "half", True]),
}
BESIDE: dict[str, Any] = {"read": "quest:0.5"}
BESIDE |= {"min_request_budget": 0.2, "max_request_budget": 0.5}
BESIDE |= {"ceiling": 1024, "min_request_ceiling": 256}
BESIDE |= {"reuse_contexts": True}
EXCLUDES = {"spill": "read", "keep_prompt": "read", "protect": "read", "after_reasoning": "read"}
BESIDE_RATES = {"min_request_rate": 0.3, "max_request_rate": 0.5}


def test_every_option_that_may_be_left_out_has_values() -> None:
    required = {(Settings, "policy"), (PromptSettings, "compressor"), (Settings, "prompts")}
    assert set(VALUES) == set(FIELDS) - required


@pytest.mark.parametrize(("options", "name"), VALUES)
def test_options_have_their_defaults_and_bounds(options: type[Options], name: str) -> None:
    default, taken, refused = VALUES[options, name]
    needed = {key: value for key, value in NEEDED[options].items() if key != name}
    assert getattr(options.from_dict({**needed, name: None}), name) == default
    beside = dict(NEEDED[options])
    beside |= {Settings: BESIDE, PromptSettings: BESIDE_RATES}.get(options, {})
    beside.pop(EXCLUDES.get(name, ""), None)
    for value in taken:
        assert getattr(options.from_dict({**beside, name: value}), name) == value
    for value in refused:
        with pytest.raises(ConfigError):
            options.from_dict({**beside, name: value})
