"""Runs vLLM's own server in this process, and says how it ended.

vLLM ends with status 0 whether it was asked to or its engine died, so no supervisor restarts it.
Engines do not say either: vLLM kills healthy ones when it is asked to end. So the signals are
noted where vLLM asks the event loop to handle them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVarTuple

import uvloop
from vllm import AsyncEngineArgs, envs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvcompress.cli.command_forms import RAY, Given, PlainCommand, native
from vllm_kvcompress.cli.cpu_memory import take_free_memory
from vllm_kvcompress.cli.vllm_command import ServeRequest
from vllm_kvcompress.config.fields import SETTINGS_KEY, STATUS_PLUGIN
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.config.texts import start_lines
from vllm_kvcompress.errors import ConfigError, EngineError
from vllm_kvcompress.tools.capacity import CPU_BLOCK_SIZE
from vllm_kvcompress.tools.dtypes import FLOAT32, WHY_FLOAT32, fast_dtype
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options
from vllm_kvcompress.vllm_plugin.compat.server import prepare_environment, run_api_server
from vllm_kvcompress.vllm_plugin.startup import lifeline
from vllm_kvcompress.vllm_plugin.startup.distribution import answer_for_vllm
from vllm_kvcompress.vllm_plugin.startup.needed_classes import is_ours
from vllm_kvcompress.vllm_plugin.startup.refusals import check_engine, check_server

# Groups of plugins that vLLM loads unless VLLM_PLUGINS says otherwise.
_PLUGIN_KINDS = ("general", "io_processor", "platform", "stat_logger")
_Ts = TypeVarTuple("_Ts")


def run(request: ServeRequest) -> int:
    """Serves until it is stopped, or prints the plain vLLM command.

    Raises:
        ConfigError: an option or a setting cannot work.
    """
    variables, command = environment(request), vllm_command(request)
    if request.form is not None:
        _print_command(plain_command(command, variables), request.form, request.settings)
        return 0
    os.environ.update(variables)
    for line in start_lines(request.settings) if request.settings is not None else ():
        _say(line)
    serve(command)
    return 0


def _print_command(command: PlainCommand, form: str, settings: Settings | None) -> None:
    """The plain command on stdout, and what its form leaves out on stderr."""
    if form == RAY and settings is not None and (settings.prompts is not None or settings.protect):
        option = "--kv-protect" if settings.protect else "--prompt-compressor"
        raise ConfigError(
            f"Ray Serve has a server of its own, in which {option} has no place; leave one of the "
            "two out."
        )
    print(command.form(form), end="")
    if form == RAY and command.server_options:
        names = ", ".join(f"--{name}" for name in command.server_options)
        _say(f"left out, Ray Serve has its own: {names}")


def _say(line: str) -> None:
    print(f"vllm-kvcompress: {line}", file=sys.stderr, flush=True)


def vllm_command(request: ServeRequest) -> list[str]:
    """Returns the arguments of `vllm`, from `serve` on, for this build of vLLM.

    Raises:
        ConfigError: the user gave an option that compression needs another value.
    """
    options, settings = {}, request.settings
    # Shorter prompts alone need nothing of the engine, so any model is served with them.
    if settings is not None and (settings.acts or settings.prompts is None):
        paths = plugin_options(settings)
        options = {name.replace("_", "-"): path for name, path in paths.items()}
        if current_platform.is_cpu():
            options["block-size"] = str(CPU_BLOCK_SIZE)
    return request.command(  # users may extend our classes
        options, lambda name, path: name.endswith("-cls") and is_ours(name.replace("-", "_"), path)
    )


def environment(request: ServeRequest) -> dict[str, str]:
    """Returns variables that have to be set before vLLM starts.

    vLLM adds a plugin's routes only where VLLM_PLUGINS names it, and then loads no other plugin
    that is not named. So all are named, except others that add routes; an operator's choice stands.
    """
    settings = request.settings
    plugins = {STATUS_PLUGIN} if request.status_page else set()
    if settings is not None:
        plugins |= set(settings.plugins)
    if settings is None or not plugins or "VLLM_PLUGINS" in os.environ:
        return {}
    groups = [f"vllm.{kind}_plugins" for kind in _PLUGIN_KINDS]
    plugins |= {entry.name for group in groups for entry in entry_points(group=group)}
    return {"VLLM_PLUGINS": ",".join(sorted(plugins | {SETTINGS_KEY}))}


def serve(command: list[str]) -> None:
    """Serves until it is stopped, exactly as `vllm` would with these arguments.

    Raises:
        UnsupportedError: the model or an option of vLLM does not work with the settings.
        EngineError: the server ended although nobody had asked it to.
    """
    answer_for_vllm()
    prepare_environment()
    subcommand, arguments = parse(command)
    configure_logging_from_args(arguments)
    subcommand.validate(arguments)
    take_free_memory(arguments, command)
    if fast_dtype() == FLOAT32 and arguments.dtype == "auto":
        _say(f"{WHY_FLOAT32}; --dtype float32 is faster here")
    check(arguments)
    lifeline.announce()
    if _is_one_server(arguments):
        _run_one_server(arguments)
    else:
        subcommand.cmd(arguments)


class _Loop(uvloop.Loop):
    """An event loop that notes whether a signal that has a handler has come."""

    asked_to_end = False

    def add_signal_handler(self, sig: int, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        def noting() -> None:
            self.asked_to_end = True
            callback(*args)

        super().add_signal_handler(sig, noting)


def _is_one_server(arguments: argparse.Namespace) -> bool:
    """Whether vLLM would run one API server, in this process.

    Several run in processes of their own; vLLM then fails where one of those or an engine does.
    """
    others = ("headless", "grpc", "data_parallel_multi_port_external_lb")
    return (
        arguments.api_server_count in (None, 1)
        and arguments.data_parallel_size == 1
        and not any(getattr(arguments, name, False) for name in others)
        and not getattr(envs, "VLLM_USE_RUST_FRONTEND", False)
    )


def _run_one_server(arguments: argparse.Namespace) -> None:
    """Serves until it is asked to end; EngineError: it ended otherwise."""
    arguments.api_server_count = None  # none of several
    loop = _Loop()
    server = run_api_server(arguments, _end_start)
    uvloop.run(server, loop_factory=lambda: loop)
    if not loop.asked_to_end:
        raise EngineError(
            "the server ended although nobody had asked it to; its engine's last words are above."
        )


def _end_start(number: int, *_: object) -> None:
    """Ends a server that has not begun to listen; its engine ends with it."""
    _say(f"{'interrupted' if number == signal.SIGINT else 'terminated'} while the server started")
    raise SystemExit(128 + number)


def check_command(command: list[str]) -> str:
    """Checks what `serve` checks before it starts the engine, and what its workers check.

    Returns:
        Why the model's layers could not be checked without weights; empty: they were.

    Raises:
        UnsupportedError: the model or an option of vLLM does not work with the settings.
    """
    answer_for_vllm()
    subcommand, arguments = parse(command)
    subcommand.validate(arguments)
    check(arguments)
    if SETTINGS_KEY not in (arguments.additional_config or {}):
        return ""
    arguments.tensor_parallel_size = arguments.data_parallel_size = 1  # ranks have equal layers
    arguments.pipeline_parallel_size = 1
    try:
        from vllm_kvcompress.vllm_plugin.worker_side.layer_check import check_layers

        check_layers(AsyncEngineArgs.from_cli_args(arguments).create_engine_config())
    except ConfigError:
        raise
    except Exception as error:  # whatever building a model raises, the rest of the report stands
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def check(arguments: argparse.Namespace) -> None:
    """Refuses models and options that do not work with the settings, before anything starts.

    The worker checks the same, for plain `vllm serve`; here a refusal is one line instead of a
    worker's traceback.
    """
    if SETTINGS_KEY not in (arguments.additional_config or {}):
        return
    check_server(Settings.from_dict(arguments.additional_config[SETTINGS_KEY]), arguments)
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    check_engine(engine_arguments.create_engine_config(headless=arguments.headless))


def print_vllm_help(keyword: str) -> None:
    """Prints vLLM's own help for `serve`, of one group of options if `keyword` names one."""
    with contextlib.suppress(SystemExit):  # argparse's way to end after printing
        parse(["serve", f"--help={keyword}" if keyword else "--help"])


def plain_command(command: list[str], variables: dict[str, str]) -> PlainCommand:
    """Splits a command into the options that vLLM's own parser finds in it."""
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
    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    return PlainCommand(
        arguments=command,
        model=model,
        options={name.replace("_", "-"): value for name, value in given.items()},
        engine={name: _value(typed, name, given[name]) for name in given if name in fields},
        environment=variables,
    )


class _AsWritten(argparse.Action):
    """Keeps an option's value as it was given, before vLLM converts it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs == 0:
            values = not str(option_string).startswith("--no-")
        elif self.const:  # may be repeated
            values = (*getattr(namespace, self.dest, ()), values)
        setattr(namespace, self.dest, values)


def _value(typed: argparse.Namespace, name: str, given: Given) -> object:
    """vLLM's value of an option; the given one where vLLM's cannot be written as YAML."""
    value = getattr(typed, name)
    if isinstance(value, list) or type(value) in (bool, int, float, str):
        return value
    return native(given) if isinstance(given, str) else given


def parse(command: list[str]) -> tuple[ServeSubcommand, argparse.Namespace]:
    """Returns vLLM's subcommand, and the arguments as it parses them."""
    subcommand = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="vllm-kvcompress")
    subcommand.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(command)
    if arguments.model_tag is not None:  # the positional one wins, as in vLLM
        arguments.model = arguments.model_tag
    return subcommand, arguments
