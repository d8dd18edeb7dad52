"""Kernels over pages, one name each: Triton for pages on a GPU, plain torch for any others.

Pages on torch's meta device have no numbers; for them only results' shapes are made, and the most
memory that is taken meanwhile.

Triton is imported by the first call that needs it, so that nothing here depends on it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm_kvcompress.kernels import paged_shapes, paged_torch
from vllm_kvcompress.kernels.paged_entries import PagedEntries

P = ParamSpec("P")
T = TypeVar("T")
PagedKernel = Callable[Concatenate[PagedEntries, P], T]


def triton_kernel(module: str, name: str) -> Any:
    """The launcher `name` of `vllm_kvcompress.kernels.<module>`."""
    return getattr(importlib.import_module(f"vllm_kvcompress.kernels.{module}"), name)


def by_device(twin: PagedKernel[P, T], module: str) -> PagedKernel[P, T]:
    """`twin`, or the function of the same name and signature in `module` for pages on a GPU."""
    shapes: PagedKernel[P, T] = getattr(paged_shapes, twin.__name__, twin)

    @functools.wraps(twin)
    def call(entries: PagedEntries, /, *args: P.args, **kwargs: P.kwargs) -> T:
        chosen: PagedKernel[P, T] = twin
        if entries.pages.is_meta:
            chosen = shapes
        elif entries.pages.is_cuda:
            chosen = triton_kernel(module, twin.__name__)
        return chosen(entries, *args, **kwargs)

    return call


add_to_moments = by_device(paged_torch.add_to_moments, "moments_triton")
compact_pages = by_device(paged_torch.compact_pages, "compact_triton")
decode_attention = by_device(paged_torch.decode_attention, "decode_triton")
prefill_attention = by_device(paged_torch.prefill_attention, "prefill_triton")
merge_groups = by_device(paged_torch.merge_groups, "merge_triton")
keydiff_scores = by_device(paged_torch.keydiff_scores, "keydiff_triton")
value_norms_l1 = by_device(paged_torch.value_norms_l1, "value_norms_triton")
value_norms_l2 = by_device(paged_torch.value_norms_l2, "value_norms_triton")
window_mass = by_device(paged_torch.window_mass, "window_mass_triton")
