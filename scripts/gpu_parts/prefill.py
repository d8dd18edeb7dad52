"""A chunk's attention over compressed pages, against vLLM's kernels and torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts import shapes, vllm_attention
from gpu_parts.flash import attention_per_head, flash_attention, why_no_flash
from gpu_parts.measure import progress, seconds_of
from vllm_kvcompress.kernels.attention.prefill_triton import prefill_attention
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries

Row = dict[str, Any]
LAYOUTS = ("uniform", "ragged")


@dataclass(frozen=True)
class PrefillPlan:
    """Sizes of the prefill measurement, for one request.

    Attributes:
        context: tokens before the chunk.
        kept: the share of them that is resident.
        chunks: tokens of a chunk.
        block_size: tokens of a page.
        repeats: of every measurement.
    """

    context: int = 32768
    kept: float = 0.25
    chunks: tuple[int, ...] = (512, 2048, 8192)
    block_size: int = 16
    repeats: int = 50


def measure_prefill(plan: PrefillPlan) -> list[Row]:
    """One row per chunk, division among heads and implementation."""
    rows = []
    for chunk in progress(plan.chunks, "prefill attention"):
        num_kept = int(plan.context * plan.kept) // plan.block_size * plan.block_size
        for layout in LAYOUTS:
            lengths = shapes.lengths_of(layout, 1, num_kept, plan.context, plan.block_size)
            entries = shapes.make_entries(lengths + chunk, plan.block_size)
            seen = int(lengths.sum()) * chunk + shapes.NUM_HEADS * chunk * (chunk + 1) // 2
            for name, work in _works(entries, chunk).items():
                seconds = seconds_of(work, plan.repeats)
                flops = 4 * shapes.HEAD_SIZE * shapes.GROUP * seen
                rows.append(
                    {
                        "chunk": chunk,
                        "layout": layout,
                        "kernel": name,
                        "seconds": seconds,
                        "flops_per_second": flops / seconds,
                    }
                )
        rows.append(_unmasked(num_kept, chunk, plan.repeats))
    return rows


def _works(entries: PagedEntries, chunk: int) -> dict[str, Callable[[], Any]]:
    """Returns the work of this package's kernel, and of vLLM's if available."""
    shape = (entries.num_sequences, chunk, shapes.GROUP, shapes.HEAD_SIZE)
    queries = torch.randn(shape, dtype=shapes.DTYPE, device="cuda")
    by_group = queries.transpose(1, 2)

    def ours() -> None:
        prefill_attention(entries, by_group, shapes.SCALE, None, False)

    works: dict[str, Callable[[], Any]] = {"paged": ours}
    if vllm_attention.why_not() is None:
        works["vllm"] = vllm_attention.vllm_attention(entries, queries, shapes.SCALE)
    if why_no_flash() is None:
        flash, _ = flash_attention()
        works["flash"] = attention_per_head(flash, entries, queries, shapes.SCALE)
    return works


def _unmasked(num_kept: int, chunk: int, repeats: int) -> Row:
    """torch's attention over as many contiguous entries, without a mask: half a chunk more."""
    heads, dims = shapes.NUM_HEADS, shapes.HEAD_SIZE
    entries = num_kept + chunk

    def random(num_heads: int, tokens: int) -> Tensor:
        return torch.randn(1, num_heads, tokens, dims, dtype=shapes.DTYPE, device="cuda")

    queries = random(heads * shapes.GROUP, chunk)
    keys, values = random(heads, entries), random(heads, entries)

    def work() -> None:
        scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

    seconds = seconds_of(work, repeats)
    flops = 4 * dims * heads * shapes.GROUP * chunk * entries
    return {
        "chunk": chunk,
        "layout": "uniform",
        "kernel": "torch, no mask",
        "seconds": seconds,
        "flops_per_second": flops / seconds,
    }
