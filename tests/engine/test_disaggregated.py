"""One engine reads prompts, another generates from them: NIXL moves the blocks between the two."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.cli.server_process import free_port
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")

ADAKV = {"policy": "adakv", "budget": 0.25, "request_policies": ["none"]}
WHOLE = {"xargs": {"kv_policy": "none"}}
HANDED_OVER = "KVCOMPRESS_TEST_HANDED_OVER"  # environment: a file
TAKEN = "KVCOMPRESS_TEST_TAKEN"
SECONDS = 120
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}

Disaggregate = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


def hand_over(engine: Any, books: Any, report: dict[str, Any]) -> None:
    """Writes what the client of a prefill engine is told; runs until the prompts were taken."""
    sent = {name: output["transfer"] for name, output in report["outputs"].items()}
    path = Path(os.environ[HANDED_OVER])
    path.with_suffix(".part").write_text(json.dumps(sent))
    path.with_suffix(".part").rename(path)
    report["held_until_taken"] = books.pool.num_gpu_blocks - 1 - books.pool.get_num_free_blocks()
    end = time.monotonic() + SECONDS
    while not Path(os.environ[TAKEN]).exists() or books.scheduler.requests:
        engine.step()
        books.check()
        assert time.monotonic() < end, f"not taken: {list(books.scheduler.requests)}"
        time.sleep(0.01)


@pytest.fixture
def disaggregate(run_engine: Run, tmp_path: Path) -> Iterator[Disaggregate]:
    """Reads prompts in one engine, and generates in another; returns the reports of both."""
    pool = ThreadPoolExecutor(1)

    def run(
        model: str,
        requests: list[dict[str, Any]],
        *,
        kind: str = "NixlConnector",
        prefill: dict[str, Any] | None,
        decode: dict[str, Any] | None,
        before: dict[str, list[dict[str, Any]]] | None = None,
        blocks: dict[str, int] | None = None,
        extra: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        files = {HANDED_OVER: str(tmp_path / "sent"), TAKEN: str(tmp_path / "taken")}

        def engine(
            requests: list[dict[str, Any]], role: str, settings: Any, **more: Any
        ) -> dict[str, Any]:
            transfer = {**NIXL, "kv_connector": kind, "kv_role": role}
            transfer["kv_connector_extra_config"] = extra or {}
            environment = {
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_TLS": "tcp,self,sm",
                "UCX_NET_DEVICES": "lo",
                **files,
            }
            number = (blocks or {}).get(role, 400)
            first = (before or {}).get(role)
            return run_engine(
                model,
                [requests] if first is None else [first, requests],
                num_gpu_blocks_override=number,
                settings=settings,
                environment=environment,
                kv_transfer_config=transfer,
                **options,
                **more,
            )

        reads = [
            {key: value for key, value in one.items() if key != "abort_at_step"}
            | {"max_tokens": 1, "xargs": to_send(one)}
            for one in requests
        ]
        name = f"{__name__}:hand_over"
        reading = pool.submit(engine, reads, "kv_producer", prefill, afterwards=[name])
        sent = await_file(Path(files[HANDED_OVER]), reading)
        generates = [
            {**one, "xargs": {**one.get("xargs", {}), "kv_transfer_params": sent[one["id"]]}}
            for one in requests
        ]
        decoded = engine(generates, "kv_consumer", decode, record_kept=decode is not None)
        Path(files[TAKEN]).touch()
        return reading.result(SECONDS), decoded

    yield run
    (tmp_path / "taken").touch()
    pool.shutdown()


def to_send(one: dict[str, Any]) -> dict[str, Any]:
    """Returns a request's `vllm_xargs` in the prefill engine."""
    return {**one.get("xargs", {}), "kv_transfer_params": {"do_remote_decode": True}}


def await_file(path: Path, reading: Future[Any]) -> dict[str, Any]:
    """Waits until the prefill engine has written what it hands over."""
    end = time.monotonic() + SECONDS
    while not path.exists():
        if reading.done():
            reading.result()
        assert time.monotonic() < end, "the prefill engine wrote nothing"
        time.sleep(0.05)
    sent: dict[str, Any] = json.loads(path.read_text())
    return sent


def kept_tokens(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what events kept, and how many queries they saw."""
    names = ("layer", "kept", "num_queries")
    return [{name: each[name] for name in names} for each in report["kept"]]


def check_taken(read: dict[str, Any], decoded: dict[str, Any]) -> None:
    """Asserts that both pools are free in the end, and that the first engine had no event."""
    assert not read["events"]
    for report in (read, decoded):
        assert report["free_at_end"] == report["num_blocks"] - 1


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("adakv", "NixlConnector"),
        ("adakv", "NixlPushConnector"),
        ("keydiff", "NixlConnector"),
    ],
)
def test_prompt_of_another_engine_keeps_what_a_prefix_cache_hit_keeps(
    llama: str, run_engine: Run, disaggregate: Disaggregate, policy: str, kind: str
) -> None:
    settings = {**ADAKV, "policy": policy}
    tokens = prompt(400, seed=1)
    twice = [[request(name, tokens, 40)] for name in ("first", "again")]
    hit = run_engine(llama, twice, settings=settings, record_kept=True)
    read, decoded = disaggregate(
        llama, [request("again", tokens, 40)], kind=kind, prefill=settings, decode=settings
    )
    assert decoded["loaded_tokens"] == 400
    assert decoded["outputs"]["again"]["tokens"] == hit["outputs"]["again"]["tokens"]
    assert kept_tokens(decoded) == kept_tokens(hit)[3:]
    assert read["held_until_taken"] == 13
    check_taken(read, decoded)


@pytest.mark.parametrize("settings", [{"policy": "none"}, {"policy": "adakv", "budget": 1.0}])
def test_off_and_at_budget_1_tokens_are_those_of_one_engine(
    llama: str, run_engine: Run, disaggregate: Disaggregate, settings: dict[str, Any]
) -> None:
    requests = [request(str(i), prompt(200 + 50 * i, seed=i), 20) for i in range(3)]
    stock = run_engine(llama, [requests])
    _, decoded = disaggregate(llama, requests, prefill=None, decode=settings)
    assert decoded["loaded_tokens"] == 200 + 250 + 300
    for name, expected in stock["outputs"].items():
        assert decoded["outputs"][name]["tokens"] == expected["tokens"]


def test_prompt_that_a_conversation_could_go_on_with_is_sent_whole(
    llama: str, run_engine: Run, disaggregate: Disaggregate
) -> None:
    settings = {**ADAKV, "reuse_conversations": "reuse"}
    turn = request("turn", prompt(300, seed=1), 40)
    one = request("next", turn["prompt"] + prompt(60, seed=2), 40)
    expected = run_engine(llama, [[one]], settings=ADAKV)
    read, decoded = disaggregate(
        llama, [one], prefill=settings, decode=ADAKV, before={"kv_producer": [turn]}
    )
    assert [event["trigger"] for event in read["events"]] == ["prompt"], "of the turn before"
    assert decoded["loaded_tokens"] == len(one["prompt"])
    assert decoded["outputs"]["next"]["tokens"] == expected["outputs"]["next"]["tokens"]


def test_crowded_decode_engine_serves_each_request_as_alone(
    llama: str, run_engine: Run, disaggregate: Disaggregate
) -> None:
    requests = [request(str(i), prompt(300 + 30 * i, seed=i), 100) for i in range(6)]
    requests += [request(f"whole-{i}", prompt(300, seed=9 + i), 250, **WHOLE) for i in range(3)]
    alone = run_engine(llama, [[each] for each in requests], settings=ADAKV)
    read, decoded = disaggregate(
        llama,
        requests,
        prefill=ADAKV,
        decode=ADAKV,
        asynchronous=True,
        blocks={"kv_consumer": 45},
        max_model_len=1024,
    )
    assert decoded["preemptions"]
    for name, output in alone["outputs"].items():
        assert decoded["outputs"][name]["tokens"] == output["tokens"], name
    check_taken(read, decoded)


WITHIN = {
    "context": ({"xargs": {"kv_context_tokens": 200}}, ADAKV),
    "ceiling": ({}, {"policy": "adakv", "budget": 0.25, "ceiling": 256}),
}


@pytest.mark.parametrize(("options", "settings"), WITHIN.values(), ids=WITHIN)
def test_prompt_with_an_event_inside_is_read_anew(
    llama: str,
    run_engine: Run,
    disaggregate: Disaggregate,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    one = request("context", prompt(400, seed=1), 100, **options)
    expected = run_engine(llama, [[one]], settings=settings)
    read, decoded = disaggregate(llama, [one], prefill=ADAKV, decode=settings)
    assert read["held_until_taken"] == 13
    assert decoded["loaded_tokens"] == 0
    assert decoded["outputs"]["context"]["tokens"] == expected["outputs"]["context"]["tokens"]
    check_taken(read, decoded)


def test_prefix_that_the_decode_engine_has_is_not_sent_again(
    llama: str, run_engine: Run, disaggregate: Disaggregate
) -> None:
    tokens = prompt(400, seed=1)
    before = {"kv_consumer": [request("before", tokens[:300], 40)]}
    one = request("longer", tokens, 40)
    expected = run_engine(llama, [[one]], settings=ADAKV)
    read, decoded = disaggregate(llama, [one], prefill=ADAKV, decode=ADAKV, before=before)
    assert decoded["loaded_tokens"] == 400 - 288
    assert decoded["outputs"]["longer"]["tokens"] == expected["outputs"]["longer"]["tokens"]
    check_taken(read, decoded)


def test_aborted_requests_free_what_waits_for_them(llama: str, disaggregate: Disaggregate) -> None:
    requests = [
        request("goes-on", prompt(300, seed=0), 40),
        request("at-once", prompt(330, seed=1), 40, abort_at_step=0),
        request("loading", prompt(360, seed=2), 40, abort_at_step=1),
        request("generating", prompt(390, seed=3), 40, abort_at_step=20),
    ]
    read, decoded = disaggregate(llama, requests, prefill=ADAKV, decode=ADAKV)
    assert set(decoded["outputs"]) == {"goes-on"}
    check_taken(read, decoded)


OFFLOADS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 26,
        "spec_name": "HostSpec",
        "spec_module_path": "tests.engine.host_memory",
        "record": os.devnull,
    },
}
BESIDE = {
    "tensor-parallel": ("llama", "adakv", {"tensor_parallel_size": 2}),
    "latent-cache": (
        "deepseek_v2",
        "h2o",
        {"attention_backend": "CPU_MLA", "max_model_len": 1024},
    ),
    "offloading": (
        "llama",
        "adakv",
        {"kind": "MultiConnector", "extra": {"connectors": [NIXL, OFFLOADS]}},
    ),
}


@pytest.mark.parametrize(("family", "policy", "options"), BESIDE.values(), ids=BESIDE)
def test_what_prompts_are_sent_beside(
    tmp_path: Path,
    run_engine: Run,
    disaggregate: Disaggregate,
    family: str,
    policy: str,
    options: dict[str, Any],
) -> None:
    model = str(tiny_models.build(family, tmp_path / "model"))
    settings = {"policy": policy, "budget": 0.25}
    requests = [request(str(i), prompt(300 + 30 * i, seed=i), 40) for i in range(3)]
    engine = {key: value for key, value in options.items() if key not in ("kind", "extra")}
    expected = run_engine(model, [requests], settings=settings, **engine)
    read, decoded = disaggregate(model, requests, prefill=settings, decode=settings, **options)
    assert decoded["loaded_tokens"] == sum(len(each["prompt"]) for each in requests)
    assert len(decoded["events"]) == 3
    for name, output in expected["outputs"].items():
        assert decoded["outputs"][name]["tokens"] == output["tokens"]
    check_taken(read, decoded)
