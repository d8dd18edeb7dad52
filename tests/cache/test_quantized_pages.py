"""A quantized cache stands for numbers: what is done with it is what is done with those."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.event_cases import BLOCK_SIZE, GROUP, NUM_HEADS, Request, left_by, make_pool, once
from tests.policies.cases import HEAD_SIZE, NUM_LAYERS, POLICIES, Shape, make_pipeline
from vllm_kvcompress.cache.page_summaries import PageSummaries, SummaryKind
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.cache.quantization import (
    FP8_TYPES,
    INT4,
    TOKEN_SCALED_TYPES,
    LayerScaled,
    TokenScaled,
    row_bytes,
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
    return make_pool(kind, quantization=LayerScaled(FP8_TYPES[name], torch.float32, scales))


def rotation() -> Tensor:
    """[HEAD_SIZE, HEAD_SIZE] of no special kind, so that a wrong side or order shows."""
    return torch.randn(HEAD_SIZE, HEAD_SIZE, generator=torch.Generator().manual_seed(3))


def token_scaled(name: str) -> PagePool:
    """A pool with a scale per token and head, by vLLM's name."""
    back = rotation() if name == INT4 else None
    kind = TokenScaled(TOKEN_SCALED_TYPES[name], torch.float32, back)
    return make_pool(InterleavedPagePool, quantization=kind)


def key_of(row: bytes, name: str) -> list[float]:
    """What a stored key stands for, number by number; its last four bytes are the scale's."""
    codes, (bits,) = row[:-4], struct.unpack("<I", row[-4:])
    zero_point = bits & 15 if name == INT4 else 0
    (scale,) = struct.unpack("<f", struct.pack("<I", bits - zero_point))
    if name == INT4:
        halves = [half for byte in codes for half in (byte % 16, byte // 16)]
        steps = [(half - zero_point) * scale for half in halves]
        matrix = rotation().tolist()
        columns = range(HEAD_SIZE)
        return [sum(steps[i] * matrix[i][j] for i in range(HEAD_SIZE)) for j in columns]
    if name.startswith("int8"):
        return [(byte - 256 if byte > 127 else byte) * scale for byte in codes]
    return [number(byte, "fp8") * scale for byte in codes]


def unpacked(pool: PagePool, name: str) -> Tensor:
    """What all pages of a pool with a scale per token hold, as a cache of numbers would."""
    size = row_bytes(name, HEAD_SIZE)
    assert size is not None
    rows = [
        key_of(bytes(row), name)
        for page in pool.pages.view(torch.uint8).tolist()
        for row in (page[at : at + size] for at in range(0, len(page), size))
    ]
    return torch.tensor(rows).view(len(pool.pages), -1)


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


@pytest.mark.parametrize("name", TOKEN_SCALED_TYPES)
def test_rows_with_a_scale_stand_for_numbers(name: str) -> None:
    pool, plain = token_scaled(name), make_pool(InterleavedPagePool)
    codes = torch.arange(pool.pages.numel()).view_as(pool.pages) * 7 % 119
    pool.pages.copy_(codes)  # fp8 codes and scales are finite
    plain.pages.copy_(unpacked(pool, name))
    pages = pool.layer_page_ids(1, torch.tensor([5, 0, 2]))
    assert torch.allclose(pool.keys(pages, 1), plain.keys(pages, 1), rtol=1e-5)
    assert torch.allclose(pool.values(pages, 1), plain.values(pages, 1), rtol=1e-5)


@pytest.mark.parametrize("name", TOKEN_SCALED_TYPES)
@pytest.mark.parametrize("policy", COPYING)
def test_events_copy_tokens_with_their_scales(policy: str, name: str, tmp_path: Path) -> None:
    """The entries that are kept of the numbers, and every byte as it was."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    positions = (70, 103)
    if pipeline.token_state:
        pipeline, positions = once(pipeline), (70,)
    request = Request(pipeline, token_scaled(name), "fraction", positions)
    plain = Request(pipeline, make_pool(InterleavedPagePool), "fraction", positions)
    pool, rows = request.pool, request.pool.row_size
    held = pool.fresh_pages(torch.arange(len(pool.pages) // pool.pages_per_block))
    everything = (pool.keys(held, 0), pool.values(held, 0))
    plain.pool.write(held, *everything)
    before = {bytes(row) for row in pool.pages.view(-1, 2 * rows).tolist()}
    for each in (request, plain):
        each.run()
    for found, expected in zip(left_by(request), left_by(plain), strict=True):
        for part in ("counts", "pages", "keys", "values"):
            assert torch.equal(found[part], expected[part]), part
        kept = pool.pages[found["pages"].flatten()].view(-1, 2 * rows)
        assert {bytes(row) for row in kept.tolist()} <= before


@pytest.mark.parametrize("kind", KINDS)
def test_queries_in_pages_are_the_models_own(kind: type[PagePool]) -> None:
    """Under pressure the last queries lie in the pool: four bytes each of a page's numbers."""
    pool = quantized(kind)
    assert pool.queries_per_page == 2 * BLOCK_SIZE // 4
    check_queries(pool)


def test_queries_fit_into_pages_that_are_no_whole_number_of_them() -> None:
    """Pages of 8 times 28 bytes have room for two queries of 96."""
    pool = token_scaled("int8_per_token_head")
    pages = torch.zeros(len(pool.pages), 2 * BLOCK_SIZE * 28, dtype=torch.uint8)
    pool = replace(pool, pages=pages, head_size=24)
    assert pool.queries_per_page == 2
    check_queries(pool)


def check_queries(pool: PagePool) -> None:
    """Records a ring buffer of queries in some blocks, and reads it."""
    heads, window = NUM_HEADS * GROUP, 7
    count = window_blocks(window, heads, NUM_HEADS, pool.queries_per_page)
    windows, before = PagedWindows(pool, window, heads), pool.pages.clone()
    blocks = tuple(range(3, 3 + count))
    windows.hold("r", blocks)
    where = windows.locate([("r", 0, Observation(0, 20, window))])
    queries = torch.randn(NUM_LAYERS, window, heads, pool.head_size)
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
