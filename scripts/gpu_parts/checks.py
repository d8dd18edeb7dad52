"""Every Triton kernel against its torch twin on the GPU at hand, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpu_parts import shapes
from gpu_parts.flash import attend_per_head, flash_attention
from gpu_parts.measure import progress
from vllm_kvcompress.kernels import moment_size, paged, paged_torch, selection, selection_torch
from vllm_kvcompress.kernels.paged_entries import PagedEntries
from vllm_kvcompress.kernels.paged_numbers import PagedNumbers

TOLERANCE = 3e-2  # bf16, after a softmax or a projection
SELECTED_FROM = (33, 8192, 100_000)
LENGTHS = (45, 0, 1, 130, 16, 777, 77, 33)
Check = tuple[str, Callable[[Any], Any]]


def check_kernels(block_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """One row per kernel and block size: the largest error, and whether it passed."""
    rows = []
    for block_size in progress(block_sizes, "checks"):
        entries = shapes.make_entries(torch.tensor(LENGTHS), block_size, spare_pages=4)
        for name, run in _checks(entries):
            errors = [
                _error(found, expected)
                for found, expected in zip(run(paged), run(paged_torch), strict=True)
            ]
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
        checks: dict[str, Callable[[Any], Tensor]] = {
            "top_entries": lambda k, a=(scores, valid, num_kept): k.top_entries(*a),
            "apportion": lambda k, a=(num_kept, 8 * num_entries // 9, floor, cap): k.apportion(*a),
        }
        for name, run in checks.items():
            equal = torch.equal(run(selection), run(selection_torch))
            error = 0.0 if equal else float("inf")
            rows.append({"kernel": name, "block_size": 0, "error": error, "passed": equal})
    return rows


def check_flash(block_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """vLLM's FlashAttention as compressed requests call it, against our twin."""
    flash, version = flash_attention()
    rows = []
    for block_size in block_sizes:
        # FlashAttention is given no empty sequences: every head keeps a page at least.
        lengths = torch.tensor([length for length in LENGTHS if length])
        entries = shapes.make_entries(lengths, block_size)
        queries = torch.randn(len(lengths), 4, shapes.HEAD_SIZE, device="cuda").to(shapes.DTYPE)
        found = attend_per_head(flash, version, entries, queries, shapes.SCALE)
        expected = paged_torch.decode_attention(entries, queries, shapes.SCALE, None)[0]
        error = _error(found, expected)
        name = f"FlashAttention {version} per head"
        row = {"kernel": name, "block_size": block_size, "error": error}
        rows.append({**row, "passed": error <= TOLERANCE})
    return rows


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number expected; NaN counts as infinite."""
    same = found == expected  # infinities, too
    difference = torch.where(same, 0.0, (found.float() - expected.float()).abs())
    size = expected.float().nan_to_num(neginf=0).abs().max().clamp_min(1e-6)
    error = float((difference / size).max())
    return error if error == error else float("inf")


def _checks(entries: PagedEntries) -> Iterator[Check]:
    """Names, and what to run with either implementation; each returns a list of tensors."""
    num_heads, dims = entries.num_sequences, shapes.HEAD_SIZE
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = shapes.DTYPE) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    one, chunk = random(num_heads, 4, dims), random(num_heads, 4, 40, dims)
    bias = random(num_heads, 100, dtype=torch.float32)
    window, weight = random(32, num_heads * 4, dims), random(num_heads, dims, 4, 512) / 16
    wanted = entries.valid()
    state = torch.zeros(num_heads, moment_size(dims), device="cuda")
    evicted = random(num_heads, entries.capacity) > 0
    added = PagedNumbers.of_rows(bias)
    yield "decode_attention", lambda k: k.decode_attention(entries, one, shapes.SCALE, added)
    yield "prefill_attention", lambda k: k.prefill_attention(entries, chunk, shapes.SCALE, added)
    yield "window_mass", lambda k: [k.window_mass(entries, 0, window, shapes.SCALE, bias)]
    for variant in ("value", "key", "joint"):
        asked = (entries, 0, window, shapes.SCALE, variant)
        name = f"window_perturbation:{variant}"
        yield name, lambda k, a=asked: [k.window_perturbation(*a)]
    yield "value_norms_l1", lambda k: [k.value_norms_l1(entries, weight, wanted)]
    moments = paged_torch.add_to_moments(entries, state, evicted)
    yield "correct_with_moments", lambda k: [_corrected(k, moments, chunk)]
    yield "nearest_keys", lambda k: k.nearest_keys(entries, ~evicted)[:1]
    yield "compact_pages", lambda k: [_compacted(k, entries)]


def _corrected(kernels: Any, moments: Tensor, queries: Tensor) -> Tensor:
    """The queries themselves as outputs, corrected."""
    outputs, lse = queries.clone(), queries.float().norm(dim=3)
    state = PagedNumbers.of_rows(moments)
    kernels.correct_with_moments(state, outputs, lse, queries, shapes.SCALE)
    return outputs


def _compacted(kernels: Any, entries: PagedEntries) -> Tensor:
    """The last four pages after heads 3 and 5 kept one and three pages in them."""
    size = entries.block_size
    counts = torch.zeros(entries.num_sequences, dtype=torch.int64, device="cuda")
    counts[3], counts[5] = 1, 3
    kept = torch.cat([torch.arange(size) + 1, torch.arange(3 * size) * 2]).cuda()
    first = entries.pages.shape[0] - 4
    kernels.compact_pages(entries, counts, kept, torch.arange(first, first + 4, device="cuda"))
    return entries.pages[-4:].clone()
