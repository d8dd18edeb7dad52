"""Orders in which CPU attention kernels store the elements of K or V inside a page."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.errors import UnsupportedError

_PAIR_TYPES = {1: torch.int16, 2: torch.int32}  # by bytes of an element


@dataclass(frozen=True)
class Packing:
    """Order of the elements of K, or of V, inside a page.

    A page's elements, viewed as `shape`, become `[block_size, head_size]` rows when the axes
    are permuted to `token_axes + dim_axes`.
    """

    name: str
    shape: tuple[int, ...]
    token_axes: tuple[int, ...]
    dim_axes: tuple[int, ...]

    @property
    def block_size(self) -> int:
        """Number of tokens of a page."""
        return math.prod(self.shape[a] for a in self.token_axes)

    @property
    def head_size(self) -> int:
        """Number of elements of a key or value."""
        return math.prod(self.shape[a] for a in self.dim_axes)

    def to_rows(self, packed: Tensor) -> Tensor:
        """[..., block_size * head_size] page elements -> [..., block_size, head_size] rows."""
        last = len(self.shape) - 1
        keeps_pairs = self.dim_axes[-1] == last and len(self.dim_axes) > 1 and self.shape[last] == 2
        if keeps_pairs and packed.element_size() in _PAIR_TYPES:
            # Two neighbours of 8 or 16 bits, which rows have side by side too, are moved as one.
            by_pair = replace(self, shape=self.shape[:-1], dim_axes=self.dim_axes[:-1])
            pairs = packed.view(_PAIR_TYPES[packed.element_size()])
            return by_pair.to_rows(pairs).contiguous().view(packed.dtype)
        lead = packed.shape[:-1]
        axes = [len(lead) + a for a in self.token_axes + self.dim_axes]
        rows = packed.unflatten(-1, self.shape).permute(*range(len(lead)), *axes)
        return rows.reshape(*lead, self.block_size, self.head_size)

    @property
    def is_rows(self) -> bool:
        """Whether a page holds its tokens one after another, elements in their order."""
        return len(self.shape) == 2 and self.token_axes == (0,)

    def take_rows(self, packed: Tensor, pages: Tensor, tokens: Tensor) -> Tensor:
        """[P, block_size * head_size] pages -> [N, head_size] rows of [N] pages and tokens."""
        rows = self._by_axes(packed)[(pages, *self._places(tokens))]
        return rows.reshape(-1, self.head_size)

    def put_rows(self, packed: Tensor, pages: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Writes [N, head_size] rows to [N] pages and tokens of [P, block_size * head_size]."""
        by_dims = rows.unflatten(1, [self.shape[axis] for axis in self.dim_axes])
        self._by_axes(packed)[(pages, *self._places(tokens))] = by_dims

    def _by_axes(self, packed: Tensor) -> Tensor:
        """Returns a view of [P, n] pages by page, axes of tokens, then axes of elements."""
        axes = [1 + a for a in self.token_axes + self.dim_axes]
        return packed.unflatten(-1, self.shape).permute(0, *axes)

    def _places(self, tokens: Tensor) -> list[Tensor]:
        """Returns the place of [N] tokens of a page on each of the axes of tokens."""
        places: list[Tensor] = []
        for axis in reversed(self.token_axes):
            places.insert(0, tokens % self.shape[axis])
            tokens = tokens // self.shape[axis]
        return places

    def from_rows(self, rows: Tensor) -> Tensor:
        """[..., block_size, head_size] rows -> [..., block_size * head_size] page elements."""
        lead = rows.shape[:-2]
        order = self.token_axes + self.dim_axes
        split = rows.reshape(*lead, *(self.shape[a] for a in order))
        inverse = [len(lead) + order.index(a) for a in range(len(order))]
        return split.permute(*range(len(lead)), *inverse).reshape(*lead, -1)


def known_packings(block_size: int, head_size: int) -> list[Packing]:
    """Returns the packings that attention kernels are known to use, for this page size."""
    packings = [
        Packing("rows", (block_size, head_size), (0,), (1,)),
        Packing("columns", (head_size, block_size), (1,), (0,)),
    ]
    if block_size % 16 == 0 and head_size % 16 == 0:
        pairs_of_dims = (block_size // 16, head_size // 2, 16, 2)
        pairs_of_tokens = (head_size // 16, block_size // 2, 16, 2)
        packings.append(Packing("amx-key", pairs_of_dims, (0, 2), (1, 3)))
        packings.append(Packing("amx-value", pairs_of_tokens, (1, 3), (0, 2)))
    return packings


def find_packing(packed: Tensor, rows: Tensor, what: str) -> Packing:
    """Returns the packing that a kernel's own cache-write op used.

    Args:
        packed: [block_size * head_size] page elements that the op wrote.
        rows: [block_size, head_size] rows given to the op; all elements differ.
        what: "keys" or "values", for the error message.

    Raises:
        UnsupportedError: no known packing matches what was written.
    """
    for packing in known_packings(*rows.shape):
        if torch.equal(packing.to_rows(packed), rows):
            return packing
    names = ", ".join(p.name for p in known_packings(*rows.shape))
    raise UnsupportedError(
        f"this attention kernel stores {what} in pages in an order that is none of {names}; "
        "compressing would destroy them. Serve without --kv-policy, or with another --dtype."
    )
