"""Entry point of the `vllm-kvcompress` command.

Only the module of the command that was asked for is imported, so `--help` needs neither vLLM
nor torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import cast

from vllm_kvcompress import __version__
from vllm_kvcompress.errors import ConfigError, EngineError, FileError

PROGRAM = "vllm-kvcompress"
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # as shells have it: 128 and the signal's number

# Each has a module of this package with `add_options(parser)` and `run(arguments) -> int`.
_COMMANDS = {
    "serve": "serve a model with vLLM and a compressed KV cache",
    "policies": "list policies and their parameters, or explain one",
    "explain-request": "show which tokens of one request every head keeps",
    "eval": "measure what policies cost in quality, on a model, at budgets",
    "bench": "measure serving with and without compression",
    "recommend": "find the cheapest setting whose loss of quality is small enough",
    "calibrate": "measure the loss at a ladder of budgets, for --kv-budget loss:0.02",
    "plan": "say how many requests fit at a time, from a model's config",
    "profile": "measure a model's heads for headkv, duoattention and triattention",
    "fetch-model": "fetch a small real language model, ready to be served",
    "doctor": "check this installation, and what serve would refuse",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command of this package.

    Args:
        argv: arguments without the program's name; None takes them from the process.

    Returns:
        The exit status: 0; 2 when settings were refused, with one line on stderr; 1 when an
        engine ended or a file could not be written; 130 when the user interrupted the command.

    Raises:
        SystemExit: 130 or 143, after SIGINT or SIGTERM while a server started.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except (ConfigError, EngineError, FileError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        pass
    # Behind the exception, whose frames hold progress bars: they print a last line as they go.
    print(f"\n{PROGRAM}: interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


def _run(arguments: list[str]) -> int:
    """Parses and runs a command; its imports take seconds and may be interrupted, too."""
    parser = _parser(arguments[0] if arguments else "")
    namespace, rest = parser.parse_known_args(arguments)
    if namespace.command is None:
        parser.print_help()
        return EXIT_REFUSED
    if namespace.takes_any_option:
        namespace.rest = arguments[1:]
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    run = cast(Callable[[argparse.Namespace], int], namespace.func)
    return run(namespace)


def _parser(wanted: str) -> argparse.ArgumentParser:
    """Returns the parser, with the options of the wanted command only."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Compresses the paged KV cache of vLLM while it serves."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(takes_any_option=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in _COMMANDS.items():
        has_help = name == wanted and name != "serve"  # which prints vLLM's help as well
        command = subparsers.add_parser(name, help=text, add_help=has_help)
        if name == wanted:
            module = importlib.import_module(f"vllm_kvcompress.cli.{name.replace('-', '_')}")
            command.set_defaults(func=module.run)
            module.add_options(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
