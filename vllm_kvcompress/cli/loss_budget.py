"""Turns `--kv-budget loss:F` into a fraction of the prompt, by a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvcompress.config import AUTO, NO_POLICY, Settings
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
    """Returns settings whose budget is a fraction or tokens.

    Requests shorter than the texts of the calibration are left whole unless `min_tokens` is given.

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
    budget = calibration.budget(limit)
    resolved = dict(settings) | {"budget": budget, "promised_loss": limit}
    resolved["calibration"] = str(path)
    if resolved.get("min_tokens") is None:
        resolved["min_tokens"] = calibration.length
    if budget == WHOLE:  # every answer has the full cache
        resolved["shadow"] = None
    return resolved


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
