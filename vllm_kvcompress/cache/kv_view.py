"""Keys and values in pages that this package's kernels do not read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.cache.pages import PagePool
from vllm_kvcompress.kernels.common.kv_view import KVView


@dataclass(frozen=True, eq=False)
class PooledKV(KVView):
    """In a pool's pages, which it gathers from as they are ordered inside.

    Attributes:
        lengths, num_tail, shorter: as of `KVView`.
        pool: has the pages.
        layer: whose heads they are.
        page_table: [H, width] int64 full pages; anything behind a head's last one.
        partial: [H, 0 or 1] int64 the pages of the partial last block.
    """

    lengths: Tensor
    num_tail: int
    pool: PagePool
    layer: int
    page_table: Tensor
    partial: Tensor
    shorter: Tensor | None = None

    @property
    def capacity(self) -> int:
        """n."""
        return int(self.page_table.shape[1]) * self.pool.block_size

    @property
    def head_size(self) -> int:
        """D."""
        return self.pool.head_size

    def gather(self, which: int, tail: bool) -> Tensor:
        """From the pool."""
        read = self.pool.values if which else self.pool.keys
        if tail:
            return read(self.partial, self.layer).flatten(1, 2)[:, : self.num_tail]
        return read(self.page_table, self.layer).flatten(1, 2)
