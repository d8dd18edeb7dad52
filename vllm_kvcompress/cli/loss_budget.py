"""Turns `--kv-budget loss:F` into fractions of prompts by their lengths, by a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

from vllm_kvcompress.config.auto import AUTO, NO_POLICY, PROFILED_FROM
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.budgets import parse_loss
from vllm_kvcompress.tools.calibration.record import (
    WHOLE,
    Calibration,
    calibrate_command,
    conditions_of,
    file_name,
)

_UNMEASURED = ("ceiling", "after_reasoning", "keep_prompt", "read")  # calibrations have none


def resolve_budget(settings: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Returns settings whose budgets are fractions or tokens.

    Requests shorter than the texts of the calibration, or of its first length at which anything may
    be compressed, are left whole unless `min_tokens` is given.

    Args:
        settings: by their keys in YAML, with a policy.
        model: what is served; "" where that is any model, of random weights.

    Raises:
        ConfigError: there is no calibration, or it is of something else.
    """
    limit = parse_loss(settings.get("budget"))
    if limit is None:
        if settings.get("calibration") is not None:
            raise ConfigError(
                f"calibration {settings['calibration']}: expected a budget by loss beside it, such "
                f"as loss:0.02, found {settings.get('budget')}; give one, or leave it out."
            )
        return dict(settings)
    if settings.get("policy") == NO_POLICY:
        raise ConfigError(
            f"budget loss:{limit:g}: expected a policy, found {NO_POLICY}, which loses nothing; "
            "give one, such as auto."
        )
    for name in _UNMEASURED:
        if settings.get(name):
            raise ConfigError(
                f"budget loss:{limit:g}: a calibration measures no {name} ({Settings.flag(name)}); "
                "leave it out, or give a budget such as 0.25."
            )
    calibration, path = _calibration_of(settings, model)
    budgets = _by_length(calibration, limit)
    lengths = list(dropwhile(lambda length: budgets[length] == WHOLE, budgets)) or [max(budgets)]
    first, *longer = ((length, budgets[length]) for length in lengths)
    resolved = dict(settings) | {"budget": first[1], "promised_loss": limit}
    resolved["calibration"] = str(path)
    if longer:
        resolved["longer_budgets"] = dict(longer)
    if resolved.get("min_tokens") is None:
        resolved["min_tokens"] = first[0]
    if first[1] == WHOLE:  # every answer has the full cache
        resolved["shadow"] = None
    return resolved


def _by_length(calibration: Calibration, limit: float) -> dict[int, float]:
    """The budgets of a limit, on one side of `PROFILED_FROM`, where `auto` is one policy."""
    budgets = calibration.by_length(limit)
    is_below = {budget < PROFILED_FROM for budget in budgets.values() if budget < WHOLE}
    if calibration.policy == AUTO and len(is_below) > 1:
        return calibration.by_length(limit, lowest=PROFILED_FROM)
    return budgets


def _calibration_of(settings: Mapping[str, Any], model: str) -> tuple[Calibration, Path]:
    policy, conditions = str(settings.get("policy", AUTO)), conditions_of(settings, model)
    given = settings.get("calibration")
    if given is None and not model:
        raise ConfigError(
            f"budget {settings['budget']}: a model with random weights has no calibration; give "
            "another one's with --kv-calibration, or a budget such as 0.25."
        )
    path = Path(given) if given is not None else default_file(model, policy, conditions)
    if given is None and not path.is_file():
        raise ConfigError(
            f"budget {settings['budget']}: no calibration of {model} with policy {policy} and "
            f"these settings, expected {path}; make one with `{calibrate_command(model, policy)}`, "
            "or name one with --kv-calibration."
        )
    calibration = Calibration.read(path)
    calibration.check(model, policy, conditions, path)
    return calibration, path


def default_file(model: str, policy: str, conditions: Mapping[str, Any]) -> Path:
    """Returns where a calibration is kept unless another file is named: in vLLM's cache folder."""
    from vllm import envs

    folder = Path(envs.VLLM_CACHE_ROOT) / "kvcompress" / "calibration"
    return folder / file_name(model, policy, conditions)
