"""`GET /kvcompress`: a page that says what compression does, on the server's own port.

vLLM loads it (entry point `vllm.endpoint_plugins`) where `VLLM_PLUGINS` names it, which
`vllm-kvcompress serve` sees to. Without settings in `--additional-config` it adds no routes.
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
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse

from vllm_kvcompress import __version__
from vllm_kvcompress.compression.recent_events import NUM_EVENTS
from vllm_kvcompress.config import SETTINGS_KEY, STATUS_PLUGIN, Settings
from vllm_kvcompress.metrics.status import RECENT_SECONDS, RecentRatio, totals
from vllm_kvcompress.vllm_plugin.startup import compat

if TYPE_CHECKING:
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

_SAMPLE_SECONDS = RECENT_SECONDS / 10  # counters are noted down, whether or not somebody looks
_RPC_SECONDS = 1.0  # workers are asked no more often, however many look at the page
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'",
}

router = APIRouter(include_in_schema=False)


class StatusPage:
    """vLLM's contract for such plugins: routes first, their state once the engine is there."""

    name = STATUS_PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes, on a server that compresses."""
        if SETTINGS_KEY in (app.state.args.additional_config or {}):
            app.include_router(router)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Keeps what the routes ask, and begins to sample the counters."""
        state.kvcompress_status = status = Status(engine_client, args)
        if SETTINGS_KEY in (args.additional_config or {}):
            state.kvcompress_sampling = asyncio.create_task(status.sample_for_ever())


class Status:
    """Where the page's numbers come from.

    Counts come from the registry behind /metrics, which covers all API servers and engines; what
    is kept by head is asked of the workers of all engines.
    """

    def __init__(self, engine_client: Any, args: Namespace) -> None:
        self._engine_client = engine_client
        section = (args.additional_config or {}).get(SETTINGS_KEY)
        settings = Settings.from_dict(section) if section else None
        self._settings = settings.to_dict() if settings is not None else {}
        # Workers that only vLLM's own classes made, as for shorter prompts alone, know no events.
        self._ours = settings is not None and settings.acts
        self._model = (args.served_model_name or [args.model])[0]
        keys = args.api_key or [os.environ.get("VLLM_API_KEY")]  # as vLLM has it
        self._keys = [_digest(key) for key in keys if key]
        self._asked = float("-inf")
        self._events: list[dict[str, Any]] = []
        self._asking = asyncio.Lock()
        self._recent_ratio = RecentRatio()

    def admits(self, authorization: str) -> bool:
        """Whether a request may see the numbers: with one of the server's keys, if it has any."""
        scheme, _, key = authorization.partition(" ")
        matches = [secrets.compare_digest(_digest(key), own) for own in self._keys]
        return not self._keys or (scheme.lower() == "bearer" and any(matches))

    async def document(self) -> dict[str, Any]:
        """Everything that the page shows."""
        counts = _totals()
        return {
            "version": __version__,
            "model": self._model,
            "settings": self._settings,
            **counts,
            "recent_ratios": self._recent_ratio.ratios(counts["engines"]),
            "events": await self._recent_events(),
        }

    async def sample_for_ever(self) -> None:
        """Notes the counters down, so that the ratio of the last minutes is known at any time."""
        while True:
            self._recent_ratio.add(time.monotonic(), _totals()["engines"])
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _recent_events(self) -> list[dict[str, Any]]:
        """The last events of all engines, the latest first, with the heads of all ranks."""
        async with self._asking:
            if self._ours and time.monotonic() - self._asked >= _RPC_SECONDS:
                engines = await compat.ask_workers(self._engine_client, "kvcompress_recent_events")
                self._events = latest_first(engines)
                self._asked = time.monotonic()
            return self._events


def _totals() -> dict[str, Any]:
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return totals(get_prometheus_registry().collect())


def latest_first(engines: dict[int, list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The last events of any engine, from those of every rank of each."""
    events = [
        _joined(engine, parts)
        for engine, ranks in engines.items()
        for parts in zip(*ranks, strict=False)
    ]
    return sorted(events, key=itemgetter("finished_at"), reverse=True)[:NUM_EVENTS]


def _joined(engine: int, parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One event of all ranks, side by side."""
    layers = zip(*(part["kept_by_head"] for part in parts), strict=True)
    heads = [list(chain(*heads)) for heads in layers]
    return {**parts[0], "engine": engine, "kept_by_head": heads}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@router.get("/kvcompress")
async def page() -> HTMLResponse:
    """The page; its numbers come from the other route, which asks for the server's key."""
    text = files(__package__).joinpath("status_page.html").read_text("utf-8")
    return HTMLResponse(text, headers=_HEADERS)


@router.get("/kvcompress/status")
async def status(request: Request) -> JSONResponse:
    """The numbers."""
    source: Status = request.app.state.kvcompress_status
    if not source.admits(request.headers.get("Authorization", "")):
        return JSONResponse({"error": "Unauthorized"}, status_code=401, headers=_HEADERS)
    return JSONResponse(await source.document(), headers=_HEADERS)
