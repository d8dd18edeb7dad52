"""`vllm-kvcompress serve`: `vllm serve` plus the options that switch compression on."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from vllm_kvcompress.cli import cache_options, prompt_options
from vllm_kvcompress.cli.command_forms import FORMS, RAY, SHELL, PlainCommand
from vllm_kvcompress.cli.vllm_command import ServeRequest, option_values, read_request
from vllm_kvcompress.config import (
    DEFAULT_POLICY,
    PROMPTS_PLUGIN,
    SETTING_NAMES,
    SETTINGS_KEY,
    Settings,
)
from vllm_kvcompress.errors import ConfigError
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
    _add_command_options(cache_options.add_options(parser))
    prompt_options.add_options(parser)
    parser.add_argument("-h", "--help", nargs="?", const="", default=None, help=argparse.SUPPRESS)
    return parser


def _add_command_options(group: argparse._ArgumentGroup) -> None:
    """Where the settings stand, and printing instead of serving."""
    group.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help=f"YAML with vLLM's options and a {SETTINGS_KEY}: section "
        f"({', '.join(SETTING_NAMES)}); the command line wins, setting by setting",
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
    given = cache_options.given(namespace)
    if prompts := prompt_options.given(namespace):
        given["prompts"] = prompts
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
