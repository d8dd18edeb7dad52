"""The memory that a server on CPUs takes by default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvcompress.cli.cpu_memory import memory_share, take_free_memory
from vllm_kvcompress.cli.launch import parse
from vllm_kvcompress.errors import ConfigError

GIB = 2**30
VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass
class Node:
    total_memory: int
    available_memory: int


@given(st.data(), st.integers(1, 4))
def test_workers_leave_the_reserve_on_every_node(data: st.DataObject, workers: int) -> None:
    total = data.draw(st.integers(16, 1024)) * GIB
    available = data.draw(st.lists(st.integers(5 * GIB, total), min_size=1, max_size=4))
    share = memory_share([Node(total, free) for free in available], workers)
    for free in available:
        assert workers * share * total <= free - 2 * GIB + 1
    assert 0 < share <= 0.92


def test_fully_free_node_gets_vllms_own_share() -> None:
    assert memory_share([Node(512 * GIB, 512 * GIB)], 1) == 0.92


def test_too_little_free_memory_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"2\.2 GiB free on a NUMA node for 1 worker.*KVCACHE_SPACE"
    ):
        memory_share([Node(64 * GIB, int(2.2 * GIB))], 1)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.delenv(VARIABLE, raising=False)
    return parse(["serve", "m"])[1]


def test_a_server_takes_what_is_free_and_says_so(
    parsed: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    import psutil

    take_free_memory(parsed, ["serve", "m"])
    memory = psutil.virtual_memory()
    assert parsed.gpu_memory_utilization * memory.total < memory.available
    said = capsys.readouterr().err
    assert "GiB of memory for the model and KV cache: what is free, less 2 GiB" in said
    assert "--gpu-memory-utilization or VLLM_CPU_KVCACHE_SPACE" in said


@pytest.mark.parametrize(
    "options",
    [["--gpu-memory-utilization", "0.5"], ["--kv_cache_memory_bytes=1G"], [VARIABLE]],
)
def test_memory_chosen_by_the_user_is_kept(
    options: list[str], parsed: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options == [VARIABLE]:
        monkeypatch.setenv(VARIABLE, "1")
        options = []
    before = parsed.gpu_memory_utilization
    take_free_memory(parsed, ["serve", "m", *options])
    assert parsed.gpu_memory_utilization == before
