"""`vllm-kvcompress policies`: lists the policies, and explains policy strings."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_kvcompress.config.auto import (
    AUTO,
    DEFAULT_POLICY,
    MEASURING_PART,
    PROFILED_FROM,
    PROFILED_POLICY,
    PROFILED_POLICY_BELOW,
    PROFILED_POLICY_IN_TOKENS,
    named_policy,
)
from vllm_kvcompress.scheduling.protocols import protocol_of

if TYPE_CHECKING:
    from vllm_kvcompress.policies import Part
    from vllm_kvcompress.policies.parts.parameters import Parameter

_UNIFORM = "the same for every layer and head"
_WIDTH = 100
_AUTO = (
    f"auto stands for {PROFILED_POLICY}; with less than {PROFILED_FROM} of the prompt for "
    f"{PROFILED_POLICY_BELOW}, with a budget in tokens for {PROFILED_POLICY_IN_TOKENS}; without "
    f"measured heads for {DEFAULT_POLICY}\n"
)
_SAVINGS = (
    ("memory", "a policy, this one too: what it evicts or merges frees blocks of the KV cache"),
    ("reading", "--kv-read: decode steps read a part of what is held; nothing is freed"),
    ("prefill", "--prompt-compressor: messages of chats are shortened before they are read"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options, and the action `explain`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    actions = parser.add_subparsers(metavar="ACTION")
    explain = actions.add_parser("explain", help="show what a policy string does, stage by stage")
    explain.add_argument("policy", metavar="POLICY", help="auto, or such as adakv+criticalkv")
    # SUPPRESS: `policies --json explain P` must not be undone by this one's default.
    explain.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
    )
    explain.set_defaults(func=_run_explain)


def run(arguments: argparse.Namespace) -> int:
    """Prints all policies and their parameters."""
    from vllm_kvcompress.policies import Modifier, all_policies

    infos = all_policies()
    if arguments.json:
        print(json.dumps([_as_json(info) for info in infos], indent=2))
        return 0
    print("Policies (--kv-policy NAME); add modifiers with +, such as adakv+criticalkv")
    print(_AUTO)
    print("\n\n".join(_described(info) for info in infos if not issubclass(info, Modifier)))
    print("\nModifiers\n")
    print("\n\n".join(_described(info) for info in infos if issubclass(info, Modifier)))
    return 0


def _run_explain(arguments: argparse.Namespace) -> int:
    from vllm_kvcompress.policies import describe

    parts = describe(named_policy(arguments.policy, has_heads=True))
    stages = pipeline_stages(parts)
    if arguments.json:
        print(json.dumps(_explained_json(parts, stages), indent=2))
        return 0
    described = "+".join(part.name for part in parts)
    if arguments.policy == AUTO:
        print(_AUTO)
    print(described)
    print("\nstages")
    print(_table([(name, part or "(default)", does) for name, part, does in stages]))
    rows = [(p.name, str(p.default), _meaning(p)) for part in parts for p in part.parameters()]
    if rows:
        print("\nparameters, with defaults (--kv-param NAME=VALUE)")
        print(_table(rows))
    for part in parts:
        if part.profile is not None:
            print(f"\n{part.name} needs {_profile(part)}")
    if (protocol := protocol_of(described)) is not None:
        budget = "any" if protocol.budget is None else f"{protocol.budget} tokens per KV head"
        print("\nas in the paper (--kv-trigger paper)")
        print(_table([("trigger", protocol.trigger), ("budget", budget)]))
    print("\npapers")
    print(_table([(part.name, part.paper) for part in parts]))
    print("\nwhat saves what")
    print(_table(_SAVINGS))
    return 0


def pipeline_stages(parts: Sequence[type[Part]]) -> list[tuple[str, str, str]]:
    """Returns name, deciding part (empty for the default) and what happens, by stage in order.

    A modifier replaces stages of the policy that it modifies.
    """
    decided = {"allocate": ("", _UNIFORM)}
    for part in parts:
        for name, does in part.stages.non_empty().items():
            decided[name] = (part.name, does)
    return [(name, *decided[name]) for name in parts[0].stages._fields if name in decided]


def _described(info: type[Part]) -> str:
    from vllm_kvcompress.policies import bases_of

    lines = [f"{info.name}  {info.summary}", f"  {info.paper}"]
    if bases := bases_of(info):
        lines.append(f"  goes on {', '.join(bases)}")
    if info.profile is not None:
        lines.append(f"  needs {_profile(info)}")
    rows = [(p.name, str(p.default), _meaning(p)) for p in info.parameters()]
    return "\n".join([*lines, *([_table(rows, indent="    ")] if rows else [])])


def _profile(part: type[Part]) -> str:
    """Says which file a part reads, and whether an engine can do without."""
    measured = ", or heads that the engine measures" if part.profile == MEASURING_PART else ""
    return f"a {part.profile} file: --kv-profile FILE{measured}"


def _meaning(parameter: Parameter) -> str:
    """A parameter's meaning with the valid values, unless it names them itself."""
    missing = [choice for choice in parameter.choices if choice not in parameter.meaning]
    if missing:
        return f"{parameter.meaning} ({', '.join(parameter.choices)})"
    low, high = parameter.minimum, parameter.maximum
    if low is not None and high is not None:
        return f"{parameter.meaning} ({low:g} to {high:g})"
    return parameter.meaning if low is None else f"{parameter.meaning} (at least {low:g})"


def _table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> str:
    """Formats rows in columns; the last column is wrapped."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(line for row in rows for line in _wrapped_row(row, widths, indent))


def _wrapped_row(row: tuple[str, ...], widths: list[int], indent: str) -> Iterator[str]:
    head = indent + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
    for index, text in enumerate(textwrap.wrap(row[-1], max(30, _WIDTH - len(head)))):
        yield (head if index == 0 else " " * len(head)) + text


def _as_json(info: type[Part]) -> dict[str, Any]:
    from vllm_kvcompress.policies import Modifier, bases_of

    return {
        "name": info.name,
        "kind": "modifier" if issubclass(info, Modifier) else "policy",
        "summary": info.summary,
        "paper": info.paper,
        "stages": info.stages.non_empty(),
        "parameters": [asdict(parameter) for parameter in info.parameters()],
        "modifies": list(bases_of(info)),
        "profile": info.profile,
    }


def _explained_json(
    parts: Sequence[type[Part]], stages: Sequence[tuple[str, str, str]]
) -> dict[str, Any]:
    described = "+".join(part.name for part in parts)
    protocol = protocol_of(described)
    return {
        "policy": described,
        "protocol": None if protocol is None else protocol._asdict(),
        "stages": [dict(zip(("stage", "part", "does"), stage, strict=True)) for stage in stages],
        "parts": [_as_json(part) for part in parts],
    }
