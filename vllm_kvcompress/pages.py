"""Pages: the K and V of one (layer, KV head) for `block_size` tokens, as one run of memory.

With the layout BLHNC the whole cache is a flat array of pages:

    page = block * pages_per_block + layer_offset[layer] + head

Inside a page, K comes before V, and kernels order the elements of either as suits them. A
`Packing` says how; everything that reads or writes tokens of a page goes through one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kvcompress.errors import InvariantError, UnsupportedError


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
        return math.prod(self.shape[a] for a in self.token_axes)

    @property
    def head_size(self) -> int:
        return math.prod(self.shape[a] for a in self.dim_axes)

    def to_rows(self, packed: Tensor) -> Tensor:
        """[..., block_size * head_size] page elements -> [..., block_size, head_size] rows."""
        if self._keeps_pairs and packed.element_size() == 2:
            # Pairs of 16 bits that stay together are moved as one number of 32.
            pairs = replace(self, shape=self.shape[:-1], dim_axes=self.dim_axes[:-1])
            return pairs.to_rows(packed.view(torch.int32)).contiguous().view(packed.dtype)
        lead = packed.shape[:-1]
        axes = [len(lead) + a for a in self.token_axes + self.dim_axes]
        rows = packed.unflatten(-1, self.shape).permute(*range(len(lead)), *axes)
        return rows.reshape(*lead, self.block_size, self.head_size)

    @property
    def _keeps_pairs(self) -> bool:
        """Whether neighbours in a page, two by two, are neighbours in a row."""
        last = len(self.shape) - 1
        return self.dim_axes[-1] == last and len(self.dim_axes) > 1 and self.shape[last] == 2

    def take_rows(self, packed: Tensor, pages: Tensor, tokens: Tensor) -> Tensor:
        """[P, block_size * head_size] pages -> [N, head_size] rows, by page and token within it."""
        axes = [1 + a for a in self.token_axes + self.dim_axes]
        rows = packed.unflatten(-1, self.shape).permute(0, *axes)
        places: list[Tensor] = []
        for axis in reversed(self.token_axes):
            places.insert(0, tokens % self.shape[axis])
            tokens = tokens // self.shape[axis]
        return rows[(pages, *places)].reshape(-1, self.head_size)

    def from_rows(self, rows: Tensor) -> Tensor:
        """[..., block_size, head_size] rows -> [..., block_size * head_size] page elements."""
        lead = rows.shape[:-2]
        order = self.token_axes + self.dim_axes
        split = rows.reshape(*lead, *(self.shape[a] for a in order))
        inverse = [len(lead) + order.index(a) for a in range(len(order))]
        return split.permute(*range(len(lead)), *inverse).reshape(*lead, -1)


def known_packings(block_size: int, head_size: int) -> list[Packing]:
    """The packings that attention kernels were seen to use, for this page size."""
    found = [
        Packing("rows", (block_size, head_size), (0,), (1,)),
        Packing("columns", (head_size, block_size), (1,), (0,)),
    ]
    if block_size % 16 == 0 and head_size % 16 == 0:
        pairs_of_dims = (block_size // 16, head_size // 2, 16, 2)
        pairs_of_tokens = (head_size // 16, block_size // 2, 16, 2)
        found.append(Packing("amx-key", pairs_of_dims, (0, 2), (1, 3)))
        found.append(Packing("amx-value", pairs_of_tokens, (1, 3), (0, 2)))
    return found


def find_packing(packed: Tensor, rows: Tensor, what: str) -> Packing:
    """The packing that a kernel's own cache-write op used.

    Args:
        packed: [block_size * head_size] page elements that the op wrote.
        rows: [block_size, head_size] the rows that were handed to it; elements must differ.
        what: "keys" or "values", for the message.

    Raises:
        UnsupportedError: no known packing explains what was written.
    """
    for packing in known_packings(*rows.shape):
        if torch.equal(packing.to_rows(packed), rows):
            return packing
    names = ", ".join(p.name for p in known_packings(*rows.shape))
    raise UnsupportedError(
        f"this attention kernel stores {what} in pages in an order that is none of {names}; "
        "compressing would destroy them. Serve without --kv-policy, or with another --dtype."
    )


@dataclass(frozen=True)
class PagePool:
    """All pages of the cache, and where a cache group's layers lie in a block.

    Attributes:
        pages: [num_pages, 2 * block_size * head_size] view of the whole cache.
        pages_per_block: pages between a block and the next.
        layer_offsets: [num_layers] int64, a layer's first page inside a block.
        num_heads: KV heads per layer (of this rank).
        key_packing, value_packing: order of the elements inside a page.
    """

    pages: Tensor
    pages_per_block: int
    layer_offsets: Tensor
    num_heads: int
    key_packing: Packing
    value_packing: Packing

    @property
    def num_layers(self) -> int:
        return int(self.layer_offsets.numel())

    @property
    def block_size(self) -> int:
        return self.key_packing.block_size

    @property
    def head_size(self) -> int:
        return self.key_packing.head_size

    def block_page_offsets(self) -> Tensor:
        """[num_layers * num_heads] int64: this group's pages inside a block, layer by layer."""
        heads = torch.arange(self.num_heads, device=self.layer_offsets.device)
        return (self.layer_offsets[:, None] + heads).flatten()

    def fresh_pages(self, block_ids: Tensor) -> Tensor:
        """[K] blocks -> [K * num_layers * num_heads] int64 pages, in dealing order."""
        return (block_ids[:, None] * self.pages_per_block + self.block_page_offsets()).flatten()

    def keys(self, page_ids: Tensor) -> Tensor:
        """[...] page ids -> [..., block_size, head_size] keys (a copy)."""
        return self.key_packing.to_rows(self._halves(2 * page_ids))

    def values(self, page_ids: Tensor) -> Tensor:
        """[...] page ids -> [..., block_size, head_size] values (a copy)."""
        return self.value_packing.to_rows(self._halves(2 * page_ids + 1))

    def _halves(self, halves: Tensor) -> Tensor:
        """[...] numbers of half pages, K before V -> [..., elements of a half] (a copy)."""
        size = self.pages.shape[1] // 2
        chosen = self.pages.view(-1, size).index_select(0, halves.flatten())
        return chosen.view(*halves.shape, size)

    def take_values(self, page_ids: Tensor, tokens: Tensor) -> Tensor:
        """[N] page ids and tokens within them -> [N, head_size] values (a copy)."""
        half = self.pages.shape[1] // 2
        return self.value_packing.take_rows(self.pages[:, half:], page_ids, tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return int(self.pages.shape[1] * self.pages.element_size())

    def floats(self, page_ids: Tensor) -> Tensor:
        """[..., P] pages that hold fp32 numbers -> [..., numbers] (a copy)."""
        return self.pages[page_ids].flatten(-2).view(torch.float32)

    def write_floats(self, page_ids: Tensor, numbers: Tensor) -> None:
        """Writes fp32 numbers [m] into whole pages [P], the rest as zeros."""
        room = page_ids.numel() * self.page_bytes // 4
        padded = torch.nn.functional.pad(numbers, (0, room - numbers.numel()))
        self.pages[page_ids] = padded.view(self.pages.dtype).view(page_ids.numel(), -1)

    def write(self, page_ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes whole pages: [P] page ids, [P, block_size, head_size] keys and values."""
        half = self.pages.shape[1] // 2
        self.pages[page_ids, :half] = self.key_packing.from_rows(keys)
        self.pages[page_ids, half:] = self.value_packing.from_rows(values)


def flat_pages(layer_caches: list[Tensor]) -> tuple[Tensor, int, list[int]]:
    """The flat page view over one group's per-layer cache views.

    Args:
        layer_caches: per layer [num_blocks, num_kv_heads, block_size, 2 * head_size] views of
            one allocation in the layout BLHNC.

    Returns:
        pages [num_pages, 2 * block_size * head_size], pages per block, first page of each layer.

    Raises:
        InvariantError: the views are not whole pages of one allocation.
    """
    first = layer_caches[0]
    num_blocks, _, block_size, content = first.shape
    page = block_size * content
    storage = first.untyped_storage()
    offsets = []
    for cache in layer_caches:
        same = cache.untyped_storage().data_ptr() == storage.data_ptr()
        strides = (cache.stride(0) % page, cache.stride(1), cache.stride(2), cache.stride(3))
        if not same or strides != (0, page, content, 1) or cache.storage_offset() % page:
            raise InvariantError(
                f"expected every layer's cache as whole pages of {page} elements in one "
                f"allocation, got shape {tuple(cache.shape)} with strides {cache.stride()} at "
                f"offset {cache.storage_offset()}; the KV-cache layout must be BLHNC."
            )
        offsets.append(cache.storage_offset() // page)
    pages_per_block = first.stride(0) // page
    num_pages = num_blocks * pages_per_block
    available = storage.nbytes() // first.element_size() // page
    flat = torch.as_strided(first, (min(num_pages, available), page), (page, 1), 0)
    return flat, pages_per_block, offsets
