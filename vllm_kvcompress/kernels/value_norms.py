"""Norms of values after the output projection (CriticalKV), in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import (
    head_slices,
    multiplies_bf16,
    tile_bytes,
)
from vllm_kvcompress.kernels.dispatch import by_device

RIDGE = 1e-9  # added to all eigenvalues of W W^T, as a fraction of their mean
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
def value_norms_l2(view: KVView, output_root: Tensor, num_layers: int = 1) -> Tensor:
    """Mean over the group of ||v W_O||_2 = ||v L||_2 per entry, with `output_roots` L of W_O.

    Args:
        output_root: [H or a divisor of it, G, D, D] in the cache's type (on CPUs with any number of
            columns); each layer's are repeated for the heads of several requests.
        num_layers: layers that the heads are of, as many in each, one layer behind the other.

    Returns:
        [H, n] fp32; anything behind the lengths.
    """
    values = view.values()
    num_heads, num_entries, head_size = values.shape
    group, root_of = output_root.shape[1], _matrix_of_heads(num_heads, output_root, num_layers)
    fast = values.dtype == torch.bfloat16 and multiplies_bf16(values.device)
    dtype = values.dtype if fast else torch.float32
    roots = output_root.to(dtype)
    norms = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=values.device)
    head_bytes = 2 * num_entries * head_size * dtype.itemsize
    for heads in head_slices(num_heads, head_bytes, values.device):
        for member in range(group):
            products = values[heads].to(dtype) @ roots[root_of[heads], member]
            norms[heads] += torch.linalg.vector_norm(products, dim=2, dtype=torch.float32)
    return norms / group


def _matrix_of_heads(num_heads: int, matrices: Tensor, num_layers: int) -> Tensor:
    """Returns the [num_heads] int64 number of each head's matrix: each layer's, repeated."""
    numbers = torch.arange(len(matrices), device=matrices.device).view(num_layers, -1)
    return numbers.repeat(1, num_heads // len(matrices)).flatten()


def output_roots(weight: Tensor) -> Tensor:
    """Returns [..., D, D] L with L L^T = W W^T of projections [..., D, M], in their type.

    ||v W|| is ||v L||, from D products per element of v in the place of M. A little is added to
    W W^T, which is singular where heads are not used in full.
    """
    heads = (head.double() for head in weight.flatten(0, -3))  # one at a time: they are large
    gram = torch.stack([head @ head.mT for head in heads]).view(*weight.shape[:-1], -1)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    added = (RIDGE * diagonal.mean(dim=-1, keepdim=True) + 1e-20).expand_as(diagonal)
    root = torch.linalg.cholesky_ex(gram + torch.diag_embed(added)).L
    return root.to(weight.dtype).contiguous()  # LAPACK's order is by columns
