"""`vllm-kvcompress serve`: `vllm serve` plus the options that switch compression on."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from vllm_kvcompress.cli.command_forms import FORMS, SHELL
from vllm_kvcompress.cli.vllm_command import ServeRequest, read_request
from vllm_kvcompress.config.fields import SETTINGS_KEY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import add_flags
from vllm_kvcompress.prompts.settings import PromptSettings

_PRINT = "--print-vllm-command"
_OURS = tuple(f"--{w}{dash}" for w in ("kv", "no_kv", "no-kv", "print", "prompt") for dash in "_-")
_DESCRIPTION = """\
Serves MODEL with vLLM's OpenAI-compatible server, and compresses its KV cache.
All options of `vllm serve` are accepted besides the ones of this group.
Without --kv-policy, or with --kv-policy none, this is stock vLLM.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Leaves all arguments to `parse_request`, since most are vLLM's."""
    parser.set_defaults(takes_any_option=True)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is stopped, or prints the plain vLLM command."""
    request = parse_request(arguments.rest)
    if request.form is not None:
        # vLLM logs to stdout, where the command goes.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_kvcompress.cli import launch

    return launch.run(request)


def parse_request(arguments: list[str]) -> ServeRequest:
    """Parses a command line, and checks all that needs no model.

    Raises:
        ConfigError: an option or a setting cannot work.
    """
    ours, vllm_arguments = options_parser().parse_known_args(_dashed(arguments))
    if len(ours.config) > 1:
        raise ConfigError(
            f"--config given {len(ours.config)} times, which of them counts is unclear; "
            "merge the files."
        )
    settings = ours.settings | ({"prompts": ours.prompts} if ours.prompts else {})
    request = read_request(settings, "".join(ours.config) or None, vllm_arguments)
    return replace(request, form=ours.print_vllm_command, status_page=not ours.no_kv_status_page)


def options_parser() -> argparse.ArgumentParser:
    """Returns the parser of our own options; it leaves everything else for vLLM."""
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
    description = "Fewer prompt tokens to prefill; works without --kv-policy, too."
    add_flags(parser.add_argument_group("shorter prompts", description), PromptSettings, "prompts")
    parser.add_argument("-h", "--help", nargs="?", action=_Help, help=argparse.SUPPRESS)
    return parser


def _dashed(arguments: list[str]) -> list[str]:
    """Spells our options with dashes; vLLM's may have underscores, so ours may, too."""
    dashed = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith(_OURS):
            name = name.replace("_", "-")
        if name == _PRINT and not equals:  # a value needs the equals sign, or it would be MODEL
            equals, value = "=", SHELL
        dashed.append(name + equals + value)
    return dashed


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
