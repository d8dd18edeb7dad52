"""The status page of a real server with two engines, two API processes and a key."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import urllib3

from tests import tiny_models
from tests.cli.chromium import CHROMIUM, tab
from tests.cli.server_process import OUR_SERVE, ROOT, serving
from tests.cli.test_server_metrics import scraped
from vllm_kvcompress.compression.recent_events import NUM_EVENTS

KEY = "a key of this test"
PROMPT_TOKENS = 640
BLOCKS = PROMPT_TOKENS // 32
KEPT = BLOCKS // 4
LAYERS, HEADS = 3, 2
ENGINES = ("0", "1")


def declared_plugins(folder: Path) -> Path:
    """Writes the entry points of this commit, which may differ from the installed ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = folder / "declared_plugins-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: declared-plugins\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {path}\n" for name, path in names.items())
            for group, names in project["entry-points"].items()
        )
    )
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("status")
    model = tiny_models.build("llama", folder)
    arguments = ["serve", str(model), "--served-model-name", "tiny", "--enforce-eager"]
    arguments += ["--max-model-len", "1024", "--dtype", "float32", "--api-key", KEY]
    arguments += ["--kv-policy", "adakv", "--kv-budget", "0.25", "--api-server-count", "2"]
    arguments += ["--data-parallel-size", str(len(ENGINES)), "--kv-min-tokens", "64"]
    arguments += ["--kv-reuse-conversations", "reuse", "--kv-read", "quest:0.5"]
    cores = sorted(os.sched_getaffinity(0))
    packages = declared_plugins(folder / "packages")
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        with serving(OUR_SERVE, arguments, folder / "server.log", packages=packages) as address:
            yield address


def ask(address: str, seed: int, engine: str | None = None) -> None:
    """Sends a request over its own connection, so that both API processes get some.

    Args:
        address: of the server.
        seed: of the prompt.
        engine: that is to answer; the server's balancer chooses one where this is None.
    """
    chosen = {} if engine is None else {"X-data-parallel-rank": engine}
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        client.completions.create(
            model="tiny",
            prompt=tiny_models.prompt(PROMPT_TOKENS, seed),
            max_tokens=4,
            extra_headers=chosen,
        )


def fetch(address: str, key: str | None = KEY) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return urllib3.request("GET", f"{address}/kvcompress/status", headers=headers)


def counted(address: str) -> dict[str, float]:
    document: dict[str, Any] = fetch(address).json()
    assert set(document["policies"]) == {"adakv"}
    return document["policies"]["adakv"]


def events_by_engine(address: str, at_least: float = 0) -> list[float]:
    """Waits for a total number of events, and returns each engine's count."""
    deadline = time.monotonic() + 300
    while True:
        counts = [scraped(address, engine)["kvcompress_events_total"] for engine in ENGINES]
        if sum(counts) >= at_least or time.monotonic() > deadline:
            return counts
        time.sleep(0.2)


def test_every_engine_compresses_and_counts_for_itself(address: str) -> None:
    before = events_by_engine(address)
    asked = (2, 3)
    for engine, num_requests in zip(ENGINES, asked, strict=True):
        for seed in range(num_requests):
            ask(address, seed, engine)
    after = events_by_engine(address, sum(before) + sum(asked))
    assert after == [before[0] + asked[0], before[1] + asked[1]]
    for engine in ENGINES:
        samples = scraped(address, engine)
        num_events = samples["kvcompress_events_total"]
        assert samples["kvcompress_info"] == 1
        assert samples["kvcompress_blocks_freed_total"] == BLOCKS * num_events
        assert samples["kvcompress_blocks_written_total"] == KEPT * num_events
    engines = {event["engine"] for event in fetch(address).json()["events"]}
    assert engines == {int(engine) for engine in ENGINES}


def test_the_balancer_gives_every_engine_its_share(address: str) -> None:
    before, num_requests = events_by_engine(address), 12
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: ask(address, seed), range(20, 20 + num_requests)))
    after = events_by_engine(address, sum(before) + num_requests)
    gained = [now - then for now, then in zip(after, before, strict=True)]
    assert sum(gained) == num_requests
    assert min(gained) >= 2


def test_totals_cover_all_api_servers_and_engines(address: str) -> None:
    """Every API process shows the counts of all."""
    before, num_requests = counted(address), 6
    for seed in range(num_requests):
        ask(address, seed, ENGINES[seed % 2])
    assert sum(events_by_engine(address, before["events"] + num_requests)) == (
        before["events"] + num_requests
    )
    answers = [fetch(address).json() for _ in range(6)]
    for document in answers:
        gained = {key: n - before[key] for key, n in document["policies"]["adakv"].items()}
        assert gained["events"] == num_requests
        assert gained["source_tokens"] == num_requests * 32 * BLOCKS
        assert gained["kept_tokens"] == num_requests * 32 * KEPT
        assert gained["blocks_freed"] == num_requests * BLOCKS
        assert gained["blocks_written"] == num_requests * KEPT
        assert set(document["engines"]) == set(ENGINES)
        assert document["settings"]["budget"] == 0.25
        assert document["model"] == "tiny"


def test_the_last_events_say_what_every_head_kept(address: str) -> None:
    for seed in range(3):
        ask(address, seed, ENGINES[seed % 2])
    events = fetch(address).json()["events"]
    assert 3 <= len(events) <= NUM_EVENTS
    assert [e["finished_at"] for e in events] == sorted(
        (e["finished_at"] for e in events), reverse=True
    )
    for event in events:
        assert (event["policy"], event["trigger"]) == ("adakv", "prompt")
        assert (event["source_tokens"], event["kept_tokens"]) == (32 * BLOCKS, 32 * KEPT)
        assert (event["blocks_freed"], event["blocks_written"]) == (BLOCKS, KEPT)
        assert event["seconds"] > 0
        kept = event["kept_by_head"]
        assert [len(heads) for heads in kept] == [HEADS] * LAYERS
        assert sum(sum(heads) for heads in kept) == LAYERS * HEADS * 32 * KEPT


@pytest.mark.parametrize("key", [None, "", "another", f"{KEY} "])
def test_numbers_need_the_servers_key(address: str, key: str | None) -> None:
    assert fetch(address, key).status == 401
    assert b"adakv" not in fetch(address, key).data
    page = urllib3.request("GET", f"{address}/kvcompress")
    assert page.status == 200
    assert b"adakv" not in page.data


def say(address: str, prompt: list[int], stream: bool) -> list[int]:
    """Returns the first engine's reply as token ids."""
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        answer: Any = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            stream=stream,
            extra_headers={"X-data-parallel-rank": ENGINES[0]},
            extra_body={"return_token_ids": True},
        )
        parts = answer if stream else [answer]
        return [token for part in parts if part.choices for token in part.choices[0].token_ids]


def test_streamed_conversation_continues_from_its_state(address: str) -> None:
    """Both turns are streamed; the second one has the same output without a stream.

    Its events are others than those of the tests before.
    """
    before = fetch(address).json()["engines"][ENGINES[0]]
    first = tiny_models.prompt(PROMPT_TOKENS, seed=50)
    second = [*first, *say(address, first, stream=True), *tiny_models.prompt(100, seed=51)]
    reply = say(address, second, stream=True)
    assert len(reply) == 8
    assert say(address, second, stream=False) == reply
    names, deadline = ("conversations_continued", "continued_tokens"), time.monotonic() + 300
    gained: list[float] = []
    while gained != [2, 2 * (PROMPT_TOKENS + 7)] and time.monotonic() < deadline:
        time.sleep(0.2)
        now = fetch(address).json()["engines"][ENGINES[0]]
        gained = [now[name] - before[name] for name in names]
    assert gained == [2, 2 * (PROMPT_TOKENS + 7)]
    assert set(fetch(address).json()["forgotten"]) == {
        *("evicted", "extended", "unfinished_event", "host_full")
    }


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_browser_shows_changing_numbers(address: str, tmp_path: Path) -> None:
    """The page asks for the key and shows events and heads, on a phone and on a desktop."""
    number = "document.querySelector('#tiles [data-name=events]')?.textContent"
    with tab(tmp_path / "profile") as page:
        page.resize(1400, 900)
        page.call("Page.navigate", url=f"{address}/kvcompress")
        page.wait_for(
            "!document.getElementById('login')?.hidden && document.readyState === 'complete'"
        )
        page.wait_for("document.getElementById('state').textContent === 'an API key is needed'")
        assert page.value("document.getElementById('main').hidden")
        unauthorized, page.errors = page.errors, []
        assert all("401" in error for error in unauthorized)
        page.value(f"document.getElementById('key').value = {KEY!r}")
        page.value("document.querySelector('#login button').click()")
        before = int(page.wait_for(number))
        ask(address, seed=9)
        page.wait_for(f"{number} === '{before + 1}'")
        tile = (
            "document.querySelector('#tiles [data-name=\"conversations continued\"]').textContent"
        )
        assert page.value(tile).isdecimal()
        tile = "document.querySelector('#tiles [data-name=\"pages read\"]').textContent"
        page.wait_for(f"{tile}.endsWith('%')")
        tile = "document.querySelector('#tiles [data-name=\"ratio, last 5 minutes\"]').textContent"
        page.wait_for("Object.values(shown.engines).every(engine => !engine.running)")
        assert 1.5 < float(page.value(tile).removesuffix("x")) < 4  # although nothing runs
        quiet = "{...shown, recent_ratios: {...shown.recent_ratios, all: null}}"
        assert page.value(f"render({quiet}); {tile}") == "idle"
        assert "evicted" in page.value("document.getElementById('forgotten').textContent")
        fields = page.value("document.querySelectorAll('#heat .field').length")
        assert fields == LAYERS * HEADS
        for width in (400, 1400):
            page.resize(width, 900)
            page.screenshot(tmp_path / f"{width}.png")
            wide = page.value("document.documentElement.scrollWidth")
            assert wide <= width, "it scrolls sideways"
            sizes = page.value(
                "[...document.querySelectorAll('.tile b, td, th, .caption, #state')]"
                ".map(each => parseFloat(getComputedStyle(each).fontSize))"
            )
            assert min(sizes) >= 12
            cells = page.value(
                "[...document.querySelectorAll('#events tbody tr:first-child td')]"
                ".filter(each => each.offsetWidth).map(each => each.getBoundingClientRect().right)"
            )
            assert cells
            assert max(cells) <= width, "an event's row does not fit"
        assert page.errors == []
