"""The options of `serve` that compress the KV cache, or read a part of it."""

from __future__ import annotations

import argparse

from vllm_kvcompress.cli.vllm_command import json_or_text
from vllm_kvcompress.config import (
    DEFAULT_BUDGET,
    DEFAULT_MIN_TOKENS,
    DEFAULT_POLICY,
    PROFILED_POLICY,
    Scalar,
)
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.read_rule import DEFAULT_MIN_TOKENS as DEFAULT_READ_MIN_TOKENS
from vllm_kvcompress.scheduling.triggers import parse_number

_MOST_DIGITS = 15  # of a number of tokens


def add_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the group, and returns it."""
    group = parser.add_argument_group("KV cache compression")
    _add_policy_options(group)
    _add_request_options(group)
    _add_reading_options(group)
    _add_gpu_options(group)
    return group


def given(namespace: argparse.Namespace) -> dict[str, object]:
    """What was given, by its key in `Settings.from_dict`.

    Raises:
        ConfigError: a parameter without name or value, or no number where there must be one.
    """
    values: dict[str, object] = {
        "policy": namespace.kv_policy,
        "budget": namespace.kv_budget,
        "trigger": namespace.kv_trigger,
        "profile": namespace.kv_profile,
        "min_tokens": _count("--kv-min-tokens", namespace.kv_min_tokens),
        "params": dict(map(policy_param, namespace.kv_param)) or None,
        "request_policies": namespace.kv_allow_request_policies,
        "min_request_budget": namespace.kv_min_request_budget,
        "max_request_budget": namespace.kv_max_request_budget,
        "reuse_contexts": namespace.kv_reuse_contexts,
        "reuse_conversations": namespace.kv_reuse_conversations,
        "attention": namespace.kv_attention,
        "read": namespace.kv_read,
        "read_min_tokens": _count("--kv-read-min-tokens", namespace.kv_read_min_tokens),
        "min_request_read": _number(namespace.kv_min_request_read),
    }
    return {key: value for key, value in values.items() if value is not None}


def _add_policy_options(group: argparse._ArgumentGroup) -> None:
    """What is kept, how much of it, and when."""
    group.add_argument(
        "--kv-policy",
        metavar="P",
        help=f"what to keep: auto ({DEFAULT_POLICY}; with a profile {PROFILED_POLICY}), or parts "
        "joined by +, such as adakv+criticalkv (`vllm-kvcompress policies` lists them); none: "
        "stock vLLM",
    )
    group.add_argument(
        "--kv-budget",
        metavar="B",
        help="how much to keep: a fraction of the prompt such as 0.25 (1.0: all), or tokens per "
        f"KV head such as 2048, in the mean over heads and layers (default {DEFAULT_BUDGET})",
    )
    group.add_argument(
        "--kv-trigger",
        metavar="T",
        help="when: prompt (default: when the prompt has been read), chunk or chunk:N (while it "
        "is being read, so that memory stays bounded), decode:N (every N generated tokens), "
        "pressure:0.9 (only while the pool is fuller than that, or a request waits for room); "
        "joined by commas",
    )
    group.add_argument(
        "--kv-param",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a parameter of the policy, such as window_size=64; may be repeated",
    )
    group.add_argument(
        "--kv-profile",
        metavar="FILE",
        help="measured heads for auto and headkv, or pattern file for duoattention "
        "(`vllm-kvcompress profile` makes one; auto finds the one in the model's directory)",
    )
    group.add_argument(
        "--kv-min-tokens",
        metavar="N",
        help="leave requests alone while they have fewer tokens than this "
        f"(default {DEFAULT_MIN_TOKENS})",
    )


def _add_reading_options(group: argparse._ArgumentGroup) -> None:
    """How much decode steps read of what is held, with a policy or without one."""
    group.add_argument(
        "--kv-read",
        metavar="R",
        help="have decode steps read a part of what is held: quest:0.25 of each head's pages, or "
        "quest:2048 tokens of it; longcache, or longcache:global=32,local=4096,span=32,top=64: the "
        "first and last tokens and the best spans, with prefill=512 also for prompts; frees no "
        "memory; works without --kv-policy, too",
    )
    group.add_argument(
        "--kv-read-min-tokens",
        metavar="N",
        help=f"read everything of requests with fewer tokens (default {DEFAULT_READ_MIN_TOKENS})",
    )
    group.add_argument(
        "--kv-min-request-read",
        metavar="F",
        help="minimum fraction that a request may ask for instead, with vllm_xargs kv_read; up to "
        "1.0, which reads everything",
    )


def _add_gpu_options(group: argparse._ArgumentGroup) -> None:
    """What there is to choose on GPUs alone."""
    group.add_argument(
        "--kv-attention",
        metavar="K",
        help="kernels for attention on GPUs: flash or triton (vLLM's), own (this package's, for "
        "compressed requests, and with CUDA graphs of whole decode steps), or auto (default): own "
        "where it gives such graphs, else vLLM's",
    )


def _add_request_options(group: argparse._ArgumentGroup) -> None:
    """What single requests may do."""
    group.add_argument(
        "--kv-allow-request-policies",
        metavar="P,...",
        help="policies that a request may ask for instead, with vllm_xargs kv_policy; none: to "
        "be left whole",
    )
    for bound in ("min", "max"):
        group.add_argument(
            f"--kv-{bound}-request-budget",
            metavar="B",
            help=f"{bound}imum fraction that a request may ask for, with vllm_xargs kv_budget",
        )
    group.add_argument(
        "--kv-reuse-contexts",
        action="store_const",
        const=True,
        help="keep contexts that requests name with vllm_xargs kv_context_tokens, compressed, for "
        "later requests about the same one",
    )
    group.add_argument(
        "--kv-reuse-conversations",
        metavar="HOW",
        nargs="?",
        const="auto",
        help="keep what requests leave, compressed, for the next turn of their conversation; where "
        "the prefix cache has its beginning too: reuse (go on from what is kept), anew (compress "
        "the whole history together, so that the question decides) or auto (default)",
    )
    group.add_argument(
        "--no-kv-status-page",
        action="store_true",
        help="without the page at /kvcompress, which says what compression does",
    )


def policy_param(text: str) -> tuple[str, Scalar]:
    """A policy's parameter from NAME=VALUE.

    Raises:
        ConfigError: no name, or no value.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(
            f"--kv-param {text}: expected NAME=VALUE; write for example --kv-param window_size=64."
        )
    parsed = json_or_text(value)
    return name, parsed if isinstance(parsed, int | float | bool) else value


def _number(text: str | None) -> float | int | str | None:
    """A number if the text is one; the settings refuse all else."""
    return None if text is None else parse_number(text)


def _count(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigError(
            f"{flag} {text}: expected a number of tokens, at least 0; leave it out for the default."
        )
    return int(text)
