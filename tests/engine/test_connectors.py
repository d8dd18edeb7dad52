"""KV connectors store and load what was computed with everything, as in stock vLLM."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

BLOCK = 32
MODULE = "tests.engine.host_memory"
KEEPS = "LMCacheMPConnector"
RESET = ("reset_prefix_cache", {})
ADAKV = {"policy": "adakv", "budget": 0.25, "request_policies": ["none"]}
WHOLE = {"xargs": {"kv_policy": "none"}}

Connect = Callable[..., dict[str, Any]]


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    """Makes the configuration of a connector with a store of its own."""
    numbers = itertools.count()

    def configuration(kind: str, **more: Any) -> dict[str, Any]:
        store = tmp_path / str(next(numbers))
        store.mkdir()
        extra = {
            "cpu_bytes_to_use": 1 << 26,
            "spec_name": "HostSpec",
            "spec_module_path": MODULE,
            "record": str(store / "record"),
            "shared_storage_path": str(store),
            "offload_prompt_only": False,
            **more,
        }
        config = {"kv_connector": kind, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        if kind not in ("ExampleConnector", "OffloadingConnector", KEEPS):
            config["kv_connector_module_path"] = MODULE
        return config

    return configuration


@pytest.fixture(scope="session")
def run_engine(run_engine: Run) -> Run:
    """Runs engines in which a stand-in has the name of LMCache's connector."""

    def run(*args: Any, probes: Iterable[str] = (), **options: Any) -> dict[str, Any]:
        return run_engine(*args, probes=[f"{MODULE}:stand_in_for_lmcache", *probes], **options)

    return run


def copies(connector: dict[str, Any]) -> dict[str, int]:
    """Counts the blocks that a connector has stored and loaded; of the example the files."""
    extra = connector["kv_connector_extra_config"]
    if connector["kv_connector"] == "ExampleConnector":
        return {"files": len(list(Path(extra["shared_storage_path"]).glob("*/*")))}
    record = Path(extra["record"])
    lines = record.read_text().splitlines() if record.exists() else []
    counts = {"stored": 0, "loaded": 0}
    for line in map(json.loads, lines):
        counts["stored" if line["store"] else "loaded"] += len(line["blocks"])
    return counts


def twice(length: int = 400, max_tokens: int = 40) -> list[list[dict[str, Any]]]:
    """Returns a prompt, and another phase with the same one; the cache is to be reset between."""
    return [
        [request("stores", prompt(length, seed=1), max_tokens)],
        [request("loads", prompt(length, seed=1), max_tokens)],
    ]


CONNECTORS = ["ExampleConnector", "OffloadingConnector", "HostOffload", KEEPS]


@pytest.mark.parametrize("kind", CONNECTORS)
def test_off_and_at_budget_1_hits_are_those_of_stock(
    llama: str, run_engine: Run, connect: Connect, kind: str
) -> None:
    runs = []
    for settings in (None, {"policy": "none"}, {"policy": "adakv", "budget": 1.0}):
        connector = connect(kind)
        report = run_engine(
            llama, twice(), settings=settings, kv_transfer_config=connector, calls=[[1, *RESET]]
        )
        runs.append((report["outputs"], copies(connector)))
    stock, *others = runs
    assert stock[0]["loads"]["cached"] == 384
    assert stock[1]
    for outputs, counts in others:
        assert counts == stock[1]
        for name, expected in stock[0].items():
            assert outputs[name]["tokens"] == expected["tokens"]
            assert outputs[name]["cached"] == expected["cached"]


def test_prompts_that_an_engine_reads_at_its_start_are_not_stored(
    llama: str, run_engine: Run, connect: Connect, tmp_path: Path
) -> None:
    """It measures heads, and compiles what a canary needs, before the connector has any request."""
    connector, settings = connect("ExampleConnector"), {"policy": "auto", "budget": 0.25}
    report = run_engine(
        llama,
        twice(),
        settings={**settings, "shadow": 1.0, "min_answer_tokens": 0},
        kv_transfer_config=connector,
        calls=[[1, *RESET]],
        probes=["tests.engine.test_measured_heads:watch_heads"],
        environment={"VLLM_CACHE_ROOT": str(tmp_path / "cache")},
    )
    assert report["measured"] == 1
    assert report["outputs"]["loads"]["cached"] > 0
    stock = connect("ExampleConnector")
    run_engine(llama, twice(), kv_transfer_config=stock, calls=[[1, *RESET]])
    assert copies(connector) == copies(stock)
    assert copies(stock)["files"]


@pytest.mark.parametrize("kind", CONNECTORS)
def test_loaded_prompts_keep_what_a_prefix_cache_hit_keeps(
    llama: str, run_engine: Run, connect: Connect, kind: str
) -> None:
    hit = run_engine(llama, twice(), settings=ADAKV, record_kept=True)
    connector = connect(kind)
    report = run_engine(
        llama,
        twice(),
        settings=ADAKV,
        record_kept=True,
        kv_transfer_config=connector,
        calls=[[1, *RESET]],
    )
    expected, loaded = (each["outputs"]["loads"] for each in (hit, report))
    assert expected["cached"] == 352
    assert loaded["cached"] == (384 if kind == KEEPS else 352)
    assert loaded["tokens"] == expected["tokens"]
    names = ("layer", "kept", "num_queries")
    kept = [[{name: each[name] for name in names} for each in run["kept"]] for run in (hit, report)]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2 * 3
    assert {each["num_queries"] for each in kept[0]} == {32}


def test_blocks_that_are_kept_for_a_connector_are_free_once_they_are_stored(
    llama: str, run_engine: Run, connect: Connect
) -> None:
    phases = [[request("long", prompt(400, seed=1), 100)]]
    alone = run_engine(llama, phases, settings=ADAKV)["usage"]
    usage = run_engine(llama, phases, settings=ADAKV, kv_transfer_config=connect(KEEPS, delay=9))
    assert usage["usage"][5] > alone[5] > alone[0] / 9
    assert usage["usage"][20:100] == alone[20:100]


def test_preempted_request_does_not_wait_for_its_own_late_copy(
    llama: str, run_engine: Run, connect: Connect
) -> None:
    """Blocks that are kept for a connector would be missing when the request is read again."""
    growing = [
        request(f"whole-{i}", prompt(100 + 5 * i, seed=50 + i), 150, **WHOLE) for i in range(3)
    ]
    report = run_engine(
        llama,
        [[*growing, request("long", prompt(410, seed=1), 60, at_step=16)]],
        settings=ADAKV,
        kv_transfer_config=connect(KEEPS, delay=200),
        num_gpu_blocks_override=29,
        max_model_len=600,
    )
    assert report["preemptions"] == 1


@pytest.mark.parametrize(
    ("kind", "trigger"),
    [
        ("HostOffload", "prompt"),
        (KEEPS, "prompt"),
        (KEEPS, "decode:64"),
        ("OffloadingConnector", "prompt"),
        ("OffloadingConnector", "decode:64"),
        ("OffloadingConnector", "pressure:0.1"),
    ],
)
def test_nothing_is_stored_that_was_computed_after_an_event(
    llama: str, run_engine: Run, connect: Connect, kind: str, trigger: str
) -> None:
    connector = connect(kind)
    phases = [
        [request("long", prompt(400, seed=1), 200)],
        [request("next", prompt(8, seed=2), 8, follows="long")],
    ]
    settings = {**ADAKV, "trigger": trigger, "min_tokens": 32}
    report = run_engine(
        llama,
        phases,
        settings=settings,
        kv_transfer_config=connector,
        calls=[[1, *RESET]],
        num_gpu_blocks_override=100,
    )
    first = report["events"][0]
    num_shared = first["source_tokens"]
    assert num_shared >= 384
    assert num_shared < 576
    assert copies(connector)["stored"] >= num_shared // BLOCK
    assert report["outputs"]["next"]["cached"] == num_shared


ENGINE = ("asynchronous", "enable_prefix_caching")


def crowd(number: int) -> list[dict[str, Any]]:
    """Returns requests that want more blocks together than a small pool has."""
    lengths = [410, 190, 333, 64, 520, 275, 97, 450][:number]
    return [
        request(f"r{i}", prompt(length, seed=20 + i), 40, at_step=3 * i)
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def crowd_alone(llama: str, run_engine: Run) -> dict[str, Any]:
    """What the prompts of a crowd are answered by stock vLLM, one after the other."""
    phases = [[{**one, "id": f"whole {one['id']}", "at_step": 0}] for one in crowd(8)]
    return run_engine(llama, phases)["outputs"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("HostOffload", {}),
        (KEEPS, {"trigger": "decode:32", "asynchronous": True}),
        ("OffloadingConnector", {}),
        ("OffloadingConnector", {"trigger": "chunk:128"}),
        ("OffloadingConnector", {"trigger": "decode:32"}),
        ("OffloadingConnector", {"trigger": "pressure:0.5"}),
        ("OffloadingConnector", {"asynchronous": True}),
        ("OffloadingConnector", {"enable_prefix_caching": False}),
    ],
    ids=[
        "touching",
        "keeping",
        "prompt",
        "chunk",
        "decode",
        "pressure",
        "asynchronous",
        "uncached",
    ],
)
def test_blocks_copied_late_are_those_of_the_prompt(
    llama: str,
    run_engine: Run,
    connect: Connect,
    crowd_alone: dict[str, Any],
    kind: str,
    options: dict[str, Any],
) -> None:
    """Events free the blocks that are being stored, and others write to them."""
    connector = connect(kind, delay=40 if kind == KEEPS else 7)
    options = {**options}
    engine = {name: options.pop(name) for name in ENGINE if name in options}
    report = run_engine(
        llama,
        [
            crowd(8),
            *([{**one, **WHOLE, "id": f"whole {one['id']}", "at_step": 0}] for one in crowd(8)),
        ],
        settings={**ADAKV, "min_tokens": 32, **options},
        kv_transfer_config=connector,
        calls=[[1, *RESET]],
        num_gpu_blocks_override=40,
        max_model_len=640,
        **engine,
    )
    assert report["events"]
    assert copies(connector)["loaded"]
    for name, expected in crowd_alone.items():
        output = report["outputs"][name]
        assert output["tokens"] == expected["tokens"], name
        pairs = zip(output["logprobs"], expected["logprobs"], strict=True)
        for logprobs, others in pairs:
            assert logprobs == pytest.approx(others, abs=1e-3), name


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("kind", ["LossyExample", "LossyOffloading"])
def test_prompts_whose_load_fails_are_computed_anew_and_compressed(
    llama: str, run_engine: Run, connect: Connect, kind: str, policy: str
) -> None:
    connector = connect(kind, damaged=5) | {"kv_load_failure_policy": policy}
    phases = twice()
    phases[1].append(request("beside", prompt(200, seed=3), 8))
    settings = {**ADAKV, "trigger": "prompt"}
    report = run_engine(
        llama, phases, settings=settings, kv_transfer_config=connector, calls=[[1, *RESET]]
    )
    stored, loaded = (report["outputs"][name] for name in ("stores", "loads"))
    assert stored["finish_reason"] == report["outputs"]["beside"]["finish_reason"] == "length"
    if policy == "fail":
        assert loaded["finish_reason"] == "error"
        return
    assert loaded["tokens"] == stored["tokens"]


@pytest.mark.parametrize("damaged", ["nothing", "kept", "all"])
def test_async_load_that_fails_leaves_what_was_loaded_before(
    llama: str, run_engine: Run, connect: Connect, damaged: str
) -> None:
    """A request whose load fails at its first block loses everything that it holds."""
    place = {"nothing": 10, "kept": 5, "all": 0}[damaged]
    connector = connect("LossyOffloading", damaged=place) | {"kv_load_failure_policy": "recompute"}
    report = run_engine(
        llama, twice(), settings=ADAKV, kv_transfer_config=connector, calls=[[1, *RESET]]
    )
    outputs = report["outputs"]
    assert outputs["loads"]["tokens"] == outputs["stores"]["tokens"]
    assert len(report["events"]) == 2


def test_damaged_file_ends_the_engine_as_in_stock(
    llama: str, run_engine: Run, connect: Connect
) -> None:
    for settings in (None, ADAKV):
        connector = connect("ExampleConnector")
        store = Path(connector["kv_connector_extra_config"]["shared_storage_path"])
        run_engine(llama, twice()[:1], settings=settings, kv_transfer_config=connector)
        for file in store.glob("*/*.safetensors"):
            file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(pytest.fail.Exception, match="SafetensorError"):
            run_engine(llama, twice()[1:], settings=settings, kv_transfer_config=connector)


def test_example_stores_and_loads_only_prompts_that_are_read_in_one_step(
    llama: str, run_engine: Run, connect: Connect
) -> None:
    """It stores all slots of a prompt in its first step, also those that are not computed."""
    connector = connect("ExampleConnector")
    context = {"kv_context_tokens": 200}
    phases = [
        [request("stores", prompt(400, seed=1), 8, xargs=context)],
        [request("again", prompt(400, seed=1), 8)],
        [request("loads", prompt(400, seed=1), 8, xargs=context)],
    ]
    report = run_engine(
        llama,
        phases,
        settings=ADAKV,
        kv_transfer_config=connector,
        calls=[[1, *RESET], [2, *RESET]],
    )
    outputs = report["outputs"]
    assert [outputs[name]["cached"] for name in ("stores", "again", "loads")] == [0, 0, 0]
    assert copies(connector) == {"files": 3}
    assert outputs["loads"]["tokens"] == outputs["stores"]["tokens"]


@pytest.fixture(scope="module")
def gemma3(model_directory: Path) -> str:
    """A model with sliding-window layers."""
    return str(tiny_models.build("gemma3", model_directory / "windows"))


def test_window_layers_are_stored_beside_compressed_ones(
    gemma3: str, run_engine: Run, connect: Connect
) -> None:
    """Windows are stored where hits of compressed requests end, too."""
    stock = run_engine(
        gemma3, twice(), kv_transfer_config=connect("OffloadingConnector"), calls=[[1, *RESET]]
    )
    connector = connect("OffloadingConnector", delay=3)
    compressed, whole = twice(), request("whole", prompt(400, seed=1), 40, **WHOLE)
    report = run_engine(
        gemma3,
        [*compressed, [whole]],
        settings={**ADAKV, "budget": 0.5},
        kv_transfer_config=connector,
        calls=[[1, *RESET], [2, *RESET]],
    )
    outputs, expected = report["outputs"], stock["outputs"]["loads"]
    assert len(report["events"]) == 2
    assert outputs["loads"]["tokens"] == outputs["stores"]["tokens"]
    assert outputs["loads"]["cached"] == 352
    for name in ("tokens", "cached"):
        assert outputs["whole"][name] == expected[name]


def test_several_connectors(llama: str, run_engine: Run, connect: Connect) -> None:
    children = [connect("OffloadingConnector"), connect("ExampleConnector")]
    connector = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }
    report = run_engine(
        llama, twice(), settings=ADAKV, kv_transfer_config=connector, calls=[[1, *RESET]]
    )
    outputs = report["outputs"]
    assert outputs["loads"]["cached"] == 352
    assert outputs["loads"]["tokens"] == outputs["stores"]["tokens"]
    assert copies(children[0]) == {"stored": 12, "loaded": 11}
    assert copies(children[1]) == {"files": 3}


def test_turn_that_continues_a_kept_state_stores_and_loads_nothing(
    llama: str, run_engine: Run, connect: Connect
) -> None:
    connector = connect("OffloadingConnector", delay=7)
    phases = [
        [request("first", prompt(400, seed=1), 40)],
        [request("second", prompt(60, seed=2), 40, follows="first")],
        [request("third", prompt(60, seed=3), 8, follows="second")],
    ]
    settings = {**ADAKV, "reuse_conversations": "reuse"}
    report = run_engine(llama, phases, settings=settings, kv_transfer_config=connector)
    expected = run_engine(llama, phases, settings=settings)
    assert report["conversations_continued"] == expected["conversations_continued"] == 2
    assert report["outputs"] == expected["outputs"]
    assert copies(connector) == {"stored": 12, "loaded": 0}


@pytest.mark.parametrize("kind", ["OffloadingConnector", KEEPS])
def test_shadows_are_hidden_from_connectors(
    llama: str, run_engine: Run, connect: Connect, kind: str
) -> None:
    connector = connect(kind)
    settings = {**ADAKV, "shadow": 1.0}
    report = run_engine(
        llama,
        twice()[:1],
        settings=settings,
        kv_transfer_config=connector,
        logprobs_mode="raw_logprobs",
    )
    assert report["shadows"]
    assert copies(connector) == {"stored": 12, "loaded": 0}
