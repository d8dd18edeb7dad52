"""Protects the tokens of chat roles from eviction: finds them, and adds them to the request.

vLLM loads it (entry point `vllm.endpoint_plugins`) where `VLLM_PLUGINS` names it, which
`vllm-kvcompress serve` does with `--kv-protect`.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.types import ASGIApp
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from vllm_kvcompress.config.fields import PROTECT_PLUGIN, SETTINGS_KEY
from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.roles import RoleTokens, find_role_tokens, joined
from vllm_kvcompress.scheduling.plan import num_in_spans
from vllm_kvcompress.scheduling.rule import PolicyDemand
from vllm_kvcompress.vllm_plugin.api_server.request_bodies import (
    CHATS,
    BodyMiddleware,
    json_object,
)
from vllm_kvcompress.vllm_plugin.request_options import request_options

_XARGS, _PROTECT = "vllm_xargs", "kv_protect"
_OTHER_CHATS = ("/v1/responses", "/v1/messages")
_DEFAULT_BLOCK_SIZE = 16  # vLLM's


class ProtectPlugin:
    """Adds the middleware to vLLM's app; implements vLLM's endpoint plugin."""

    name = PROTECT_PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Puts the middleware before vLLM's routes if the settings name roles."""
        section = (app.state.args.additional_config or {}).get(SETTINGS_KEY)
        settings = Settings.from_dict(section) if section else None
        if settings is not None and settings.protect:
            # Not add_middleware, which puts a new one around those that are there.
            app.user_middleware.append(Middleware(ProtectMiddleware, settings=settings))

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Does nothing: vLLM's renderer is in the app's state."""


class ProtectMiddleware(BodyMiddleware):
    """Adds `kv_protect` to chats; refuses chats in which roles cannot be found."""

    paths = (CHATS, *_OTHER_CHATS)

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        super().__init__(app)
        self._settings = settings
        self._flag = f"--kv-protect {','.join(settings.protect)}"

    async def rewrite(self, body: bytes, path: str, state: Any) -> bytes:
        """Adds the roles' tokens to those that the request protects itself."""
        content = json_object(body)
        if content is None:
            return body
        if path in _OTHER_CHATS:
            raise ConfigError(f"{self._flag}: roles are found in {CHATS} only; send chats there.")
        renderer = state.online_renderer

        async def render(request: dict[str, Any]) -> list[int] | None:
            try:
                chat = ChatCompletionRequest.model_validate(request)
                rendered = await renderer.render_chat(chat, skip_mm_cache=True)
            except (ValidationError, ValueError, TypeError):
                return None
            return list(rendered[1][0]["prompt_token_ids"]) if isinstance(rendered, tuple) else None

        found = await find_role_tokens(content, self._settings.protect, render)
        if found is None:
            return body
        if content.get("truncate_prompt_tokens") is not None:
            raise ConfigError(
                f"{self._flag}: truncate_prompt_tokens would cut protected tokens off; leave it "
                "out, and send a shorter prompt."
            )
        if not found.spans:
            return body
        given = content.get(_XARGS) or {}
        options = request_options(given)
        spans = joined([*found.spans, *options.protect])
        size = state.vllm_config.cache_config.block_size or _DEFAULT_BLOCK_SIZE
        self._check_room(RoleTokens(spans, found.num_tokens), options, size)
        flat = [bound for span in spans for bound in span]
        return json.dumps({**content, _XARGS: {**given, _PROTECT: flat}}).encode()

    def _check_room(self, protected: RoleTokens, options: RequestOptions, block_size: int) -> None:
        """Refuses protected tokens beyond the prompt, or without room beside them.

        Raises:
            ConfigError: says how many there are, and how many a head keeps.
        """
        spans, num_tokens = protected
        if spans[-1][1] > num_tokens:
            raise ConfigError(
                f"vllm_xargs {_PROTECT}: expected tokens of the prompt, which has {num_tokens}, "
                f"found an end of {spans[-1][1]}."
            )
        settings = self._settings.for_request(options, num_tokens)
        rule = settings.rule(block_size, PolicyDemand())
        num_kept, number = rule.target_blocks(num_tokens, num_tokens), num_in_spans(*protected)
        is_due = rule.first_effective_position(num_tokens) is not None
        if is_due and not rule.has_room(num_kept, number):
            raise ConfigError(
                f"{self._flag}: {number} of the prompt's {num_tokens} tokens are protected, and a "
                f"head keeps {num_kept * block_size}, of which a block has to be left; shorten "
                "them, use a larger budget, or start the server with --kv-protect-mode fair."
            )
