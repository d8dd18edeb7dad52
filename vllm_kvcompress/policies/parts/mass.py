"""Attention mass as a score: pooled over neighbours, or added up over events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.pooling import max_or_mean_pool
from vllm_kvcompress.kernels.window_mass import (
    Window,
    window_mass,
    window_masses,
    window_masses_by_distance,
)
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.parts.parameters import parameter

# Queries of a short turn that choose as well as a full window: docs/results/conversations.md.
ENOUGH_QUERIES = 32
STRIDE = parameter(2, "every stride-th query counts, from the last one back", minimum=1)


def observed_mass(view: LayerView, stride: int = 1) -> Tensor:
    """[H, n] fp32 mean attention of every stride-th observed query, counted back from the last."""
    if view.alibi is not None:
        return observed_masses(view, (len(view.queries), stride))[0]
    return window_mass(view.kv, view.queries, view.scale, view.entries.bias, stride, view.sinks)


def observed_masses(view: LayerView, *windows: Window) -> Tensor:
    """[windows, H, n] mean attention of several windows, each given by its size and stride.

    A window that is larger than the number of queries has them all.
    """
    fitting = [(min(size, len(view.queries)), stride) for size, stride in windows]
    if view.alibi is not None:
        assert view.entries.positions is not None
        ends = upload(np.repeat(view.ends, view.heads_per_request), view.device)
        of_keys = view.alibi, view.entries.positions, ends
        return window_masses_by_distance(view.kv, view.queries, view.scale, fitting, *of_keys)
    state = (view.entries.bias, view.sinks)
    return window_masses(view.kv, view.queries, view.scale, fitting, *state)


def accumulated_mass(view: LayerView, window_size: int) -> Tensor:
    """[H, n] fp32 attention received from the observed queries of all events.

    Each event observes the last `window_size` queries since the one before. The sum is counted in
    windows, so that at a first event it is the window's mean.
    """
    assert view.entries.accumulated is not None
    return view.entries.accumulated / window_size


def pool_left_of_window(view: LayerView, raw: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """[H, n] scores, those left of the window pooled over neighbours ("max" or "mean")."""
    if kernel_size <= 1:
        return raw
    empty = float("-inf") if pooling == "max" else 0.0
    pool = partial(max_or_mean_pool, kernel_size=kernel_size, mode=pooling)
    return left_of_window(view, raw, pool, empty)


def left_of_window(
    view: LayerView, raw: Tensor, pool: Callable[[Tensor], Tensor], empty: float
) -> Tensor:
    """[H, n] scores, those left of the window pooled.

    The window's own scores stay, and pooling sees `empty` in their place.
    """
    end = view.lengths + view.kv.tails.clamp_max(view.queries.shape[0])
    index = torch.arange(view.num_entries, device=view.device)
    in_window = index >= (end - view.queries.shape[0])[:, None]  # and padding
    return torch.where(in_window, raw, pool(raw.masked_fill(in_window, empty)))


def check_kernel_size(kernel_size: int, name: str = "kernel_size") -> None:
    """Refuses an even pooling width."""
    if kernel_size % 2 == 0:
        raise ConfigError(
            f"{name}: expected an odd number, so that pooling is centred, found {kernel_size}; "
            f"use {kernel_size + 1}."
        )
