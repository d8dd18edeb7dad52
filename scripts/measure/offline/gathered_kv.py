"""Keys and values in tensors, as policies read them without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView


@dataclass(frozen=True, eq=False)
class GatheredKV(KVView):
    """Keys and values in tensors.

    Attributes:
        lengths: as in `KVView`.
        rows: [H, n, D] keys and values of full blocks, padded on the right.
        tail: [H, t, D] keys and values of the partial last block.
    """

    lengths: Tensor
    rows: tuple[Tensor, Tensor]
    tail: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor | None = None,
        tail: tuple[Tensor, Tensor] | None = None,
    ) -> GatheredKV:
        """Wraps [H, n, D] keys and values; by default all are valid, and there is no tail."""
        if lengths is None:
            lengths = torch.full((len(keys),), keys.shape[1], device=keys.device)
        return cls(lengths, (keys, values), tail or (keys[:, :0], values[:, :0]))

    @property
    def num_tail(self) -> int:  # type: ignore[override]
        return int(self.tail[0].shape[1])

    @property
    def capacity(self) -> int:
        return int(self.rows[0].shape[1])

    @property
    def head_size(self) -> int:
        return int(self.rows[0].shape[2])

    def gather(self, which: int, tail: bool) -> Tensor:
        return self.tail[which] if tail else self.rows[which]
