"""What events cost against the prefill of the same prompt: whole ones, and their kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from gpu_parts import shapes
from gpu_parts.measure import progress, seconds_of
from vllm_kvcompress.kernels.common.kv_view import PagedKV
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.compaction import compact_pages
from vllm_kvcompress.kernels.keydiff import keydiff_scores
from vllm_kvcompress.kernels.value_norms import output_roots, value_norms_l1, value_norms_l2
from vllm_kvcompress.kernels.window_mass import window_mass

Row = dict[str, Any]
WINDOW_SIZE = 32
# Tokens that go through the linear layers at once, as in chunked prefill.
CHUNK = 8192


def measure_events(
    prompts: tuple[int, ...], block_size: int, repeats: int, copy_bandwidth: float
) -> list[Row]:
    """One row per prompt: seconds of all layers, of whole events and of single kernels."""
    rows = []
    for num_tokens in progress(prompts, "events"):
        prefill = prefill_seconds(num_tokens, repeats)
        parts = {
            name: shapes.NUM_LAYERS * seconds_of(work, repeats)
            for name, work in _parts(num_tokens, block_size).items()
        }
        kept = int(shapes.KEPT * num_tokens) // block_size * block_size
        copied = 2 * shapes.entry_bytes(kept) * shapes.NUM_HEADS * shapes.NUM_LAYERS
        rows.append(
            {
                "prompt": num_tokens,
                "prefill_seconds": prefill,
                "seconds": parts,
                "policies": _whole_events(num_tokens, block_size, repeats, prefill),
                "compaction_of_copy_bandwidth": copied / parts["compaction"] / copy_bandwidth,
            }
        )
    return rows


def why_no_whole_events() -> str | None:
    """Returns which missing package prevents whole events; None: nothing is missing."""
    if importlib.util.find_spec("numpy") is None:
        return "numpy is not installed: whole events are left out, kernels alone are measured."
    return None


def _whole_events(num_tokens: int, block_size: int, repeats: int, prefill: float) -> list[Row]:
    """Returns the rows of `measure_whole_events`; none if numpy is missing."""
    if why_no_whole_events() is not None:
        return []
    from gpu_parts.whole_events import measure_whole_events

    return measure_whole_events(num_tokens, block_size, max(3, repeats // 5), prefill)


def prefill_seconds(num_tokens: int, repeats: int) -> float:
    """Prefill of one prompt: the linear layers' products and causal attention, of all layers."""
    return shapes.NUM_LAYERS * (
        _linear_seconds(num_tokens, repeats) + _attention_seconds(num_tokens, repeats)
    )


def _linear_seconds(num_tokens: int, repeats: int) -> float:
    """q, k, v, o, gate, up and down of one layer."""
    hidden, wide = shapes.HIDDEN_SIZE, shapes.INTERMEDIATE_SIZE
    own = 2 * shapes.NUM_HEADS * shapes.HEAD_SIZE
    shape = [(hidden, hidden + own), (hidden, hidden), (hidden, 2 * wide), (wide, hidden)]
    rows = min(CHUNK, num_tokens)
    pairs = [
        (
            torch.randn(rows, width, dtype=shapes.DTYPE, device="cuda"),
            torch.randn(out, width, dtype=shapes.DTYPE, device="cuda"),
        )
        for width, out in shape
    ]

    def work() -> None:
        for inputs, weight in pairs:
            linear(inputs, weight)

    return seconds_of(work, repeats) * num_tokens / rows


def _attention_seconds(num_tokens: int, repeats: int) -> float:
    """One layer, causal, over contiguous tensors."""
    sizes = (1, shapes.NUM_HEADS * shapes.GROUP, num_tokens, shapes.HEAD_SIZE)
    queries = torch.randn(*sizes, dtype=shapes.DTYPE, device="cuda")
    keys, values = torch.randn(
        2, 1, shapes.NUM_HEADS, *sizes[2:], dtype=shapes.DTYPE, device="cuda"
    )

    def work() -> None:
        scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)

    return seconds_of(work, max(3, repeats // 5))


def _parts(num_tokens: int, block_size: int) -> dict[str, Callable[[], Any]]:
    """The parts of one layer's event."""
    kept_pages = int(shapes.KEPT * num_tokens) // block_size
    entries = shapes.make_entries(
        shapes.uniform_lengths(1, num_tokens), block_size, kept_pages * shapes.NUM_HEADS
    )
    heads, group, dims = shapes.NUM_HEADS, shapes.GROUP, shapes.HEAD_SIZE
    queries = torch.randn(WINDOW_SIZE, heads * group, dims, dtype=shapes.DTYPE, device="cuda")
    stored = torch.randn(shapes.HIDDEN_SIZE, heads * group * dims, device="cuda")
    stored = (stored / shapes.HIDDEN_SIZE**0.5).to(shapes.DTYPE)
    weight = stored.view(-1, heads, group, dims).permute(1, 3, 2, 0)
    root = output_roots(weight.permute(0, 2, 1, 3))
    wanted = entries.valid()

    def view() -> PagedKV:
        return PagedKV.of(entries)  # nothing gathered yet

    compact = _compaction(entries, kept_pages)
    return {
        "window_mass": lambda: window_mass(view(), queries, shapes.SCALE),
        "value_norms_l1": lambda: value_norms_l1(view(), weight, wanted),
        "value_norms_l2": lambda: value_norms_l2(view(), root),
        "keydiff": lambda: keydiff_scores(view(), "mean_normalized"),
        "compaction": lambda: compact_pages(entries, *compact),
    }


def _compaction(
    entries: PagedEntries, kept_pages: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page counts, kept entries drawn at random, and the spare pages."""
    num_heads, num_kept = entries.num_sequences, kept_pages * entries.block_size
    order = torch.rand(num_heads, entries.capacity, device="cuda").argsort(dim=1)
    kept = order[:, :num_kept].sort(dim=1).values.flatten()
    total = num_heads * kept_pages
    targets = torch.arange(total, device="cuda") + entries.pages.shape[0] - total
    return torch.full((num_heads,), kept_pages, device="cuda"), kept, targets
