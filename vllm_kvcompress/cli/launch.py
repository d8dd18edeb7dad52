"""Runs vLLM's own server in this process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from importlib.metadata import entry_points
from typing import Any

from vllm import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvcompress.cli import one_server
from vllm_kvcompress.cli.command_forms import RAY, Given, PlainCommand, native
from vllm_kvcompress.cli.cpu_memory import take_free_memory
from vllm_kvcompress.cli.vllm_command import ServeRequest
from vllm_kvcompress.config import PROMPTS_PLUGIN, SETTINGS_KEY, STATUS_PLUGIN, Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.dtypes import FLOAT32, WHY_FLOAT32, fast_dtype
from vllm_kvcompress.vllm_plugin.startup import compat, lifeline
from vllm_kvcompress.vllm_plugin.startup.distribution import answer_for_vllm
from vllm_kvcompress.vllm_plugin.startup.needed_classes import is_ours
from vllm_kvcompress.vllm_plugin.startup.refusals import check_engine, check_server

# Those that vLLM loads unless VLLM_PLUGINS says otherwise.
_PLUGIN_GROUPS = tuple(
    f"vllm.{kind}_plugins" for kind in ("general", "io_processor", "platform", "stat_logger")
)
_CPU_BLOCK_SIZE = "32"  # finer than vLLM's 128 and as fast: budgets are kept more exactly


def run(request: ServeRequest) -> int:
    """Serves until it is stopped, or prints the plain vLLM command.

    Raises:
        ConfigError: something in it cannot work.
    """
    variables = environment(request)
    command = vllm_command(request)
    if request.form is not None:
        return _print_command(command, variables, request)
    os.environ.update(variables)
    for line in request.settings.start_lines() if request.settings is not None else ():
        print(f"vllm-kvcompress: {line}", file=sys.stderr, flush=True)
    serve(command)
    return 0


def _print_command(words: list[str], variables: dict[str, str], request: ServeRequest) -> int:
    """The plain command on stdout, and what its form leaves out on stderr."""
    command = plain_command(words, variables)
    form, settings = str(request.form), request.settings
    if form == RAY and settings is not None and settings.prompts is not None:
        raise ConfigError(
            "Ray Serve has a server of its own, in which --prompt-compressor has no place; leave "
            "one of the two out."
        )
    print(command.form(form), end="")
    if form == RAY and command.of_the_server:
        names = ", ".join(f"--{name}" for name in command.of_the_server)
        print(f"vllm-kvcompress: left out, Ray Serve has its own: {names}", file=sys.stderr)
    return 0


def vllm_command(request: ServeRequest) -> list[str]:
    """The arguments of `vllm`, from `serve` on, for this build of vLLM.

    Raises:
        ConfigError: the user gave an option that compression needs another value.
    """
    options = {}
    settings = request.settings
    # Shorter prompts alone want nothing of the engine: any model is served with them.
    if settings is not None and (settings.acts or settings.prompts is None):
        paths = compat.plugin_options(settings)
        options = {name.replace("_", "-"): path for name, path in paths.items()}
        if current_platform.is_cpu():
            options["block-size"] = _CPU_BLOCK_SIZE
    return request.command(  # users may extend our classes
        options, lambda name, path: name.endswith("-cls") and is_ours(name.replace("-", "_"), path)
    )


def environment(request: ServeRequest) -> dict[str, str]:
    """Variables that have to be set before vLLM starts.

    vLLM adds a plugin's routes only where VLLM_PLUGINS names it, and then loads no other plugin
    that is not named, either: all are, but for others that add routes. An operator's own choice
    stands.
    """
    settings = request.settings
    wanted = {STATUS_PLUGIN} if request.status_page else set()
    if settings is not None and settings.prompts is not None:
        wanted.add(PROMPTS_PLUGIN)
    if settings is None or not wanted or "VLLM_PLUGINS" in os.environ:
        return {}
    names = {entry.name for group in _PLUGIN_GROUPS for entry in entry_points(group=group)}
    return {"VLLM_PLUGINS": ",".join(sorted(names | wanted | {SETTINGS_KEY}))}


def serve(command: list[str]) -> None:
    """Serves until it is stopped, exactly as `vllm` would with these arguments.

    Raises:
        UnsupportedError: the model or an option of vLLM does not work with the settings.
        EngineError: the server ended although nobody had asked it to.
    """
    answer_for_vllm()
    compat.prepare_environment()
    subcommand, arguments = parse(command)
    configure_logging_from_args(arguments)
    subcommand.validate(arguments)
    take_free_memory(arguments, command)
    if fast_dtype() == FLOAT32 and arguments.dtype == "auto":
        print(f"vllm-kvcompress: {WHY_FLOAT32}; --dtype float32 is faster here", file=sys.stderr)
    check(arguments)
    lifeline.announce()
    if one_server.is_one(arguments):
        one_server.run(arguments)
    else:
        subcommand.cmd(arguments)


def check_command(command: list[str]) -> None:
    """Everything that `serve` checks before it starts the engine.

    Raises:
        UnsupportedError: the model or an option of vLLM does not work with the settings.
    """
    answer_for_vllm()
    subcommand, arguments = parse(command)
    subcommand.validate(arguments)
    check(arguments)


def check(arguments: argparse.Namespace) -> None:
    """Refuses models and options that do not work with the settings, before anything starts.

    The worker checks the same, for those who start `vllm serve` themselves; here the reason
    comes as one line instead of a worker's traceback.
    """
    if SETTINGS_KEY not in (arguments.additional_config or {}):
        return
    if arguments.model_tag is not None:
        arguments.model = arguments.model_tag
    check_server(Settings.from_dict(arguments.additional_config[SETTINGS_KEY]), arguments)
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    check_engine(engine_arguments.create_engine_config(headless=arguments.headless))


def print_vllm_help(keyword: str) -> None:
    """Prints vLLM's own help for `serve`, of one group of options if `keyword` names one."""
    with contextlib.suppress(SystemExit):  # argparse's way to end after printing
        parse(["serve", f"--help={keyword}" if keyword else "--help"])


def plain_command(command: list[str], variables: dict[str, str]) -> PlainCommand:
    """A command, taken apart into what vLLM's own parser finds in it."""
    typed = parse(command)[1]
    subparser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    parser = FlexibleArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    for action in subparser._actions:
        names = {"dest": action.dest} if action.option_strings else {}
        is_repeated = isinstance(action, argparse._AppendAction)
        if "--help" not in action.option_strings:
            parser.add_argument(
                *(action.option_strings or [action.dest]),
                **names,
                nargs=action.nargs,
                const=is_repeated,
                action=_AsWritten,
            )
    given = vars(parser.parse_args(command[1:]))
    model = given.pop("model_tag", None)
    fields = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    return PlainCommand(
        arguments=command,
        model=model,
        options={name.replace("_", "-"): value for name, value in given.items()},
        engine={name: _value(typed, name, given[name]) for name in given if name in fields},
        environment=variables,
    )


class _AsWritten(argparse.Action):
    """Keeps what an option was given, before vLLM makes a type of its own of it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs == 0:
            values = not str(option_string).startswith("--no-")
        elif self.const:  # once more
            values = (*getattr(namespace, self.dest, ()), values)
        setattr(namespace, self.dest, values)


def _value(typed: argparse.Namespace, name: str, given: Given) -> object:
    """What vLLM made of an option, or what was given where that is an object of its own."""
    value = getattr(typed, name)
    if isinstance(value, list) or type(value) in (bool, int, float, str):
        return value
    return native(given) if isinstance(given, str) else given


def parse(command: list[str]) -> tuple[ServeSubcommand, argparse.Namespace]:
    """vLLM's subcommand, and its parsed arguments."""
    subcommand = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="vllm-kvcompress")
    subcommand.subparser_init(parser.add_subparsers(dest="subparser"))
    return subcommand, parser.parse_args(command)
