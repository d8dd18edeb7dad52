"""Warming up runs what requests will run, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.event_cases import BLOCK_SIZE, GROUP, NUM_HEADS, Request, make_pool
from tests.policies.cases import Shape, make_pipeline
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.compression.warm_up import warm_up
from vllm_kvcompress.kernels import paged

SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=BLOCK_SIZE)
POLICIES = ["adakv", "adakv+criticalkv", "snapkv", "h2o", "momentkv", "kvmerger", "d2o"]
BLOCK = 0


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels over pages that have run."""
    names: set[str] = set()
    for name in [name for name, value in vars(paged).items() if hasattr(value, "__wrapped__")]:
        kernel = getattr(paged, name)

        def counting(*args: Any, name: str = name, kernel: Any = kernel, **kwargs: Any) -> Any:
            names.add(name)
            return kernel(*args, **kwargs)

        monkeypatch.setattr(paged, name, counting)
    return names


@pytest.mark.parametrize("policy", POLICIES)
def test_all_kernels_of_an_event_run_once_before(
    policy: str, tmp_path: Path, called: set[str]
) -> None:
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    position = max(70, 2 * pipeline.needs.window_size)
    request = Request(pipeline, make_pool(InterleavedPagePool), positions=(position,))
    request.run()
    wanted = set(called)
    called.clear()
    runner = Request(pipeline, make_pool(InterleavedPagePool)).runner
    warm_up(runner, NUM_HEADS * GROUP, pipeline.gathers, BLOCK)
    attention = {"decode_attention", "prefill_attention"} if pipeline.gathers else set()
    attention |= {"correct_with_moments"} if pipeline.corrects else set()
    assert wanted
    assert called == wanted | attention


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_behind(policy: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    request = Request(pipeline, make_pool(InterleavedPagePool))
    before = request.pool.pages.clone()
    warm_up(request.runner, NUM_HEADS * GROUP, pipeline.gathers, BLOCK)
    after, mine = request.pool.pages, request.pool.pages_per_block
    assert not request.runner.tables.slots
    assert not request.runner.windows.slots
    assert torch.equal(after[:mine], torch.zeros_like(after[:mine]))
    assert torch.equal(after[mine:].nan_to_num(7), before[mine:].nan_to_num(7))
