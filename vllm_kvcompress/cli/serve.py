"""`vllm-kvcompress serve`: `vllm serve` plus the options that switch compression on."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from vllm_kvcompress.cli.command_forms import FORMS, SHELL
from vllm_kvcompress.cli.vllm_command import ServeRequest, option_values, read_request
from vllm_kvcompress.config import DEFAULT_POLICY, SETTINGS_KEY, Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import add_flags, given
from vllm_kvcompress.prompts.settings import PromptSettings
from vllm_kvcompress.tools.dtypes import FLOAT32, WHY_FLOAT32, fast_dtype

HELP = "serve a model with vLLM and a compressed KV cache"
_PRINT = "--print-vllm-command"
_OURS = tuple(f"--{w}{dash}" for w in ("kv", "no_kv", "no-kv", "print", "prompt") for dash in "_-")
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
    namespace, rest = options_parser().parse_known_args(_dashed(arguments.rest))
    if namespace.help is not None:
        return _print_help(namespace.help)
    request = _request(namespace, rest)
    if namespace.print_vllm_command:
        # vLLM logs to stdout, where the command goes.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    else:
        for line in start_lines(request):
            print(f"vllm-kvcompress: {line}", file=sys.stderr, flush=True)
    from vllm_kvcompress.cli import launch

    return launch.run(request, namespace.print_vllm_command, not namespace.no_kv_status_page)


def parse_request(arguments: list[str]) -> ServeRequest:
    """What the user asked for, after every check that needs no model.

    Raises:
        ConfigError: something in it cannot work.
    """
    return _request(*options_parser().parse_known_args(_dashed(arguments)))


def _request(namespace: argparse.Namespace, rest: list[str]) -> ServeRequest:
    if len(namespace.config) > 1:
        raise ConfigError(
            f"--config given {len(namespace.config)} times, which of them counts is unclear; "
            "merge the files."
        )
    flags = given(Settings, namespace)
    if prompts := given(PromptSettings, namespace):
        flags["prompts"] = prompts
    return read_request(flags, "".join(namespace.config) or None, rest)


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
    add_flags(group, Settings)
    _add_command_options(group)
    prompts = "Less to read before the first token; works without --kv-policy, too."
    add_flags(parser.add_argument_group("shorter prompts", prompts), PromptSettings)
    parser.add_argument("-h", "--help", nargs="?", const="", default=None, help=argparse.SUPPRESS)
    return parser


def _add_command_options(group: argparse._ArgumentGroup) -> None:
    """Where the settings stand, the status page, and printing instead of serving."""
    group.add_argument(
        "--no-kv-status-page",
        action="store_true",
        help="without the page at /kvcompress, which says what compression does",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help=f"YAML with vLLM's options and a {SETTINGS_KEY}: section "
        f"({', '.join(Settings.model_fields)}); the command line wins, setting by setting",
    )
    group.add_argument(
        _PRINT,
        choices=FORMS,
        metavar="FORM",
        help="print the equivalent plain `vllm serve` command, and stop; with =yaml as a file for "
        "its --config, =args as a list for charts, without quoted JSON, =ray as Ray Serve's "
        "LLMConfig",
    )


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


def start_lines(request: ServeRequest) -> list[str]:
    """What is said at the start: what the settings do, and what would serve this user better."""
    settings, lines = request.settings, []
    if settings is not None:
        lines = [summary(settings), *advice(settings)]
    if fast_dtype() == FLOAT32 and not option_values(request.vllm_arguments, "--dtype"):
        lines.append(f"{WHY_FLOAT32}; --dtype float32 is faster here")
    return lines


def summary(settings: Settings) -> str:
    """What the settings do, in one line."""
    text = _kept(settings)
    if settings.read_rule is not None:
        prompts = " and prompts" if settings.read_rule.prefill_tokens else ""
        text += f"; decode steps{prompts} read {settings.read}"
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
