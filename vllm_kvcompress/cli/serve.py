"""`vllm-kvcompress serve`: `vllm serve` plus the options that switch compression on."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from vllm_kvcompress.cli.command_forms import FORMS, SHELL
from vllm_kvcompress.cli.vllm_command import ServeRequest, read_request
from vllm_kvcompress.config import SETTINGS_KEY, Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import add_flags
from vllm_kvcompress.prompts.settings import PromptSettings

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
    request = parse_request(arguments.rest)
    if request.form is not None:
        # vLLM logs to stdout, where the command goes.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_kvcompress.cli import launch

    return launch.run(request)


def parse_request(arguments: list[str]) -> ServeRequest:
    """What the user asked for, after every check that needs no model.

    Raises:
        ConfigError: something in it cannot work.
    """
    namespace, rest = _parse(arguments)
    if len(namespace.config) > 1:
        raise ConfigError(
            f"--config given {len(namespace.config)} times, which of them counts is unclear; "
            "merge the files."
        )
    prompts = {"prompts": namespace.prompts} if namespace.prompts else {}
    request = read_request(namespace.settings | prompts, "".join(namespace.config) or None, rest)
    return replace(
        request,
        form=namespace.print_vllm_command,
        status_page=not namespace.no_kv_status_page,
    )


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
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
    add_flags(group, Settings, "settings")
    _add_command_options(group)
    prompts = "Less to read before the first token; works without --kv-policy, too."
    shorter = parser.add_argument_group("shorter prompts", prompts)
    add_flags(shorter, PromptSettings, "prompts")
    parser.add_argument("-h", "--help", nargs="?", action=_Help, help=argparse.SUPPRESS)
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


class _Help(argparse.Action):
    """Prints our groups, then vLLM's help; `--help=Group` is vLLM's alone."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        keyword = str(values or "")
        if not keyword or keyword.lower() == "kvcompress":
            print(parser.format_help(), flush=True)
        if keyword.lower() != "kvcompress":
            from vllm_kvcompress.cli import launch

            print("" if keyword else "options of vllm serve:\n", end="", flush=True)
            launch.print_vllm_help(keyword)
        parser.exit()
