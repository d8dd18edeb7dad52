"""Which settings `vllm-kvcompress eval` compares, from its options."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.server_process import ROOT
from tests.policies.cases import headkv_file
from vllm_kvcompress.cli import eval as eval_command
from vllm_kvcompress.config.auto import (
    DEFAULT_POLICY,
    PROFILED_POLICY,
    PROFILED_POLICY_BELOW,
    PROFILED_POLICY_IN_TOKENS,
)
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError

MODEL = str(ROOT / "models" / "reference")


def plan_of(*more: str, model: str = MODEL) -> Any:
    parser = argparse.ArgumentParser()
    eval_command.add_options(parser)
    asked = parser.parse_args([model, "--tasks", "text/tables", "--out", "unused", *more])
    return eval_command.plan_of(asked)


def test_without_policies_and_budgets_half_is_kept_by_the_default() -> None:
    names = [setup.name for setup in plan_of().setups]
    assert names == ["full", f"{PROFILED_POLICY}@0.5"]
    names = [setup.name for setup in plan_of("--no-kv-measure-heads").setups]
    assert names == ["full", f"{DEFAULT_POLICY}@0.5"]


def test_auto_is_at_every_budget_what_serve_makes_of_it() -> None:
    plan = plan_of("--policies", "auto", "--budgets", "0.1,0.25,2048")
    below, in_tokens = PROFILED_POLICY_BELOW, PROFILED_POLICY_IN_TOKENS
    names = [setup.name for setup in plan.setups]
    assert names == ["full", f"{below}@0.1", f"{PROFILED_POLICY}@0.25", f"{in_tokens}@2048"]
    with pytest.raises(ConfigError, match="every one once"):
        plan_of("--policies", f"auto,{below}", "--budgets", "0.1,0.25")


@pytest.mark.parametrize("limit", [0, 64, None])
def test_short_questions_are_left_alone_as_serve_does(limit: int | None) -> None:
    """And 0 is a limit of its own."""
    more = [] if limit is None else ["--kv-min-tokens", str(limit)]
    plan = plan_of(*more)
    settings = Settings.from_dict(plan.setups[1].settings(plan.params) or {})
    assert settings.min_tokens == (256 if limit is None else limit)


def test_a_profile_is_for_those_that_read_one(tmp_path: Path) -> None:
    """Beside `auto`, which has it, others are compared as they are."""
    profile = str(headkv_file(tmp_path, 2, 4))
    plan = plan_of("--policies", "auto,snapkv", "--budgets", "0.25", "--kv-profile", profile)
    assert [setup.name for setup in plan.setups[1:]] == [f"{PROFILED_POLICY}@0.25", "snapkv@0.25"]
    given = [setup.settings(plan.params) or {} for setup in plan.setups[1:]]
    assert [settings.get("profile") for settings in given] == [profile, None]


def test_auto_finds_the_heads_in_the_models_folder(tmp_path: Path) -> None:
    headkv_file(tmp_path, 2, 4).rename(tmp_path / "kv_heads.json")
    shutil.copy(Path(MODEL) / "config.json", tmp_path)
    for name in Path(MODEL).glob("token*"):
        shutil.copy(name, tmp_path)
    for more in ([], ["--policies", "full", "--kv-read", "auto@0.5 quest:0.5"]):
        plan = plan_of(*more, model=str(tmp_path))
        assert plan.setups[1].policy == PROFILED_POLICY
        assert plan.params["profile"] == str(tmp_path / "kv_heads.json")
    assert plan_of().params["profile"] is None


def test_a_part_of_what_a_policy_keeps_is_read() -> None:
    asked = ("--policies", "full", "--kv-read", "auto@0.5 quest:0.5")
    for policy, more in ((PROFILED_POLICY, ()), (DEFAULT_POLICY, ("--no-kv-measure-heads",))):
        plan = plan_of(*asked, *more)
        assert [setup.name for setup in plan.setups] == ["full", f"{policy}@0.5 quest:0.5"]
        given = Settings.from_dict(plan.setups[1].settings(plan.params) or {})
        assert (given.policy, given.read, given.measure_heads) == (policy, "quest:0.5", not more)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ("spans quest:0.5", 'expected POLICY@BUDGET before.*found "spans"'),
        ("nosuch@0.5 quest:0.5", "nosuch"),
        ("spans@1.5 quest:0.5", "expected a budget.*found '1.5'"),
        ("spans@0.5 quest:2.5", "expected a fraction of at most 1.0"),
    ],
)
def test_what_cannot_be_read_is_refused(read: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of("--kv-read", read)
