"""FlashAttention over single heads: what it is asked for, and when it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import tiny_models
from tests.engine.conftest import request
from tests.gpu_path.conftest import Run
from tests.gpu_path.graphs import IN_GRAPHS
from tests.tiny_models import prompt

ADAKV = {"policy": "adakv", "budget": 0.25}
FLASH_3 = {"kernels": "flash3", "dtype": "float16"}
HEADS, GROUP = 4, 2  # query heads of the model, and of one KV head


def three_requests() -> list[list[dict[str, Any]]]:
    """One is compressed alone, then two, then three decode side by side."""
    return [[request(f"r{i}", prompt(200, seed=i), 12, at_step=4 * i) for i in range(3)]]


def test_batches_that_flash_attention_3_does_not_split_take_own_kernels(
    llama: str, run_gpu_path: Run
) -> None:
    """Here above 4 sequences: with the third request. What is generated does not change."""
    expected = run_gpu_path(llama, three_requests(), settings=ADAKV, **FLASH_3)
    report = run_gpu_path(
        llama, three_requests(), settings=ADAKV, probes=["few_sequences"], **FLASH_3
    )
    assert report["own"] > 0
    by_head = [call for call in report["flash"] if call["heads"] == GROUP]
    assert {call["batch"] for call in by_head} == {2, 4}
    for name, output in expected["outputs"].items():
        assert report["outputs"][name]["tokens"] == output["tokens"], name


def test_memory_for_splits_is_bounded(llama: str, run_gpu_path: Run) -> None:
    """Splits times rows, while a compressed request decodes and while it reads a long chunk."""
    settings = {**ADAKV, "trigger": "chunk:128"}
    phases = [[request("a", prompt(700, seed=1), 4)]]
    report = run_gpu_path(llama, phases, settings=settings, probes=["few_sequences"], **FLASH_3)
    by_head = [call for call in report["flash"] if call["heads"] == GROUP]
    assert {call["splits"] for call in by_head if call["rows"] == 2} == {32}
    chunks = [call for call in by_head if call["rows"] > 32]
    assert chunks
    for call in by_head:
        assert call["splits"] == max(1, min(32, 32 * 4 // call["rows"]))


def test_two_compressed_groups_have_metadata_of_their_own(
    run_gpu_path: Run, tmp_path: Path
) -> None:
    """Model runner V1 reuses FlashAttention's metadata from group to group, where it may."""
    layers = ["sliding_attention", "full_attention", "full_attention"] * 2
    model = str(tiny_models.build("gemma3", tmp_path, num_hidden_layers=6, layer_types=layers))
    phases = [[request("a", prompt(600, seed=1), 16), request("b", prompt(300, seed=2), 16)]]
    how = {"settings": ADAKV, "kernels": "flash2", "dtype": "bfloat16", "asynchronous": False}
    expected = run_gpu_path(model, phases, record_kept=True, **how)
    report = run_gpu_path(model, phases, record_kept=True, runner="V1", **how)
    assert {record["layer"] for record in report["kept"]} == {0, 1}
    assert len(report["kept"]) == 4 * 2
    for name, output in expected["outputs"].items():
        assert report["outputs"][name]["tokens"] == output["tokens"], name


def test_replayed_steps_neither_plan_nor_capture_flash_attention(
    llama: str, run_gpu_path: Run
) -> None:
    """No schedule is made ahead for single tokens, and its splits are in no graph: neither in
    those that are replayed, nor in those whose memory vLLM measures before there is a cache."""
    probes = [*IN_GRAPHS["probes"], "flash_calls"]
    report = run_gpu_path(
        llama, three_requests(), settings=ADAKV, **FLASH_3, **IN_GRAPHS | {"probes": probes}
    )
    assert sum(report["replays"].values()) > 10
    assert len(report["schedules"]) >= 3  # of prompts
    assert min(report["schedules"]) > 1
    assert len(report["captures"]) == 2
    for graphs in report["captures"]:
        for launches in graphs:
            assert set(launches) == {"write_cache", "decode_rows"}
