"""Shortens the messages of chats, after authentication and before vLLM reads them.

vLLM loads it (entry point `vllm.endpoint_plugins`) where `VLLM_PLUGINS` names it, which
`vllm-kvcompress serve` does. vLLM hands it the server's app.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.types import ASGIApp
from vllm.engine.protocol import EngineClient

from vllm_kvcompress.config.fields import PROMPTS_PLUGIN, SETTINGS_KEY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.metrics.prompts import PromptMetrics
from vllm_kvcompress.prompts.shortener import PromptShortener
from vllm_kvcompress.vllm_plugin.api_server.request_bodies import BodyMiddleware

_NUM_THREADS = 2


class PromptPlugin:
    """Adds the middleware to vLLM's app; implements vLLM's endpoint plugin."""

    name = PROMPTS_PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Loads the classifier that the settings name, and puts it before vLLM's routes.

        Raises:
            ConfigError: the classifier cannot be loaded; the server does not start.
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
        """Does nothing: the middleware needs no engine."""


class PromptMiddleware(BodyMiddleware):
    """Shortens the body of chat requests, in its own threads; passes on all others."""

    def __init__(
        self, app: ASGIApp, shortener: PromptShortener, metrics: PromptMetrics, model_name: str
    ) -> None:
        super().__init__(app)
        self._shortener = shortener
        self._metrics = metrics
        self._model_name = model_name
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvcompress-prompts")

    async def rewrite(self, body: bytes, path: str, state: Any) -> bytes:
        """Shortens the texts of a chat."""
        started, loop = time.perf_counter(), asyncio.get_running_loop()
        shorter, work = await loop.run_in_executor(self._threads, self._shortener.rewrite, body)
        self._metrics.observe(work, time.perf_counter() - started, self._model_name)
        return shorter
