"""Every Triton kernel against its torch twin on the GPU at hand, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpu_parts import shapes
from gpu_parts.flash import attention_of_requests, attention_per_head, flash_attention
from gpu_parts.measure import progress
from vllm_kvcompress.kernels.apportion import apportion
from vllm_kvcompress.kernels.attention import decode_attention, prefill_attention
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.compaction import compact_pages
from vllm_kvcompress.kernels.dispatch import twin
from vllm_kvcompress.kernels.merging.moments import (
    add_to_moments,
    correct_with_moments,
    moment_size,
    pack_moments,
)
from vllm_kvcompress.kernels.merging.nearest_keys import nearest_keys
from vllm_kvcompress.kernels.top_entries import top_entries
from vllm_kvcompress.kernels.value_norms import value_norms_l1, value_norms_l2
from vllm_kvcompress.kernels.window_mass import window_mass

TOLERANCE = 3e-2  # bf16, after a softmax or a projection
SELECTED_FROM = (33, 8192, 100_000)
LENGTHS = (45, 0, 1, 130, 16, 777, 77, 33)
Check = tuple[str, Any, Callable[[Any], Any]]


def check_kernels(block_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """One row per kernel and block size: the largest error, and whether it passed."""
    rows = []
    for block_size in progress(block_sizes, "checks"):
        entries = shapes.make_entries(torch.tensor(LENGTHS), block_size, spare_pages=4)
        for name, operator, run in _checks(entries):
            actual, expected = run(operator), run(operator.__wrapped__)
            errors = [largest_error(*pair) for pair in zip(actual, expected, strict=True)]
            row = {"kernel": name, "block_size": block_size, "error": max(errors)}
            rows.append({**row, "passed": max(errors) <= TOLERANCE})
    return rows


def check_selection() -> list[dict[str, Any]]:
    """The same for kernels that work on no pages: what they return must be equal."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = []
    for num_entries in SELECTED_FROM:
        scores = torch.randn(8, num_entries, device="cuda", generator=generator)
        scores = (scores * 100).round()  # many are equal
        valid = scores % 7 != 0
        num_kept = valid.sum(dim=1) // torch.arange(1, 9, device="cuda")
        floor, cap = num_kept * 0 + 1, num_kept + 1
        checks: dict[Any, tuple[Any, ...]] = {
            top_entries: (scores, valid, num_kept),
            apportion: (num_kept[None], num_kept.sum()[None], floor[None], cap[None]),
        }
        for operator, asked in checks.items():
            equal = torch.equal(operator(*asked), operator.__wrapped__(*asked))
            name, error = operator.__name__, 0.0 if equal else float("inf")
            rows.append({"kernel": name, "block_size": 0, "error": error, "passed": equal})
    return rows


def check_flash(block_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """vLLM's FlashAttention as compressed requests call it, and as whole ones, against our twin."""
    flash, version = flash_attention()
    # FlashAttention is given no empty sequences: every head keeps a page at least.
    lengths = torch.tensor([length for length in LENGTHS if length])
    rows = []
    for block_size in block_sizes:
        entries = shapes.make_entries(lengths, block_size)
        queries = _queries(entries)
        actual = attention_per_head(flash, entries, queries[:, None], shapes.SCALE)()[:, 0]
        rows.append(_flash_row(f"{version} per head", entries, queries, actual))
        entries = shapes.make_whole_entries(3, 300, block_size)
        queries = _queries(entries)
        heads = shapes.NUM_HEADS
        actual = attention_of_requests(flash, entries, queries, shapes.SCALE, heads)()
        rows.append(_flash_row(f"{version} of requests", entries, queries, actual))
    return rows


def _queries(entries: PagedEntries) -> Tensor:
    size = (entries.num_sequences, shapes.GROUP, shapes.HEAD_SIZE)
    return torch.randn(size, device="cuda").to(shapes.DTYPE)


def _flash_row(how: str, entries: PagedEntries, queries: Tensor, actual: Tensor) -> dict[str, Any]:
    expected = twin(decode_attention)(entries, queries, shapes.SCALE, None)[0]
    error = largest_error(actual, expected)
    row = {"kernel": f"FlashAttention {how}", "block_size": entries.block_size, "error": error}
    return {**row, "passed": error <= TOLERANCE}


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number expected; NaN counts as infinite."""
    same = actual == expected  # infinities, too
    difference = torch.where(same, 0.0, (actual.float() - expected.float()).abs())
    size = expected.float().nan_to_num(neginf=0).abs().max().clamp_min(1e-6)
    error = float((difference / size).max())
    return error if error == error else float("inf")


def _checks(entries: PagedEntries) -> Iterator[Check]:
    """Names, operators, and what to run with these or their twins; each returns tensors."""
    num_heads, dims = entries.num_sequences, shapes.HEAD_SIZE
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = shapes.DTYPE) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    one, chunk = random(num_heads, 4, dims), random(num_heads, 4, 40, dims)
    bias = random(num_heads, entries.capacity, dtype=torch.float32)
    window, weight = random(32, num_heads * 4, dims), random(num_heads, dims, 4, 512) / 16
    wanted = entries.valid()
    root = random(num_heads, 4, dims, dims).tril()
    state = torch.zeros(num_heads, moment_size(dims), device="cuda")
    evicted = random(num_heads, entries.capacity) > 0
    added = PagedNumbers.of_rows(bias)
    scale, view = shapes.SCALE, PagedKV.of(entries)
    yield "decode_attention", decode_attention, lambda k: k(entries, one, scale, added)
    yield "prefill_attention", prefill_attention, lambda k: k(entries, chunk, scale, added)
    yield "window_mass", window_mass, lambda k: [k(view, window, scale, bias)]
    yield "value_norms_l1", value_norms_l1, lambda k: [k(view, weight, wanted)]
    yield "value_norms_l2", value_norms_l2, lambda k: [k(view, root)]
    moments = add_to_moments(view, state, evicted)
    corrected = (moments, chunk)
    yield "correct_with_moments", correct_with_moments, lambda k: [_corrected(k, *corrected)]
    yield "nearest_keys", nearest_keys, lambda k: k(view, ~evicted)[:1]
    yield "compact_pages", compact_pages, lambda k: [_compacted(k, entries)]


def _corrected(correct: Any, moments: Tensor, queries: Tensor) -> Tensor:
    """The queries themselves as outputs, corrected."""
    outputs, lse = queries.clone(), queries.float().norm(dim=3)
    state = PagedNumbers.of_rows(pack_moments(moments, shapes.HEAD_SIZE))
    correct(state, outputs, lse, queries, shapes.SCALE)
    return outputs


def _compacted(compact: Any, entries: PagedEntries) -> Tensor:
    """The last four pages after heads 3 and 5 kept one and three pages in them."""
    size = entries.block_size
    counts = torch.zeros(entries.num_sequences, dtype=torch.int64, device="cuda")
    counts[3], counts[5] = 1, 3
    kept = torch.cat([torch.arange(size) + 1, torch.arange(3 * size) * 2]).cuda()
    first = entries.pages.shape[0] - 4
    compact(entries, counts, kept, torch.arange(first, first + 4, device="cuda"))
    return entries.pages[-4:].clone()
