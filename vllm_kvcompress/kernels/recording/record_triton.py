"""Queries of a decode step, copied to addresses that are read when they are copied."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from vllm_kvcompress.kernels.common.launch_triton import kernel, on_device, padded
from vllm_kvcompress.kernels.common.paged_entries import expect


@kernel("layer")
def _record_kernel(
    queries,
    addresses,
    layer_bytes,
    layer,
    query_stride_r,
    query_stride_h,
    HEAD_SIZE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One query head of one request."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    address = tl.load(addresses + request * tl.num_programs(1) + head)
    if address != 0:
        address += tl.load(layer_bytes + layer)
        target = tl.cast(address, tl.pointer_type(queries.dtype.element_ty))
        dims = tl.arange(0, DIMS)
        mask = dims < HEAD_SIZE
        mine = queries + request * query_stride_r + head * query_stride_h
        tl.store(target + dims, tl.load(mine + dims, mask=mask), mask=mask)


def record_queries(queries: Tensor, addresses: Tensor, layer_bytes: Tensor, layer: int) -> None:
    """As `reference.record_queries`, in Triton."""
    num_requests, num_heads, head_size = queries.shape
    expect(
        tuple(addresses.shape) == (num_requests, num_heads) and addresses.is_contiguous(),
        f"addresses [{num_requests}, {num_heads}] side by side",
        f"{tuple(addresses.shape)} with strides {addresses.stride()}",
        "give one for every query head of every request",
    )
    with on_device(queries):
        _record_kernel[(num_requests, num_heads)](
            queries,
            addresses,
            layer_bytes,
            layer,
            *queries.stride()[:2],
            HEAD_SIZE=head_size,
            DIMS=padded(head_size),
        )
