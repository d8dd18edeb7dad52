"""The options of `serve` that make prompts shorter."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_kvcompress.cli.vllm_command import json_or_text
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.settings import (
    DEFAULT_MIN_TOKENS,
    DEFAULT_RATE,
    METHOD,
    REQUEST_RATE,
    ROLES,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the group."""
    group = parser.add_argument_group(
        "shorter prompts", "Less to read before the first token; works without --kv-policy, too."
    )
    group.add_argument(
        "--prompt-compressor",
        metavar="C",
        help=f"shorten the messages of chats with {METHOD}:MODEL, a token classifier's folder or "
        "name; system prompts, the last question and tools stay whole",
    )
    group.add_argument(
        "--prompt-rate",
        metavar="R",
        help=f"kept fraction of a text's tokens (default {DEFAULT_RATE}; 1.0: all)",
    )
    group.add_argument(
        "--prompt-target-tokens",
        metavar="N",
        help="instead of a rate: tokens that the texts of a request come down to, together",
    )
    group.add_argument(
        "--prompt-role-rate",
        metavar="ROLE=R",
        action="append",
        default=[],
        help=f"another rate for the texts of {', '.join(ROLES)}; may be repeated",
    )
    group.add_argument(
        "--prompt-force-token",
        metavar="TEXT",
        action="append",
        default=[],
        help=r"keep this text wherever it stands, such as . or \n; may be repeated",
    )
    group.add_argument(
        "--prompt-min-tokens",
        metavar="N",
        help=f"leave texts with fewer tokens alone (default {DEFAULT_MIN_TOKENS})",
    )
    for bound in ("min", "max"):
        group.add_argument(
            f"--prompt-{bound}-request-rate",
            metavar="R",
            help=f"{bound}imum rate that a request may ask for, with vllm_xargs {REQUEST_RATE}",
        )
    group.add_argument(
        "--prompt-device", metavar="D", help="where the classifier runs (default cpu)"
    )


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """What was given, by its key in `PromptSettings.from_dict`.

    Raises:
        ConfigError: a role's rate that is none.
    """
    numbers = ("rate", "target_tokens", "min_tokens", "min_request_rate", "max_request_rate")
    values: dict[str, Any] = {}
    for key in ("compressor", "device", *numbers):
        text = getattr(namespace, f"prompt_{key}")
        if text is not None:
            values[key] = json_or_text(text) if key in numbers else text
    if namespace.prompt_role_rate:
        values["roles"] = dict(map(_role_rate, namespace.prompt_role_rate))
    if namespace.prompt_force_token:
        values["force_tokens"] = [
            text.replace("\\n", "\n").replace("\\t", "\t") for text in namespace.prompt_force_token
        ]
    return values


def _role_rate(text: str) -> tuple[str, Any]:
    role, equals, rate = text.partition("=")
    if not role or not equals:
        raise ConfigError(
            f"--prompt-role-rate {text}: expected ROLE=RATE, such as tool=0.3; roles are "
            f"{', '.join(ROLES)}."
        )
    return role, json_or_text(rate)
