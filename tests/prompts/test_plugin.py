"""The middleware in an app like vLLM's: it runs after keys are checked and blocks no loop."""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from tests.prompts.test_shortener import LONG, SHORT, Scorer, settings
from tests.prompts.trained import train
from vllm_kvcompress.config.fields import SETTINGS_KEY
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.config.texts import start_lines
from vllm_kvcompress.errors import ConfigError, UnsupportedError
from vllm_kvcompress.metrics.prompts import PromptMetrics
from vllm_kvcompress.prompts.shortener import PromptShortener
from vllm_kvcompress.vllm_plugin.api_server.prompt_plugin import PromptMiddleware, PromptPlugin
from vllm_kvcompress.vllm_plugin.api_server.request_bodies import CHATS as PATH
from vllm_kvcompress.vllm_plugin.startup.refusals import check_plugins

KEY = "a key"


def served(score: Any) -> tuple[FastAPI, CollectorRegistry]:
    """An app that returns what it is sent, with vLLM's middleware around ours."""
    app, registry = FastAPI(), CollectorRegistry()

    @app.post(PATH)
    @app.post("/v1/completions")
    async def repeat(request: Request) -> Any:
        body = await request.body()
        assert int(request.headers["content-length"]) == len(body)
        return json.loads(body)

    shortener = PromptShortener(settings(min_request_rate=0.2, max_request_rate=1.0), score)
    metrics = PromptMetrics(registry)
    metrics.start("m")
    arguments = {"shortener": shortener, "metrics": metrics, "model_name": "m"}
    app.user_middleware.append(Middleware(PromptMiddleware, **arguments))
    init_entrypoints_middleware(vllm_arguments(), app, ("generate",))
    return app, registry


def vllm_arguments() -> Namespace:
    from vllm_kvcompress.cli import launch

    return launch.parse(["serve", "m", "--api-key", KEY])[1]


def client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers)


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "tool", "content": LONG}], **more}


def test_chats_are_shortened_and_other_requests_pass() -> None:
    app, registry = served(Scorer())

    async def ask() -> None:
        async with client(app) as http:
            answer = await http.post(PATH, json=chat())
            assert answer.json()["messages"][0]["content"] == SHORT
            assert (await http.post("/v1/completions", json=chat())).json() == chat()
            refused = await http.post(PATH, json=chat(vllm_xargs={"prompt_rate": 0.1}))
            assert refused.status_code == 400
            assert "allows 0.2 to 1" in refused.json()["error"]["message"]
            assert (await http.post(PATH, content=b"{")).status_code == 500  # of this app
            assert (await http.get("/nowhere")).status_code == 404

    asyncio.run(ask())
    count = registry.get_sample_value
    assert count("kvcompress_prompt_source_tokens_total", {"model_name": "m"}) == 8
    assert count("kvcompress_prompt_kept_tokens_total", {"model_name": "m"}) == 4
    assert count("kvcompress_prompt_seconds_count", {"model_name": "m"}) == 2
    texts = {"model_name": "m", "remembered": "no"}
    assert count("kvcompress_prompt_texts_total", texts) == 1


@pytest.mark.parametrize("key", [None, "Bearer another", KEY])
def test_requests_without_the_api_key_are_not_scored(key: str | None) -> None:
    scorer = Scorer()
    app, registry = served(scorer)

    async def ask() -> int:
        async with client(app) as http:
            http.headers.pop("Authorization")
            headers = {} if key is None else {"Authorization": key}
            return (await http.post(PATH, json=chat(), headers=headers)).status_code

    assert asyncio.run(ask()) == 401
    assert scorer.asked == []
    assert registry.get_sample_value("kvcompress_prompt_seconds_count", {"model_name": "m"}) == 0


def test_the_loop_never_waits_for_the_classifier() -> None:
    """Other requests are answered while the classifier runs."""
    reads, may_end = threading.Event(), threading.Event()

    def slow(text: str) -> Any:
        reads.set()
        assert may_end.wait(60)
        return Scorer()(text)

    app, _ = served(slow)

    async def ask() -> None:
        async with client(app) as http:
            waits = asyncio.create_task(http.post(PATH, json=chat()))
            while not reads.is_set():
                await asyncio.sleep(0.01)
            assert (await http.post("/v1/completions", json=chat())).status_code == 200
            assert not waits.done()
            may_end.set()
            assert (await waits).json()["messages"][0]["content"] == SHORT

    asyncio.run(ask())


def test_disconnected_clients_are_not_scored_and_the_app_is_told() -> None:
    scorer = Scorer()
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([await receive(), await receive()])

    shortener, metrics = PromptShortener(settings(), scorer), PromptMetrics(CollectorRegistry())
    middleware = PromptMiddleware(app, shortener, metrics, "m")
    body = json.dumps(chat()).encode()
    scope = {"type": "http", "method": "POST", "path": f"/root{PATH}", "root_path": "/root"}
    scope["headers"] = [(b"content-length", b"1")]

    async def say(*messages: dict[str, Any]) -> None:
        rest = list(messages)

        async def receive() -> Any:
            return rest.pop(0)

        await middleware(scope, receive, None)  # type: ignore[arg-type]

    part = {"type": "http.request", "body": body[:20], "more_body": True}
    asyncio.run(say(part, {"type": "http.disconnect"}))
    assert (scorer.asked, heard) == ([], [])
    asyncio.run(say(part, {"type": "http.request", "body": body[20:]}, {"type": "http.disconnect"}))
    assert json.loads(heard[0]["body"])["messages"][0]["content"] == SHORT
    assert heard[1]["type"] == "http.disconnect"


def with_settings(section: dict[str, Any] | None) -> FastAPI:
    app = FastAPI()
    additional = None if section is None else {SETTINGS_KEY: section}
    app.state.args = Namespace(additional_config=additional, served_model_name=None, model="m")
    return app


def test_the_plugin_acts_where_the_settings_say_so(tmp_path: Path) -> None:
    """Innermost, whether other middleware comes before or after it; refused without a model."""
    for section in (None, {"policy": "none"}):
        app = with_settings(section)
        PromptPlugin().attach_router(app)
        assert app.user_middleware == []
    classifier = train(tmp_path)
    app = with_settings({"policy": "none", "prompts": {"compressor": f"llmlingua2:{classifier}"}})
    app.add_middleware(PlainMiddleware)
    PromptPlugin().attach_router(app)
    app.add_middleware(PlainMiddleware)
    assert [each.cls for each in app.user_middleware] == [
        *(PlainMiddleware, PlainMiddleware, PromptMiddleware)
    ]
    nowhere = {"policy": "none", "prompts": {"compressor": f"llmlingua2:{tmp_path / 'nowhere'}"}}
    with pytest.raises(ConfigError, match="no model there"):
        PromptPlugin().attach_router(with_settings(nowhere))


class PlainMiddleware:
    def __init__(self, app: Any) -> None:
        self.app = app


def refused(*arguments: str) -> str:
    """The error with which `serve` refuses to start."""
    from vllm_kvcompress.cli import launch, serve

    with pytest.raises(ConfigError) as caught:
        launch.check_command(launch.vllm_command(serve.parse_request(list(arguments))))
    return str(caught.value)


def test_bad_prompt_options_are_refused_before_the_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = str(Path(__file__).parents[2] / "models" / "reference")
    option = ["--prompt-compressor", "llmlingua2:/no/folder"]
    assert "no model there that can be read" in refused(reference, *option)
    llama = ["--prompt-compressor", f"llmlingua2:{reference}"]
    assert "found LlamaForCausalLM" in refused(reference, *llama)
    assert "less than or equal to 1, found 2" in refused(reference, *option, "--prompt-rate", "2")
    assert "compressor (--prompt-compressor) is missing" in refused(
        reference, "--prompt-rate", "0.5"
    )
    assert "expected NAME=VALUE" in refused(reference, *option, "--prompt-role-rate", "tool")
    reuse = ["--kv-policy", "snapkv", "--kv-reuse-conversations"]
    assert "would find nothing" in refused(reference, *option, *reuse)
    assert "--grpc starts a server that does not change chats" in refused(
        reference, *option, "--grpc"
    )
    monkeypatch.setenv("VLLM_PLUGINS", SETTINGS_KEY)
    assert "add kvcompress-prompts to it" in refused(reference, *option)
    with pytest.raises(UnsupportedError, match="needs the plugin kvcompress-prompts"):
        check_plugins(
            Settings.from_dict({"policy": "none", "prompts": {"compressor": "llmlingua2:m"}})
        )


def test_prompts_alone_leave_the_engine_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvcompress.cli import launch, serve

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    options = ["m", "--prompt_compressor", "llmlingua2:c", "--prompt-role-rate", "tool=0.3"]
    request = serve.parse_request([*options, "--prompt-force-token", r"\n"])
    command = launch.vllm_command(request)
    assert "--worker-cls" not in command
    assert json.loads(command[-1])[SETTINGS_KEY]["prompts"] == {
        "compressor": "llmlingua2:c",
        "roles": {"tool": 0.3},
        "force_tokens": ["\n"],
    }
    for page in (True, False):
        names = launch.environment(replace(request, status_page=page))["VLLM_PLUGINS"].split(",")
        assert "kvcompress-prompts" in names
        assert ("kvcompress-status" in names) == page
    both = serve.parse_request([*options, "--kv-policy", "snapkv"])
    assert "--worker-cls" in launch.vllm_command(both)
    assert "shortened to 0.5 of their tokens by c" in start_lines(both.settings)[0]
    with pytest.raises(ConfigError, match="Ray Serve"):
        serve.run(Namespace(rest=[*options, "--print-vllm-command=ray"]))
