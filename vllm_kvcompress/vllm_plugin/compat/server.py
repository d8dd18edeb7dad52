"""The API server: how it starts, and how it asks the workers."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from argparse import Namespace
from collections.abc import Callable
from typing import Any


def prepare_environment() -> None:
    """Sets the variables that `vllm` sets before it starts a server."""
    try:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    except ImportError:  # since 0.33
        from vllm.entrypoints.common.startup import cli_env_setup
    cli_env_setup()


async def run_api_server(arguments: Namespace, interrupted: Callable[..., None]) -> None:
    """Runs vLLM's API server in this process, as its `run_server` does.

    Args:
        arguments: of `vllm serve`.
        interrupted: handles SIGINT and SIGTERM until the server listens. vLLM's own handler raises
            KeyboardInterrupt, which `zmq_socket_ctx` swallows, around the wait for the engine: a
            server that is asked to end while it starts would go on and serve.
    """
    from vllm.entrypoints.cli.serve import setup_server
    from vllm.utils.system_utils import decorate_logs

    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    except ImportError:  # in older versions
        from vllm.entrypoints.openai.api_server import run_server_worker
    decorate_logs("APIServer")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    takes_port = "reuse_port" in inspect.signature(setup_server).parameters  # since 0.32
    address, sock = setup_server(arguments, **({"reuse_port": False} if takes_port else {}))
    # vLLM, when it ends, names who else holds the port, and fails if that process has just ended.
    os.register_at_fork(after_in_child=sock.close)
    await run_server_worker(address, sock, arguments)


async def ask_workers(engine_client: Any, method: str) -> dict[int, list[Any]]:
    """Calls a method of all workers of all engines, and returns their answers by engine number.

    `collective_rpc` asks all engines too, but returns only the first one's answer.
    """
    client = engine_client.engine_core
    questions = (
        client._call_utility_async("collective_rpc", method, None, (), {}, engine=engine)
        for engine in client.core_engines
    )
    answers = await asyncio.gather(*questions)
    return dict(zip(client.engine_ranks_managed, answers, strict=True))
