"""A cache in fp8 stands for numbers: what is done with it is what is done with those."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.event_cases import BLOCK_SIZE, GROUP, NUM_HEADS, Request, left_by, make_pool, once
from tests.policies.cases import HEAD_SIZE, NUM_LAYERS, POLICIES, Shape, make_pipeline
from vllm_kvcompress.cache.page_summaries import PageSummaries, SummaryKind
from vllm_kvcompress.cache.pages import (
    FP8_TYPES,
    InterleavedPagePool,
    PackedPagePool,
    PagePool,
    Quantization,
)
from vllm_kvcompress.cache.query_windows import PagedWindows, window_blocks
from vllm_kvcompress.scheduling.plan import BlockTags, Observation, StepPlan
from vllm_kvcompress.vllm_plugin.worker_side.access_checks import WorkerChecks

SCALES = [(0.37, 1.9), (1.3, 0.11)]
KINDS = [PackedPagePool, InterleavedPagePool]
MERGING = ("cam", "d2o", "kvmerger", "asymkv", "kvslimmer", "momentkv", "momentfix")
COPYING = [name for name in POLICIES if not set(name.split("+")) & set(MERGING)]
SHAPE = Shape(pages=(9, 9), group=GROUP, block_size=BLOCK_SIZE)


def number(byte: int, name: str) -> float:
    """What a byte of fp8 says: sign, exponent and mantissa."""
    mantissa_bits, bias = (2, 15) if name == "fp8_e5m2" else (3, 7)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    if name == "fp8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if name != "fp8_e5m2" and byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def quantized(kind: type[PagePool], name: str = "fp8") -> PagePool:
    """Scales differ by layer, and are no powers of two."""
    scales = [SCALES[layer % 2] for layer in range(NUM_LAYERS)]
    return make_pool(kind, quantization=Quantization(FP8_TYPES[name], torch.float32, scales))


def wide(pool: PagePool, name: str = "fp8") -> Tensor:
    """What the pages of the layers' own blocks hold, number by number."""
    numbers = torch.tensor([number(byte, name) for byte in range(256)])
    found = numbers[pool.pages.long()]
    halves = found.view(len(found), 2, -1)
    if isinstance(pool, InterleavedPagePool):
        halves = found.view(len(found), BLOCK_SIZE, 2, HEAD_SIZE).transpose(1, 2)
    for page in range(NUM_LAYERS * NUM_HEADS):  # of every block
        for half, scale in enumerate(SCALES[page // NUM_HEADS % 2]):
            halves[page :: NUM_LAYERS * NUM_HEADS, half] *= scale
    return found


@pytest.mark.parametrize("name", FP8_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_stand_for_numbers_times_their_layers_scale(kind: type[PagePool], name: str) -> None:
    pool = quantized(kind, name)
    pool.pages.copy_(torch.arange(pool.pages.numel()).view_as(pool.pages) % 251)
    plain = make_pool(kind)
    plain.pages.copy_(wide(pool, name))
    blocks = torch.tensor([5, 0, 2])
    for layer in range(NUM_LAYERS):
        pages = pool.layer_page_ids(layer, blocks)
        for found, expected in (
            (pool.keys(pages, layer), plain.keys(pages, layer)),
            (pool.values(pages, layer), plain.values(pages, layer)),
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", COPYING)
def test_events_keep_what_they_keep_of_the_numbers(
    policy: str, kind: type[PagePool], tmp_path: Path
) -> None:
    """The same entries on the same pages, copied. State takes as many bytes, and more pages."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    positions = (70, 103)
    if pipeline.token_state:
        pipeline, positions = once(pipeline), (70,)
    request = Request(pipeline, quantized(kind), "fraction", positions)
    plain = Request(pipeline, make_pool(kind), "fraction", positions)
    plain.pool.pages.copy_(wide(request.pool))
    before = request.pool.pages.clone()
    for each in (request, plain):
        each.run()
    for found, expected in zip(left_by(request), left_by(plain), strict=True):
        for name in ("counts", "pages", "keys", "values"):
            assert torch.equal(found[name], expected[name]), name
    assert not torch.equal(request.pool.pages, before)


@pytest.mark.parametrize("kind", KINDS)
def test_queries_in_pages_are_the_models_own(kind: type[PagePool]) -> None:
    """Under pressure the last queries lie in the pool: four bytes each of a page's numbers."""
    pool, heads, window = quantized(kind), NUM_HEADS * GROUP, 7
    assert pool.queries_per_page == 2 * BLOCK_SIZE // 4
    count = window_blocks(window, heads, NUM_HEADS, pool.queries_per_page)
    windows, before = PagedWindows(pool, window, heads), pool.pages.clone()
    blocks = tuple(range(3, 3 + count))
    windows.hold("r", blocks)
    where = windows.locate([("r", 0, Observation(0, 20, window))])
    queries = torch.randn(NUM_LAYERS, window, heads, HEAD_SIZE)
    for layer in range(NUM_LAYERS):
        windows.record(layer, queries[layer], where)
    for layer in range(NUM_LAYERS):
        read = windows.read(layer, windows.find([("r", 20 + window)], window))
        assert torch.equal(read[:, 0], queries[layer])
    own = np.isin(np.arange(len(pool.pages)) // pool.pages_per_block, blocks)
    assert torch.equal(pool.pages[~own], before[~own])


@pytest.mark.parametrize("kind", [SummaryKind(), SummaryKind(2), SummaryKind(rounded=True)])
def test_summaries_are_of_the_numbers(kind: SummaryKind) -> None:
    pool, plain = quantized(InterleavedPagePool), make_pool(InterleavedPagePool)
    pool.pages.copy_(torch.randint(0, 127, pool.pages.shape))
    plain.pages.copy_(wide(pool))
    found, expected = PageSummaries(pool, kind), PageSummaries(plain, kind)
    for summaries in (found, expected):
        for layer in range(NUM_LAYERS):
            summaries.fill_blocks(layer, torch.tensor([1, 4]))
    assert found.vectors.dtype == expected.vectors.dtype
    assert torch.equal(found.vectors, expected.vectors)


@pytest.mark.parametrize("name", FP8_TYPES)
def test_what_nobody_may_read_is_poisoned(name: str) -> None:
    pool = quantized(PackedPagePool, name)
    WorkerChecks().begin_step(StepPlan(tags=BlockTags(poisoned=(3,))), [pool])
    pages = pool.layer_page_ids(0, torch.tensor([3]))
    assert bool(pool.keys(pages, 0).isnan().all())
    most = {"fp8_e5m2": 28672}.get(name, 448) * SCALES[0][1]
    assert pool.values(pages, 0).unique().tolist() == pytest.approx([most])


def test_weights_may_change() -> None:
    """And with them the scales."""
    pool = quantized(PackedPagePool)
    pool.pages.fill_(0x38)  # 1.0
    pages = pool.layer_page_ids(1, torch.tensor([3]))
    assert pool.keys(pages, 1).unique().tolist() == pytest.approx([1.3])
    assert pool.quantization is not None
    pool.quantization.set_scales([(2.0, 3.0)] * NUM_LAYERS)
    assert pool.keys(pages, 1).unique().tolist() == [2.0]
    assert replace(pool).values(pages, 1).unique().tolist() == [3.0]
