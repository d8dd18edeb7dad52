"""Decode attention against the bandwidth of the device, and against a full cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts import flash, shapes, vllm_attention
from gpu_parts.measure import host_seconds_of, progress, seconds_of
from vllm_kvcompress.kernels.attention import decode_triton
from vllm_kvcompress.kernels.attention.decode_triton import DecodeSettings, decode_attention
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.paged_numbers import PagedNumbers
from vllm_kvcompress.kernels.merging.moments import packed_size
from vllm_kvcompress.kernels.merging.moments_triton import correct_with_moments
from vllm_kvcompress.rounding import ceil_div

Row = dict[str, Any]


@dataclass(frozen=True)
class DecodePlan:
    """What to measure.

    Attributes:
        context: tokens of a full cache.
        batches: numbers of requests.
        kept: shares of the context that are resident.
        block_size: tokens of a page.
        repeats: of every measurement.
    """

    context: int = 32768
    batches: tuple[int, ...] = (1, 8, 64)
    kept: tuple[float, ...] = (0.25, 0.1)
    block_size: int = 16
    repeats: int = 50


def fits(num_bytes: int) -> bool:
    """Whether the device has as much memory free, and half as much again."""
    free, _ = torch.cuda.mem_get_info()
    return 1.5 * num_bytes < free


def measure_decode(plan: DecodePlan, read_bandwidth: float) -> list[Row]:
    """One row per batch, share, division among heads and option."""
    rows = []
    for batch in progress(plan.batches, "decode attention"):
        full = _full_seconds(plan, batch)
        for kept, layout in product(plan.kept, ("uniform", "ragged")):
            num_tokens = int(plan.context * kept) // plan.block_size * plan.block_size
            lengths = shapes.lengths_of(layout, batch, num_tokens, plan.context, plan.block_size)
            entries = shapes.make_entries(lengths, plan.block_size)
            triton, per_head = _vllm_seconds(entries, plan), _flash_seconds(entries, plan)
            for option, seconds, host_seconds in _option_seconds(entries, plan):
                num_bytes = shapes.entry_bytes(int(lengths.sum()))
                rows.append(
                    {
                        "batch": batch,
                        "kept": kept,
                        "layout": layout,
                        "option": option,
                        "seconds": seconds,
                        "host_seconds": host_seconds,
                        "bytes_per_second": num_bytes / seconds,
                        "of_read_bandwidth": num_bytes / seconds / read_bandwidth,
                        "vllm_seconds": triton,
                        "flash_seconds": per_head,
                        "full_cache": {
                            name: full_seconds / seconds for name, full_seconds in full.items()
                        },
                    }
                )
    return rows


def _queries(num_sequences: int) -> torch.Tensor:
    return torch.randn(
        num_sequences, shapes.GROUP, shapes.HEAD_SIZE, dtype=shapes.DTYPE, device="cuda"
    )


def _option_seconds(entries: PagedEntries, plan: DecodePlan) -> Iterator[tuple[str, float, float]]:
    """Time on the GPU and on the host, of attention without anything and with more.

    With the log-sum-exp, with a bias besides, or with MomentKV's correction.
    """
    queries = _queries(entries.num_sequences)
    size = packed_size(shapes.HEAD_SIZE)
    tile_ends = shapes.tile_ends_of(entries)
    states = _carried(entries, size, torch.full_like(entries.flat_lengths, size))
    biases = _carried(entries, entries.capacity, entries.flat_lengths)
    for option, bias, state in (
        ("plain", None, None),
        ("lse", None, None),
        ("bias+lse", biases, None),
        ("lse+correction", None, states),
    ):
        with_lse = option != "plain"

        def work(
            bias: PagedNumbers | None = bias,
            state: PagedNumbers | None = state,
            with_lse: bool = with_lse,
        ) -> None:
            outputs, lse = decode_attention(
                entries, queries, shapes.SCALE, bias, with_lse, tile_ends=tile_ends
            )
            if state is not None and lse is not None:
                rows = (outputs[:, :, None], lse[..., None], queries[:, :, None])
                correct_with_moments(state, *rows, shapes.SCALE)

        yield option, seconds_of(work, plan.repeats), host_seconds_of(work)


def _carried(entries: PagedEntries, room: int, lengths: torch.Tensor) -> PagedNumbers:
    """Ones for every head, in pages of the cache's size, as a policy's state lies in them.

    Args:
        entries: of the heads.
        room: from a head's numbers to the next one's.
        lengths: how many each has.
    """
    heads = shapes.NUM_HEADS
    page = entries.pages.shape[1] * entries.pages.element_size() // 4
    pages_each = ceil_div(heads * room, page)
    num_pages = entries.num_sequences // heads * pages_each
    ids = torch.randperm(num_pages, dtype=torch.int32, device=entries.device)
    sequence_ids = torch.arange(entries.num_sequences, dtype=torch.int32, device=entries.device)
    return PagedNumbers(
        torch.ones(num_pages, page, device=entries.device),
        ids.view(-1, pages_each),
        sequence_ids % heads * room,
        lengths.to(torch.int32),
    )


def _vllm_seconds(entries: PagedEntries, plan: DecodePlan) -> float | None:
    """vLLM's Triton kernel over the same pages, without anything; None where it cannot be had."""
    if vllm_attention.why_not() is not None:
        return None
    queries = _queries(entries.num_sequences)[:, None]
    work = vllm_attention.vllm_attention(entries, queries, shapes.SCALE)
    return seconds_of(work, plan.repeats)


def _flash_seconds(entries: PagedEntries, plan: DecodePlan) -> float | None:
    """vLLM's FlashAttention, likewise; it makes its schedule each time."""
    if flash.why_no_flash() is not None:
        return None
    function, _ = flash.flash_attention()
    queries = _queries(entries.num_sequences)[:, None]
    work = flash.attention_per_head(function, entries, queries, shapes.SCALE)
    return seconds_of(work, plan.repeats)


def _full_seconds(plan: DecodePlan, batch: int) -> dict[str, float]:
    """Attention over the whole context by every kernel at hand.

    This package's; vLLM's, Triton over single heads and FlashAttention over requests; torch's over
    contiguous tensors.
    """
    if not fits(shapes.entry_bytes(plan.context) * shapes.NUM_HEADS * batch):
        return {}
    entries = shapes.make_whole_entries(batch, plan.context, plan.block_size)
    queries, tile_ends = _queries(entries.num_sequences), shapes.tile_ends_of(entries)

    def paged() -> None:
        decode_attention(entries, queries, shapes.SCALE, None, False, tile_ends=tile_ends)

    seconds = {"paged": seconds_of(paged, plan.repeats)}
    if (other := _vllm_seconds(entries, plan)) is not None:
        seconds["vllm"] = other
    if flash.why_no_flash() is None:
        function, _ = flash.flash_attention()
        asked = (entries, queries, shapes.SCALE, shapes.NUM_HEADS)
        attention = flash.attention_of_requests(function, *asked)
        seconds["flash"] = seconds_of(attention, plan.repeats)
    keys, values = entries.pages.view(2, batch, shapes.NUM_HEADS, plan.context, shapes.HEAD_SIZE)
    by_request = queries.view(batch, -1, 1, shapes.HEAD_SIZE)

    def contiguous() -> None:
        scaled_dot_product_attention(by_request, keys, values, enable_gqa=True)

    seconds["torch"] = seconds_of(contiguous, plan.repeats)
    return seconds


def tune_decode(plan: DecodePlan, read_bandwidth: float) -> list[Row]:
    """Every way to cut the work, for 8 requests of a quarter of the context; fastest first."""
    lengths = shapes.uniform_lengths(8, plan.context // 4)
    entries = shapes.make_entries(lengths, plan.block_size)
    queries = _queries(len(lengths))
    num_bytes = shapes.entry_bytes(int(lengths.sum()))
    ways = list(product((1, 2, 3, 4), (1 << 13, 1 << 14, 1 << 15), (4, 8), (3, 5, 7)))
    rows: list[Row] = []

    def work() -> None:
        decode_attention(entries, queries, shapes.SCALE, None, False)

    for programs, tile_bytes, warps, stages in progress(ways, "settings"):
        settings = DecodeSettings(programs, tile_bytes, warps, stages)
        row: Row = {
            "programs_per_sm": programs,
            "tile_bytes": tile_bytes,
            "num_warps": warps,
            "num_stages": stages,
            "default": settings == decode_triton.SETTINGS,
        }
        try:
            with mock.patch.object(decode_triton, "SETTINGS", settings):
                seconds = seconds_of(work, plan.repeats)
        except Exception as error:  # too much shared memory, as far as known
            rows.append({**row, "of_read_bandwidth": 0.0, "error": str(error)[:200]})
            continue
        rows.append({**row, "of_read_bandwidth": num_bytes / seconds / read_bandwidth})
    return sorted(rows, key=lambda row: -float(row["of_read_bandwidth"]))
