"""`vllm-kvcompress serve`: `vllm serve` plus the options that switch compression on."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from vllm_kvcompress.cli import prompt_options
from vllm_kvcompress.cli.command_forms import FORMS, RAY, SHELL, PlainCommand
from vllm_kvcompress.cli.vllm_command import ServeRequest, json_or_text, option_values, read_request
from vllm_kvcompress.config import (
    DEFAULT_BUDGET,
    DEFAULT_MIN_TOKENS,
    DEFAULT_POLICY,
    PROFILED_POLICY,
    PROMPTS_PLUGIN,
    SETTINGS_KEY,
    Scalar,
    Settings,
)
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.scheduling.read_rule import DEFAULT_MIN_TOKENS as DEFAULT_READ_MIN_TOKENS
from vllm_kvcompress.scheduling.triggers import parse_number
from vllm_kvcompress.tools.dtypes import FLOAT32, WHY_FLOAT32, fast_dtype

HELP = "serve a model with vLLM and a compressed KV cache"
_PRINT = "--print-vllm-command"
_OURS = tuple(f"--{w}{dash}" for w in ("kv", "no_kv", "no-kv", "print", "prompt") for dash in "_-")
_MOST_DIGITS = 15  # of a number of tokens
_DESCRIPTION = """\
Serves MODEL with vLLM's OpenAI-compatible server, and compresses its KV cache.
All options of `vllm serve` are accepted besides the ones of this group.
Without --kv-policy, or with --kv-policy none, this is stock vLLM.
"""


def add_parser(subparsers: Any) -> None:
    """Registers the command; its arguments are parsed here, since most are vLLM's."""
    parser = subparsers.add_parser("serve", help=HELP, add_help=False)
    parser.set_defaults(func=run, takes_any_option=True)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is stopped, or prints the plain vLLM command."""
    namespace, rest = parse_options(arguments.rest)
    if namespace.help is not None:
        return _print_help(namespace.help)
    request = sort_out(namespace, rest)
    if namespace.print_vllm_command == RAY and request.settings and request.settings.prompts:
        raise ConfigError(
            "Ray Serve has a server of its own, in which --prompt-compressor has no place; leave "
            "one of the two out."
        )
    if namespace.print_vllm_command:
        # vLLM logs to stdout, where the command goes.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_kvcompress.cli import launch

    command = launch.vllm_command(request)
    variables = launch.environment(request, status_page=not namespace.no_kv_status_page)
    if namespace.print_vllm_command:
        plain = launch.plain_command(command, variables)
        return _print_command(plain, namespace.print_vllm_command)
    os.environ.update(variables)
    if request.settings is not None:
        for line in (summary(request.settings), *advice(request.settings)):
            print(f"vllm-kvcompress: {line}", file=sys.stderr, flush=True)
    if fast_dtype() == FLOAT32 and not option_values(request.vllm_arguments, "--dtype"):
        print(f"vllm-kvcompress: {WHY_FLOAT32}; --dtype float32 is faster here", file=sys.stderr)
    launch.serve(command)
    return 0


def parse_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and everything else in its order."""
    return options_parser().parse_known_args(_dashed(arguments))


def options_parser() -> argparse.ArgumentParser:
    """Our own options; everything else is left for vLLM."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvcompress serve",
        usage="%(prog)s [MODEL] [--kv-policy P [--kv-budget B]] [any `vllm serve` option]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("KV cache compression")
    _add_policy_options(group)
    _add_request_options(group)
    _add_reading_options(group)
    _add_gpu_options(group)
    _add_command_options(group)
    prompt_options.add_options(parser)
    parser.add_argument("-h", "--help", nargs="?", const="", default=None, help=argparse.SUPPRESS)
    return parser


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
        "compressed requests, and with CUDA graphs of whole decode steps), or auto (default)",
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


def _add_command_options(group: argparse._ArgumentGroup) -> None:
    """Where the settings stand, and printing instead of serving."""
    group.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML with vLLM's options and a kvcompress: section (policy, budget, trigger, "
        "params, profile, min_tokens, request_policies, min_request_budget, max_request_budget, "
        "reuse_contexts, reuse_conversations, attention, read, read_min_tokens, min_request_read, "
        "prompts); the command line wins, setting by setting",
    )
    group.add_argument(
        _PRINT,
        choices=FORMS,
        metavar="FORM",
        help="print the equivalent plain `vllm serve` command, and stop; with =yaml as a file for "
        "its --config, =args as a list for charts, without quoted JSON, =ray as Ray Serve's "
        "LLMConfig",
    )


def sort_out(namespace: argparse.Namespace, rest: list[str]) -> ServeRequest:
    """What the user asked for, after every check that needs no model.

    Raises:
        ConfigError: something in it cannot work.
    """
    if len(namespace.config) > 1:
        raise ConfigError(
            f"--config given {len(namespace.config)} times, which of them counts is unclear; "
            "merge the files."
        )
    flags: dict[str, object] = {
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
        "prompts": prompt_options.given(namespace) or None,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    yaml_path = namespace.config[0] if namespace.config else None
    request = read_request(given, yaml_path, rest)
    if request.settings is not None:
        _check(request.settings)
    return request


def _check(settings: Settings) -> None:
    """Refuses what needs neither vLLM nor a model to be seen as wrong."""
    if settings.profile is not None and not os.path.isfile(settings.profile):
        raise ConfigError(
            f"profile {settings.profile}: no such file; make one with `vllm-kvcompress profile`."
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    needed = (SETTINGS_KEY, PROMPTS_PLUGIN) if settings.prompts is not None else (SETTINGS_KEY,)
    for name in needed if plugins is not None else ():
        if name not in str(plugins).split(","):
            raise ConfigError(
                f"VLLM_PLUGINS={plugins} keeps vLLM from loading this plugin; add {name} to it, or "
                "unset it."
            )
    from vllm_kvcompress.policies import resolve_settings

    resolve_settings(settings)


def _dashed(arguments: list[str]) -> list[str]:
    """Our options as they are declared: dashes for underscores, as vLLM allows."""
    result = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith(_OURS):
            name = name.replace("_", "-")
        if name == _PRINT and not equals:  # a value needs the equals sign, or it would be MODEL
            equals, value = "=", SHELL
        result.append(name + equals + value)
    return result


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


def summary(settings: Settings) -> str:
    """What the settings do, in one line."""
    text = _kept(settings)
    if settings.read is not None:
        text += f"; decode steps read {settings.read}"
    if settings.prompts is not None:
        text += f"; {settings.prompts}"
    return text


def advice(settings: Settings) -> list[str]:
    """What would serve this user better."""
    if not settings.compresses or settings.policy != DEFAULT_POLICY:
        return []
    return [
        "measured heads would lose far less in the same memory: run `vllm-kvcompress profile MODEL "
        "--kind headkv --out FILE` once, then serve with --kv-policy auto --kv-profile FILE"
    ]


def _kept(settings: Settings) -> str:
    """What is kept of requests."""
    if not settings.policies:
        return "nothing is compressed"
    if not settings.compresses and settings.may_compress:
        return f"requests choose among {', '.join(settings.request_policies)}; others stay whole"
    if not settings.compresses:
        return f"policy {settings.policy} with budget 1.0 keeps everything: stock vLLM"
    text = f"policy {settings.policy}, budget {settings.budget_text}, trigger {settings.trigger}"
    if isinstance(settings.budget, float):
        text += f"; a compressed prompt holds about {1 / settings.budget:.3g} times fewer blocks"
    if settings.profile is not None:
        text += f"; heads as measured in {settings.profile}"
    return text


def _print_command(command: PlainCommand, form: str) -> int:
    """The plain command on stdout, and what its form leaves out on stderr."""
    print(command.form(form), end="")
    if form == RAY and command.of_the_server:
        names = ", ".join(f"--{name}" for name in command.of_the_server)
        print(f"vllm-kvcompress: left out, Ray Serve has its own: {names}", file=sys.stderr)
    return 0


def _print_help(keyword: str) -> int:
    """Our group, then vLLM's help; `--help=Group` is vLLM's alone."""
    if keyword.lower() == "kvcompress":
        print(options_parser().format_help())
        return 0
    if not keyword:
        print(options_parser().format_help())
        print("options of vllm serve:\n", flush=True)
    from vllm_kvcompress.cli import launch

    launch.print_vllm_help(keyword)
    return 0
