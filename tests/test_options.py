"""One field states an option: its flag, key, refusal and row of the docs follow from it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from option_tables import PAGE, with_tables
from vllm_kvcompress.cli import serve
from vllm_kvcompress.config import RequestOptions, Settings
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
    *("--kv-policy", "--kv-budget", "--kv-trigger", "--kv-param", "--kv-profile"),
    *("--kv-min-tokens", "--kv-allow-request-policies", "--kv-min-request-budget"),
    *("--kv-max-request-budget", "--kv-reuse-contexts", "--kv-reuse-conversations", "--kv-read"),
    *("--kv-read-min-tokens", "--kv-min-request-read", "--kv-attention", "--prompt-compressor"),
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


@pytest.mark.parametrize(("options", "name"), FIELDS)
def test_none_is_the_default(options: type[Options], name: str) -> None:
    if not options.model_fields[name].is_required():
        given = {**NEEDED[options], name: None}
        expected = {key: value for key, value in given.items() if value is not None}
        assert options.from_dict(given) == options.from_dict(expected)
