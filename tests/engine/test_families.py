"""Model families are compressed, identical at budget 1.0, and hit the prefix cache."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import failing_policy, tiny_models
from tests.engine.conftest import Run, request
from tests.failing_policy import failing
from tests.tiny_models import prompt

LONG, SHORT = prompt(1000, seed=1), prompt(50, seed=2)


def phases(**more: Any) -> list[list[dict[str, Any]]]:
    return [
        [request("long", LONG, 24, **more), request("short", SHORT, 24, **more)],
        [request("again", LONG, 24, **more)],
        [request("once-more", LONG, 24, **more)],
    ]


def whole() -> list[list[dict[str, Any]]]:
    """Returns the same requests with budget 1.0 and a salt of their own."""
    asked = phases(salt="whole", xargs={"kv_budget": 1.0})
    return [[{**one, "id": f"whole {one['id']}"} for one in phase] for phase in asked]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3", "gemma4"])
def test_family_is_compressed_and_identical_at_budget_one(
    model_directory: Path, run_engine: Run, family: str
) -> None:
    """adakv+criticalkv finds each family's queries, heads and output projection."""
    model = str(tiny_models.build(family, model_directory))
    stock = run_engine(model, phases())
    settings = {"policy": "adakv+criticalkv", "budget": 0.25}
    settings |= {"min_request_budget": 0.25, "max_request_budget": 1.0}
    quarter = run_engine(model, [*phases(), *whole()], settings=settings, record_kept=True)
    outputs = quarter["outputs"]
    for name, output in stock["outputs"].items():
        assert outputs[f"whole {name}"]["tokens"] == output["tokens"], name
    assert outputs["short"]["tokens"] == stock["outputs"]["short"]["tokens"]
    assert outputs["long"]["tokens"] != stock["outputs"]["long"]["tokens"]
    assert outputs["again"]["tokens"] == outputs["long"]["tokens"]
    assert outputs["once-more"]["tokens"] == outputs["long"]["tokens"]
    assert outputs["once-more"]["cached"] == (1000 - 32) // 32 * 32
    num_compressed = 2 if family.startswith("gemma") else 3
    events = [record["layer"] for record in quarter["kept"]]
    assert events == list(range(num_compressed)) * 3
    assert quarter["free_at_end"] == quarter["num_blocks"] - 1


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("policy", ["adakv+criticalkv", "streamingllm"])
def test_layers_that_read_other_layers_caches_follow_what_is_kept(
    tmp_path: Path, run_engine: Run, family: str, policy: str
) -> None:
    """The last two of four layers read the caches of the first two; prompts come in two chunks."""
    model = str(tiny_models.build(family, tmp_path, num_kv_shared_layers=2))
    options = {"max_num_batched_tokens": 512}
    stock = run_engine(model, phases(), **options)
    settings = {"policy": policy, "budget": 0.25, "trigger": "chunk:512"}
    settings |= {"min_request_budget": 0.25, "max_request_budget": 1.0}
    asked = [*phases(), *whole()]
    quarter = run_engine(model, asked, settings=settings, record_kept=True, **options)
    outputs = quarter["outputs"]
    for name, output in stock["outputs"].items():
        assert outputs[f"whole {name}"]["tokens"] == output["tokens"], name
        for ours, theirs in zip(
            outputs[f"whole {name}"]["logprobs"], output["logprobs"], strict=True
        ):
            assert ours == pytest.approx(theirs, abs=1e-4), name
    assert outputs["long"]["logprobs"] != stock["outputs"]["long"]["logprobs"]
    assert {record["layer"] for record in quarter["kept"]} == {0}
    assert quarter["free_at_end"] == quarter["num_blocks"] - 1


def test_policies_see_the_queries_of_all_layers_that_read_a_cache(
    tmp_path: Path, run_engine: Run
) -> None:
    """The fourth of four layers reads the cache of the second, whose event sees both."""
    model = str(tiny_models.build("gemma3n", tmp_path))
    report = run_engine(
        model,
        [[request("a", prompt(300, seed=1), 2)]],
        settings={"policy": "snapkv", "budget": 0.25},
        max_num_batched_tokens=512,
        probes=["tests.engine.shared_queries:recorded"],
    )
    (seen,) = report["views"]
    by_layer = [
        next(rows for name, rows in report["queries"].items() if f"layers.{number}." in name)
        for number in (1, 3)
    ]
    num_heads, group = 2, 2
    for number, heads in enumerate(seen):
        expected = []
        for head in range(num_heads):
            for rows in by_layer:
                row = rows[300 - len(seen) + number]
                expected += row[head * group : (head + 1) * group]
        assert heads == expected, number
    assert by_layer[0] != by_layer[1]


def test_bfloat16_pages_are_read_in_the_kernels_packing(llama: str, run_engine: Run) -> None:
    """A budget of all but one block changes next to nothing, whatever the kernel's packing.

    Compressing with a wrong idea of the packing destroys keys; then the first tokens differ.
    """
    phases = [[request("a", prompt(640, seed=1), 8)]]
    stock = run_engine(llama, phases, dtype="bfloat16")
    report = run_engine(
        llama,
        phases,
        settings={"policy": "snapkv", "budget": 608},
        dtype="bfloat16",
        record_kept=True,
    )
    assert len(report["kept"]) == 3
    logprobs, expected = (r["outputs"]["a"]["logprobs"][1] for r in (report, stock))
    shared = set(logprobs) & set(expected)
    assert len(shared) >= 4
    for token in shared:
        assert logprobs[token] == pytest.approx(expected[token], abs=0.15)


def test_two_ranks_have_the_outputs_of_one(llama: str, run_engine: Run, tmp_path: Path) -> None:
    """Tensor parallel: each rank compresses its own heads and frees the same blocks.

    A conversation goes on from what every rank kept of its heads, and decode steps read a part.
    At the end the second rank's policy fails, of which vLLM hears nothing: all ranks do, and who is
    beside that request says the same.
    """
    phases = [
        [request("a", prompt(900, seed=1), 24), request("b", prompt(300, seed=2), 24)],
        [request("again", prompt(900, seed=1), 24, xargs={"kv_read": 0.75})],
        [request("next", prompt(200, seed=3), 24, follows="b")],
    ]
    file = Path(__file__).parents[2] / "configs/tensor-parallel.yaml"
    settings = {**yaml.safe_load(file.read_text())["kvcompress"], "budget": 256}
    settings["reuse_conversations"] = "reuse"
    settings |= {"read": "quest:0.5", "min_request_read": 0.4, "request_policies": ["failing"]}
    path = {"PYTHONPATH": str(failing_policy.install(tmp_path))}
    bad = failing(failing_policy.NOT_ON_THE_SECOND_RANK, at_step=1, xargs={"kv_policy": "failing"})
    beside = request("beside", prompt(600, seed=4), 24)
    one = run_engine(llama, [*phases, [beside]], settings=settings, environment=path)
    two = run_engine(
        llama,
        [*phases, [beside, bad]],
        settings=settings,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", **path},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    for name in ("a", "b", "again", "next", "beside"):
        assert two["outputs"][name]["tokens"] == one["outputs"][name]["tokens"], name
        assert two["outputs"][name]["cached"] == one["outputs"][name]["cached"], name
    assert two["outputs"]["next"]["cached"] == 300 + 23
    assert two["conversations_continued"] == one["conversations_continued"] == 1
    held = [
        list(takewhile(lambda each: "beside" not in each, report["held"])) for report in (one, two)
    ]
    assert held[0] == held[1]
    assert len(held[0]) > 60
    assert two["outputs"]["again"]["cached"] > 0
    ended = two["outputs"][bad["id"]]
    assert (len(ended["tokens"]), ended["finish_reason"]) == (2, "error")
    assert (one["skipped"], two["skipped"]) == ({}, {"failing error": 1})
    for report in (one, two):
        assert report["free_at_end"] == report["num_blocks"] - 1
