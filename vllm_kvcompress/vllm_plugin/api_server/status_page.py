"""The status page `GET /kvcompress`, on the server's own port.

vLLM loads it (entry point `vllm.endpoint_plugins`) where `VLLM_PLUGINS` names it, which
`vllm-kvcompress serve` does. Without settings in `--additional-config` it adds no routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from argparse import Namespace
from importlib.resources import files
from itertools import chain
from operator import itemgetter
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient

from vllm_kvcompress import __version__
from vllm_kvcompress.compression.recent_events import NUM_EVENTS
from vllm_kvcompress.config.fields import SETTINGS_KEY, STATUS_PLUGIN
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.metrics.status import RECENT_SECONDS, RecentRatio, totals
from vllm_kvcompress.vllm_plugin.compat.server import ask_workers

_SAMPLE_SECONDS = RECENT_SECONDS / 10  # counters are noted down, whether or not somebody looks
_RPC_SECONDS = 1.0  # workers are asked no more often, however many look at the page
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'",
}

router = APIRouter(include_in_schema=False)


class StatusPage:
    """Adds the page to vLLM's app; implements vLLM's endpoint plugin."""

    name = STATUS_PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes if the server has settings of ours."""
        if SETTINGS_KEY in (app.state.args.additional_config or {}):
            app.include_router(router)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Stores the source of the page's numbers, and begins to sample the counters."""
        state.kvcompress_status = status = Status(engine_client, args)
        if SETTINGS_KEY in (args.additional_config or {}):
            await status.ask_for_heads()
            state.kvcompress_sampling = asyncio.create_task(status.sample_for_ever())


class Status:
    """Source of the page's numbers.

    Counts come from the registry behind /metrics, which covers all API servers and engines; kept
    tokens by head come from the workers of all engines.
    """

    def __init__(self, engine_client: Any, args: Namespace) -> None:
        self._engine_client = engine_client
        section = (args.additional_config or {}).get(SETTINGS_KEY)
        settings = Settings.from_dict(section) if section else None
        self._settings = settings.to_dict() if settings is not None else {}
        # Without compression (prompts are shortened only) workers are vLLM's and have no events.
        self._ours = settings is not None and settings.acts
        self._model = (args.served_model_name or [args.model])[0]
        keys = args.api_key or [os.environ.get("VLLM_API_KEY")]  # as vLLM has it
        self._keys = [_digest(key) for key in keys if key]
        self._heads: dict[int, str] = {}
        self._asked = float("-inf")
        self._events: list[dict[str, Any]] = []
        self._asking = asyncio.Lock()
        self._recent_ratio = RecentRatio()

    def admits(self, authorization: str) -> bool:
        """Whether a request may see the numbers: it needs a key if the server has any."""
        scheme, _, key = authorization.partition(" ")
        matches = [secrets.compare_digest(_digest(key), own) for own in self._keys]
        return not self._keys or (scheme.lower() == "bearer" and any(matches))

    async def ask_for_heads(self) -> None:
        """Asks all engines where their measured heads come from, and shows it in /metrics."""
        if not self._ours:
            return
        from vllm_kvcompress.metrics.prometheus import process_metrics

        engines = await ask_workers(self._engine_client, "kvcompress_heads")
        for engine, (source, *_) in engines.items():
            self._heads[engine] = source
            process_metrics().show_heads(source, self._model, str(engine))

    async def document(self) -> dict[str, Any]:
        """Returns all numbers of the page."""
        counts = _totals()
        return {
            "version": __version__,
            "model": self._model,
            "settings": self._settings,
            "measured_heads": self._heads,
            **counts,
            "recent_ratios": self._recent_ratio.ratios(counts["engines"]),
            "events": await self._recent_events(),
        }

    async def sample_for_ever(self) -> None:
        """Samples the counters, from which the ratio of the last minutes follows."""
        while True:
            self._recent_ratio.add(time.monotonic(), _totals()["engines"])
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _recent_events(self) -> list[dict[str, Any]]:
        """Returns the last events of all engines, latest first, with the heads of all ranks."""
        async with self._asking:
            if self._ours and time.monotonic() - self._asked >= _RPC_SECONDS:
                engines = await ask_workers(self._engine_client, "kvcompress_recent_events")
                self._events = latest_first(engines)
                self._asked = time.monotonic()
            return self._events


def _totals() -> dict[str, Any]:
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return totals(get_prometheus_registry().collect())


def latest_first(engines: dict[int, list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Merges the events of every engine's ranks, and returns the latest first."""
    events = [
        _joined(engine, parts)
        for engine, ranks in engines.items()
        for parts in zip(*ranks, strict=False)
    ]
    return sorted(events, key=itemgetter("finished_at"), reverse=True)[:NUM_EVENTS]


def _joined(engine: int, parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Joins the parts of one event from all ranks, head after head."""
    layers = zip(*(part["kept_by_head"] for part in parts), strict=True)
    heads = [list(chain(*heads)) for heads in layers]
    return {**parts[0], "engine": engine, "kept_by_head": heads}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@router.get("/kvcompress")
async def page() -> HTMLResponse:
    """Serves the page; its numbers come from the other route, which asks for the server's key."""
    text = files(__package__).joinpath("status_page.html").read_text("utf-8")
    return HTMLResponse(text, headers=_HEADERS)


@router.get("/kvcompress/status")
async def status(request: Request) -> JSONResponse:
    """Serves the page's numbers as JSON, to clients with a key of the server."""
    source: Status = request.app.state.kvcompress_status
    if not source.admits(request.headers.get("Authorization", "")):
        return JSONResponse({"error": "Unauthorized"}, status_code=401, headers=_HEADERS)
    return JSONResponse(await source.document(), headers=_HEADERS)
