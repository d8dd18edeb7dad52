"""Tokens that requests protect, on the real engine: every head keeps them, whatever compresses."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Run, alone, check_as_alone, request
from tests.engine.oracle import check_decoding, kept_positions
from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options
from vllm_kvcompress.vllm_plugin.request_options import RequestCheck

BLOCK, LAYERS = 32, 3
CHECKED = {"KVCOMPRESS_CHECK": "1"}
SPANS = [40, 70, 300, 333]
TOKENS = {*range(40, 70), *range(300, 333)}


def test_decoding_matches_dense_attention_over_what_is_kept(llama: str, run_engine: Run) -> None:
    """Every head keeps the spans, and attention is that of the kept tokens, log-probabilities too.

    The step's other request, which protects nothing, keeps what it keeps alone.
    """
    ours = request("ours", prompt(640, 1), 40, xargs={"kv_protect": SPANS})
    other = request("other", prompt(650, 2), 40)
    settings = {"policy": "adakv+criticalkv", "budget": 0.25}
    phases = [[ours], [other, {**ours, "id": "again"}], [alone(other)]]
    report = run_engine(
        llama, phases, settings=settings, record_kept=True, max_num_batched_tokens=2048
    )
    kept = report["kept"][:LAYERS]
    for record in kept:
        assert sum(record["counts"]) == 2 * 5  # a quarter of 20 blocks
    assert all(set(tokens) >= TOKENS for layer in kept_positions(kept, LAYERS) for tokens in layer)
    check_decoding(llama, prompt(640, 1), kept, report["outputs"]["ours"])
    assert report["outputs"]["again"]["tokens"] == report["outputs"]["ours"]["tokens"]
    check_as_alone(report["outputs"], ["other"])


def test_fair_spans_keep_their_share_where_they_exceed_the_budget(
    llama: str, run_engine: Run
) -> None:
    """300 of 640 tokens are protected, and heads keep 160 in the mean."""
    ours = request("ours", prompt(640, 1), 40, xargs={"kv_protect": [0, 100, 300, 500]})
    settings = {"policy": "adakv+criticalkv", "budget": 0.25, "protect_mode": "fair"}
    report = run_engine(llama, [[ours]], settings=settings, record_kept=True)
    kept = report["kept"][:LAYERS]
    assert all(sum(record["counts"]) == 2 * 5 for record in kept)  # the blocks of any policy
    window = 32  # which adakv protects
    for layer in kept_positions(kept, LAYERS):
        for tokens in layer:
            free = len(tokens) - window
            for first, last in ((0, 100), (300, 500)):
                share = (last - first) * free // 640
                assert 0 < share <= len({*tokens} & {*range(first, last)})
    check_decoding(llama, prompt(640, 1), kept, report["outputs"]["ours"])


SERVERS: dict[str, dict[str, Any]] = {
    "fair": {"policy": "adakv", "budget": 0.25, "trigger": "decode:32", "protect_mode": "fair"},
    "chunks": {"policy": "snapkv", "budget": 0.4, "trigger": "chunk:96,decode:24"},
    "in any order": {"policy": "keydiff", "budget": 160, "trigger": "chunk:128,decode:32"},
    "ceiling": {"policy": "h2o", "ceiling": 200},
    "pressure": {"policy": "spans", "budget": 0.5, "trigger": "pressure:0.6"},
    "measured heads": {"policy": "auto", "budget": 0.25, "trigger": "prompt,decode:32"},
}


@pytest.mark.parametrize("name", SERVERS)
def test_any_trigger_keeps_them_to_the_end(llama: str, run_engine: Run, name: str) -> None:
    """Preempted and in one batch, requests have the outputs that they have alone.

    A prompt that differs only within its protected span has another answer: the span is read.
    """
    other = prompt(500, seed=3)
    other[45:60] = prompt(15, seed=9)
    requests = [
        request("spans", prompt(500, seed=3), 120, xargs={"kv_protect": SPANS}),
        request("other", other, 120, xargs={"kv_protect": SPANS}),
        request("plain", prompt(450, seed=4), 120),
    ]
    report = run_engine(
        llama,
        [requests, *([alone(one)] for one in requests)],
        settings=SERVERS[name],
        environment=CHECKED,
        num_gpu_blocks_override=45,
        max_model_len=1024,
    )
    if name != "pressure":  # which depends on the others
        check_as_alone(report["outputs"], ("spans", "other", "plain"))
    outputs = report["outputs"]
    assert outputs["spans"]["tokens"] != outputs["other"]["tokens"]
    assert report["events"]
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_a_prompt_is_kept_whole_under_a_ceiling(llama: str, run_engine: Run) -> None:
    """Its answer alone is evicted; a prompt that the ceiling has no room for is compressed."""
    settings = {"policy": "adakv", "ceiling": 256, "keep_prompt": True}
    phases = [[request("fits", prompt(100, 1), 400)], [request("does not", prompt(300, 2), 60)]]
    report = run_engine(llama, phases, settings=settings, record_kept=True, environment=CHECKED)
    first = report["events"][0]
    assert first["trigger"] == "ceiling"
    assert first["source_tokens"] == 256
    for first in range(0, 3 * LAYERS, LAYERS):  # three events of the first request
        for layer in kept_positions(report["kept"][first : first + LAYERS], LAYERS):
            for places in layer:  # the prompt's come first, at each event
                assert places[:100] == list(range(100))
    assert report["most_held_tokens"] <= 256
    assert len(report["outputs"]["does not"]["tokens"]) == 60


def test_a_part_of_a_prompt_is_kept_under_a_ceiling(llama: str, run_engine: Run) -> None:
    """At every event a quarter of the prompt, which alone exceeds the ceiling, in every head."""
    settings = {"policy": "adakv", "ceiling": 256, "keep_prompt": 0.25}
    phases = [[request("ours", prompt(400, 1), 400)]]
    report = run_engine(llama, phases, settings=settings, record_kept=True, environment=CHECKED)
    assert len(report["events"]) > 3
    last = report["kept"][:LAYERS]  # of the first event, whose positions are tokens
    for layer in kept_positions(last, LAYERS):
        assert all(len({*places} & {*range(256)}) >= 64 for places in layer)
    assert report["most_held_tokens"] <= 256


def test_a_budget_without_room_leaves_the_request_whole(llama: str, run_engine: Run) -> None:
    """It is counted, and answered as stock vLLM answers."""
    protected = request("most", prompt(640, 1), 20, xargs={"kv_protect": [0, 150]})
    beyond = request("beyond", prompt(640, 2), 20, xargs={"kv_protect": [[560, 9000]]})
    report = run_engine(
        llama, [[protected], [beyond]], settings={"policy": "adakv", "budget": 0.25}
    )
    stock = run_engine(llama, [[protected]])
    assert report["outputs"]["most"]["tokens"] == stock["outputs"]["most"]["tokens"]
    assert report["skipped"] == {"adakv protected_tokens": 1}
    assert len(report["events"]) == 1


@pytest.mark.parametrize("mode", ["whole", "fair"])
def test_conversations_go_on_with_the_same_spans_only(
    llama: str, run_engine: Run, mode: str
) -> None:
    """What a state keeps follows from what its request protected."""
    same = {"kv_protect": [0, 100]}
    first = request("first", prompt(500, seed=1), 20, xargs=same)
    phases = [[first]]
    for name, xargs in (("same", same), ("none", {}), ("other", {"kv_protect": [0, 90]})):
        phases.append([request(name, prompt(40, seed=5), 60, follows="first", xargs=xargs)])
    settings: dict[str, Any] = {"policy": "attention", "budget": 0.4}
    settings["trigger"] = "prompt,decode:32"
    settings |= {"reuse_conversations": "reuse", "protect_mode": mode}
    report = run_engine(llama, phases, settings=settings, environment=CHECKED)
    assert report["conversations_continued"] == 1


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"policy": "adakv"}, [5], "starts and ends"),
    ({"policy": "adakv"}, [5, 5], "starts and ends"),
    ({"policy": "adakv"}, [9, 5], "starts and ends"),
    ({"policy": "adakv"}, [-1, 5], "starts and ends"),
    ({"policy": "adakv"}, [0, 10, 5, 20], "ascending and disjoint"),
    ({"policy": "adakv"}, ["0", "5"], "starts and ends"),
    ({"policy": "adakv"}, [0.5, 5], "starts and ends"),
    ({"policy": "adakv"}, [True, 5], "starts and ends"),
    ({"policy": "adakv"}, list(range(0, 130)), "up to 64 spans"),
    ({"policy": "kvmerger"}, [0, 5], "kvmerger merges evicted tokens"),
    ({"policy": "adakv", "read": "quest:0.5"}, [0, 5], "read a part of the cache"),
    ({"policy": "adakv", "ceiling": 512, "keep_prompt": 0.5}, [0, 5], "keeps 0.5 of every"),
    ({"policy": "adakv", "budget": 512}, [0, 600], "fewer tokens than the 512 .* found 600"),
    ({"policy": "adakv", "ceiling": 256}, [0, 200, 210, 300], "the 256 .* found 290"),
]


@pytest.mark.parametrize(("settings", "spans", "message"), REFUSED, ids=str)
def test_what_cannot_be_protected_is_refused(
    settings: dict[str, Any], spans: Any, message: str
) -> None:
    """By the class that such a server loads, when the request comes in."""
    named = plugin_options(Settings.from_dict(settings))["logits_processors"].partition(":")[2]
    check = getattr(__import__(RequestCheck.__module__, fromlist=[named]), named)
    with pytest.raises(ConfigError, match=message):
        check.validate_params(SamplingParams(extra_args={"kv_protect": spans}))


def test_policies_that_merge_stay_beside_fair_spans() -> None:
    """A request with one of them may protect nothing, so the server need not refuse it."""
    given = {"policy": "adakv", "protect_mode": "fair", "request_policies": ["d2o"]}
    pipelines = resolve_settings(Settings.from_dict(given))
    assert [pipeline.span_share for pipeline in pipelines.values()] == [None, 1.0]
    with pytest.raises(ConfigError, match="--kv-protect-mode: d2o merges"):
        resolve_settings(Settings.from_dict({"policy": "d2o", "protect_mode": "fair"}))


@pytest.mark.parametrize("spans", [[], [0, 5], [0, 5, 5, 9], [[0, 5], [7, 9]], [0.0, 5.0]])
def test_spans_are_pairs_or_flat(spans: list[Any]) -> None:
    RequestCheck.validate_params(SamplingParams(extra_args={"kv_protect": spans}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "adakv"}, "expected a ceiling or the trigger decode:N"),
        ({"policy": "adakv", "ceiling": 512, "read": "quest:0.5"}, "expected no --kv-read"),
        ({"policy": "kvmerger", "ceiling": 512}, "merges evicted tokens"),
        (
            {"policy": "adakv", "trigger": "decode:64", "reuse_conversations": "reuse"},
            "expected no --kv-reuse-conversations",
        ),
        ({"policy": "adakv", "ceiling": 512, "protect_mode": "fair"}, "keep_prompt says how much"),
        ({"policy": "adakv", "after_reasoning": 0.1, "keep_prompt": 0.5}, "kept whole, as answers"),
        ({"policy": "adakv", "ceiling": 512, "protect": "tools", "keep_prompt": 0.5}, "no part of"),
    ],
    ids=str,
)
def test_prompts_that_could_not_stay_whole_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(Settings.from_dict({"keep_prompt": True, **settings}))
