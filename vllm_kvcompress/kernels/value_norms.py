"""Norms of values after the output projection (CriticalKV), in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import (
    cached_bytes,
    head_slices,
    multiplies_bf16,
    tile_bytes,
)
from vllm_kvcompress.kernels.dispatch import by_device

RIDGE = 1e-4  # added to all eigenvalues of a Gram matrix, as a fraction of their mean
MIN_PRODUCT_ROWS = 512  # of a matrix product whose other factor is large: it is packed each time


@by_device("value_norms_triton")
def value_norms_l1(view: KVView, output_weight: Tensor, wanted: Tensor) -> Tensor:
    """Mean over the group of ||v W_O||_1 per entry (CriticalKV, arXiv 2502.03805, Alg. 1).

    The projected values are never stored: entries go in tiles, a group's heads side by side.

    Args:
        output_weight: [H or a divisor of it, D, G, M] o_proj in the cache's type, [h, :, g] of
            query head h * G + g; repeated for the heads of several requests.
        wanted: [H, n] bool; the norms of other entries are left out.

    Returns:
        [H, n] fp32; 0 where left out and behind the lengths.
    """
    values, wanted = view.values(), wanted & view.valid
    num_heads, num_entries, _ = values.shape
    group = output_weight.shape[2]
    weight = output_weight.flatten(2)
    width = weight.shape[2]
    norms = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=values.device)
    rows = tile_bytes(values.device) // (width * values.element_size())
    rows = min(num_entries, max(MIN_PRODUCT_ROWS, rows))
    # Sums of 16-bit numbers are accumulated in fp32 but returned in 16 bits, which is several
    # times faster than a sum in fp32; over several stretches the rounding averages out.
    stretch = math.gcd(width, 1024)
    projected = values.new_empty(rows, width)
    for head in range(num_heads):
        for places in _some_entries(wanted[head]).split(rows):
            out = projected[: places.numel()]
            torch.mm(values[head, places], weight[head % len(weight)], out=out).abs_()
            partial = out.unflatten(1, (-1, stretch)).sum(2)
            norms[head, places] = partial.sum(1, dtype=torch.float32)
    return norms.masked_fill_(~wanted, 0) / group


def _some_entries(wanted: Tensor) -> Tensor:
    """Places of the wanted entries; of all entries where counting would wait for a device."""
    if wanted.device.type == "cpu":
        return wanted.nonzero()[:, 0]
    return torch.arange(wanted.numel(), device=wanted.device)


@by_device("value_norms_triton")
def value_norms_l2(view: KVView, output_gram: Tensor, num_layers: int = 1) -> Tensor:
    """Mean over the group of ||v W_O||_2 = sqrt(v Q v^T) per entry, with Q = W W^T.

    Values of bf16 caches are multiplied in their own type with a root of Q, which is as exact as
    they are.

    Args:
        output_gram: [H or a divisor of it, G, D, D] fp32; each layer's are repeated for the heads
            of several requests.
        num_layers: layers that the heads are of, as many in each, one layer behind the other.

    Returns:
        [H, n] fp32; anything behind the lengths.
    """
    values = view.values()
    num_heads, num_entries, head_size = values.shape
    group = output_gram.shape[1]
    if values.dtype == torch.bfloat16 and multiplies_bf16(values.device):
        return _norms_by_roots(values, _roots(output_gram).to(values.dtype), num_layers)
    gram_of = _matrix_of_heads(num_heads, output_gram, num_layers)
    norms = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=values.device)
    # A tile of values and of their products stay in a core's cache.
    row_bytes = 2 * 4 * head_size
    slices = head_slices(num_heads, num_entries * row_bytes, values.device)
    rows = max(1, cached_bytes(values.device) // max(1, row_bytes * slices[0].stop))
    for heads in slices:
        grams = output_gram[gram_of[heads]]
        for start in range(0, num_entries, rows):
            tile = values[heads, start : start + rows].float()
            for member in range(group):
                squares = (tile @ grams[:, member]).mul_(tile).sum(dim=2)
                norms[heads, start : start + rows] += squares.clamp_min_(0).sqrt_()
    return norms / group


def _norms_by_roots(values: Tensor, roots: Tensor, num_layers: int) -> Tensor:
    """Returns the [H, n] fp32 mean over the group of ||v L||_2, with roots L of Gram matrices."""
    num_heads, num_entries, _ = values.shape
    group, root_of = roots.shape[1], _matrix_of_heads(num_heads, roots, num_layers)
    norms = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=values.device)
    for heads in head_slices(num_heads, 2 * values[:1].nbytes, values.device):
        for member in range(group):
            products = values[heads] @ roots[root_of[heads], member]
            norms[heads] += torch.linalg.vector_norm(products, dim=2, dtype=torch.float32)
    return norms / group


def _matrix_of_heads(num_heads: int, matrices: Tensor, num_layers: int) -> Tensor:
    """Returns the [num_heads] int64 number of each head's matrix: each layer's, repeated."""
    numbers = torch.arange(len(matrices), device=matrices.device).view(num_layers, -1)
    return numbers.repeat(1, num_heads // len(matrices)).flatten()


def _roots(grams: Tensor) -> Tensor:
    """Returns L of grams Q = L L^T, [..., D, D]; a little is added to Q, which may be singular."""
    diagonal = grams.diagonal(dim1=-2, dim2=-1)
    added = (RIDGE * diagonal.mean(dim=-1, keepdim=True) + 1e-20).expand_as(diagonal)
    return torch.linalg.cholesky_ex(grams + torch.diag_embed(added)).L
