"""Runs vLLM's server where it is one process beside the engine's, and says how it ended.

vLLM's own ends in the same way, with status 0, whether it was asked to or its engine died: no
supervisor starts it again. Engines say nothing either: when it is asked to end, vLLM kills healthy
ones. So the signals are noted where vLLM asks the event loop to handle them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVarTuple

import uvloop
from vllm import envs
from vllm.entrypoints.cli.serve import run_server

from vllm_kvcompress.errors import EngineError

Ts = TypeVarTuple("Ts")


class _Loop(uvloop.Loop):
    """Notes that a signal has come which somebody handles.

    Attributes:
        asked_to_end: whether one has.
    """

    asked_to_end = False

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """As asyncio's."""

        def noting() -> None:
            self.asked_to_end = True
            callback(*args)

        super().add_signal_handler(sig, noting)


def is_one(arguments: argparse.Namespace) -> bool:
    """Whether vLLM would run one server, in this process.

    It runs several in processes of their own, and then fails where one of those or an engine does.
    """
    others = ("headless", "grpc", "data_parallel_multi_port_external_lb")
    return (
        arguments.api_server_count in (None, 1)
        and arguments.data_parallel_size == 1
        and not any(getattr(arguments, name, False) for name in others)
        and not getattr(envs, "VLLM_USE_RUST_FRONTEND", False)
    )


def run(arguments: argparse.Namespace) -> None:
    """Serves until it is asked to end.

    Raises:
        EngineError: it ended otherwise.
    """
    if arguments.model_tag is not None:
        arguments.model = arguments.model_tag
    arguments.api_server_count = None  # none of several
    loops: list[_Loop] = []

    def new_loop() -> _Loop:
        loops.append(_Loop())
        return loops[-1]

    uvloop.run(run_server(arguments), loop_factory=new_loop)
    if not any(loop.asked_to_end for loop in loops):
        raise EngineError(
            "the server ended although nobody had asked it to; its engine's last words are above."
        )
