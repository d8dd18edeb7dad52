"""Middleware that changes or refuses the body of a request, after authentication.

vLLM's own middleware, such as the check of keys, and those of `--middleware` run before it, where
it is the last of the app's list.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_kvcompress.errors import ConfigError

CHATS = "/v1/chat/completions"


class BodyMiddleware(ABC):
    """Hands the bodies of POST requests to some paths to `rewrite`; passes on all others.

    Attributes:
        paths: the paths.
    """

    paths: tuple[str, ...] = (CHATS,)

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    @abstractmethod
    async def rewrite(self, body: bytes, path: str, state: Any) -> bytes:
        """Returns the body that vLLM reads.

        Args:
            body: as the client sent it, which may be no JSON; vLLM refuses that.
            path: of the request.
            state: of vLLM's app.

        Raises:
            ConfigError: the client gets the message, with HTTP 400.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or path not in self.paths:
            await self._app(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        try:
            changed = await self.rewrite(body, path, getattr(scope.get("app"), "state", None))
        except ConfigError as error:
            await _refusal(str(error))(scope, receive, send)
            return
        if changed is not body:
            scope = {**scope, "headers": list(scope["headers"])}
            MutableHeaders(scope=scope)["content-length"] = str(len(changed))
        await self._app(scope, _replay(changed, receive), send)


def json_object(body: bytes) -> dict[str, Any] | None:
    """Parses a body; None: it is no JSON object."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a channel with this body first, then the client's further messages."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def _refusal(reason: str) -> JSONResponse:
    """Makes a response 400 in vLLM's form."""
    error: dict[str, Any] = {"message": reason, "type": "BadRequestError", "param": None}
    return JSONResponse({"error": {**error, "code": 400}}, status_code=400)
