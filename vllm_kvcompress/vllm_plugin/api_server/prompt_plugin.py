"""Makes the messages of chats shorter, behind authentication and before vLLM reads them.

vLLM loads it (entry point `vllm.endpoint_plugins`) where `VLLM_PLUGINS` names it, which
`vllm-kvcompress serve` sees to. Such a plugin is given the server's app. It puts its middleware at
the innermost place: all that vLLM adds, such as the check of keys, and `--middleware`, are
around it, in whatever order they come.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_kvcompress.config import PROMPTS_PLUGIN, SETTINGS_KEY, Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.shortener import PromptShortener

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

    from vllm_kvcompress.metrics.prompts import PromptMetrics

PATH = "/v1/chat/completions"
_NUM_THREADS = 2


class PromptPlugin:
    """vLLM's contract for such plugins; it adds no routes."""

    name = PROMPTS_PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Loads the classifier, and puts it before vLLM's routes, where the settings name one.

        Raises:
            ConfigError: it cannot be loaded; the server does not start.
        """
        section = (app.state.args.additional_config or {}).get(SETTINGS_KEY)
        settings = Settings.from_dict(section).prompts if section else None
        if settings is None:
            return
        from vllm_kvcompress.metrics.prompts import process_prompt_metrics
        from vllm_kvcompress.prompts.llmlingua2 import TokenClassifier

        classifier = TokenClassifier(
            settings.model, settings.device, settings.force_tokens, settings.min_tokens
        )
        model_name = (app.state.args.served_model_name or [app.state.args.model])[0]
        metrics = process_prompt_metrics()
        metrics.start(model_name)
        shortener = PromptShortener(settings, classifier.score)
        # Not add_middleware, which puts a new one around those that are there.
        app.user_middleware.append(
            Middleware(
                PromptMiddleware, shortener=shortener, metrics=metrics, model_name=model_name
            )
        )

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Nothing to keep: the middleware needs no engine."""


class PromptMiddleware:
    """Shortens the body of chat requests, in threads of its own; all else passes."""

    def __init__(
        self, app: ASGIApp, shortener: PromptShortener, metrics: PromptMetrics, model_name: str
    ) -> None:
        self._app = app
        self._shortener = shortener
        self._metrics = metrics
        self._model_name = model_name
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvcompress-prompts")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path != PATH:
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        if body is None:
            return
        started, loop = time.perf_counter(), asyncio.get_running_loop()
        try:
            shorter, work = await loop.run_in_executor(self._threads, self._shortener.rewrite, body)
        except ConfigError as error:
            await _refusal(str(error))(scope, receive, send)
            return
        self._metrics.observe(work, time.perf_counter() - started, self._model_name)
        if shorter is not body:
            scope = {**scope, "headers": list(scope["headers"])}
            MutableHeaders(scope=scope)["content-length"] = str(len(shorter))
        await self._app(scope, _replay(shorter, receive), send)


async def _whole_body(receive: Receive) -> bytes | None:
    """A request's body; None: the client is gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """What the app reads: this body, then what else the client says, such as that it is gone."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return rest.pop() if rest else await receive()

    return replayed


def _refusal(reason: str) -> JSONResponse:
    """A 400 as vLLM writes it."""
    error: dict[str, Any] = {"message": reason, "type": "BadRequestError", "param": None}
    return JSONResponse({"error": {**error, "code": 400}}, status_code=400)
