"""Queries of a decode step, copied to addresses that are read when they are copied."""

from __future__ import annotations

from torch import Tensor

from vllm_kvcompress.kernels.common.addressed_rows import numbers_at


def record_queries(queries: Tensor, addresses: Tensor, layer_bytes: Tensor, layer: int) -> None:
    """Copies queries of a layer, one of each request and query head.

    Args:
        queries: [R, Hq, D].
        addresses: [R, Hq] int64 where they go in the first layer; 0: nowhere.
        layer_bytes: [num_layers] int64 how many bytes behind, in each layer.
        layer: of these.
    """
    behind = int(layer_bytes[layer])
    for row, address in zip(queries.flatten(0, 1), addresses.flatten().tolist(), strict=True):
        if address:
            numbers_at(address + behind, len(row), row.dtype).copy_(row)
