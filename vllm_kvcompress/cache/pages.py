"""Pages: the K and V of one (layer, KV head) for `block_size` tokens, as one run of memory.

With the layout BLHNC the whole cache is a flat array of pages:

    page = block * pages_per_block + layer_offset[layer] + head

Inside a page kernels order the elements as suits them. On GPUs every token's key and value lie
side by side (`InterleavedPagePool`). CPU kernels keep K before V and order the elements of either
(`PackedPagePool`, where a `Packing` says how). Whoever reads or writes tokens asks the pool, for
keys and values of the model's type, or for tokens as they lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.cache.page_order import Packing
from vllm_kvcompress.cache.quantization import KEYS, VALUES, Quantization
from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.kernels.common.transfers import upload


@dataclass(frozen=True)
class PagePool(ABC):
    """All pages of the cache, and where a cache group's layers lie in a block.

    Attributes:
        pages: [num_pages, 2 * block_size * head_size] view of the whole cache.
        pages_per_block: pages between a block and the next.
        layer_offsets: [num_layers] int64, a layer's first page inside a block, beside the pages.
        num_heads: KV heads per layer (of this rank).
        block_size: tokens of a page.
        head_size: elements of a key.
        quantization: what numbers in pages stand for; None: for themselves.
    """

    pages: Tensor
    pages_per_block: int
    layer_offsets: Tensor
    num_heads: int
    block_size: int
    head_size: int
    quantization: Quantization | None = field(default=None, kw_only=True)

    @abstractmethod
    def take_keys(self, page_ids: Tensor, tokens: Tensor) -> Tensor:
        """[N] page ids and tokens within them -> [N, head_size] keys as they lie (a copy)."""

    @abstractmethod
    def take_values(self, page_ids: Tensor, tokens: Tensor) -> Tensor:
        """[N] page ids and tokens within them -> [N, head_size] values as they lie (a copy)."""

    @abstractmethod
    def write(self, page_ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes whole pages: [P] page ids, [P, block_size, head_size] keys and values as taken."""

    @abstractmethod
    def _rows_of(self, page_ids: Tensor, which: int) -> Tensor:
        """[...] page ids -> [..., block_size, head_size] keys (0) or values (1) as they lie."""

    def keys(self, page_ids: Tensor, layer: int) -> Tensor:
        """[...] page ids of a layer's heads -> [..., block_size, head_size] keys (a copy)."""
        return self._read(page_ids, layer, KEYS)

    def values(self, page_ids: Tensor, layer: int) -> Tensor:
        """[...] page ids of a layer's heads -> [..., block_size, head_size] values (a copy)."""
        return self._read(page_ids, layer, VALUES)

    def _read(self, page_ids: Tensor, layer: int, which: int) -> Tensor:
        rows, quantization = self._rows_of(page_ids, which), self.quantization
        return rows if quantization is None else quantization.widened(rows, layer, which)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values that are read, and of queries."""
        return self.pages.dtype if self.quantization is None else self.quantization.dtype

    @property
    def num_layers(self) -> int:
        """Layers of the cache group."""
        return int(self.layer_offsets.numel())

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        device: torch.device = self.pages.device
        return device

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return int(self.pages.shape[1] * self.pages.element_size())

    @property
    def stored(self) -> torch.dtype:
        """Of the numbers in pages."""
        return self.pages.dtype if self.quantization is None else self.quantization.stored

    @property
    def queries_per_page(self) -> int:
        """Queries that a page has room for, where it holds such: of one query head each."""
        return self.page_bytes // (self.head_size * int(self.dtype.itemsize))

    @cached_property
    def cache_of_one_head(self) -> Tensor:
        """[num_pages, 1, block_size, 2 * head_size] view, as vLLM's kernels take a cache."""
        return self.pages.view(-1, 1, self.block_size, 2 * self.head_size)

    @cached_property
    def numbers(self) -> Tensor:
        """[num_pages, any] fp32 view, of pages that hold such."""
        return self.pages.view(torch.float32)

    @cached_property
    def block_page_offsets(self) -> Tensor:
        """[num_layers * num_heads] int64: this group's pages inside a block, layer by layer."""
        heads = torch.arange(self.num_heads, device=self.layer_offsets.device)
        return (self.layer_offsets[:, None] + heads).flatten()

    @cached_property
    def _layer_page_offsets(self) -> tuple[Tensor, ...]:
        """[num_heads, 1] of every layer."""
        offsets: tuple[Tensor, ...] = self.block_page_offsets.view(self.num_layers, -1, 1).unbind()
        return offsets

    def fresh_pages(self, block_ids: Tensor) -> Tensor:
        """[K] blocks -> [K * num_layers * num_heads] int64 pages, in dealing order."""
        return (block_ids[:, None] * self.pages_per_block + self.block_page_offsets).flatten()

    def layer_page_ids(self, layer: int, block_ids: Tensor) -> Tensor:
        """[num_heads, N] int64 pages of one layer in [N] int64 blocks."""
        return block_ids * self.pages_per_block + self._layer_page_offsets[layer]

    def copy_blocks(self, blocks: list[tuple[int, int]]) -> None:
        """Copies the group's pages of blocks, given as sources and targets."""
        sources, targets = upload(np.array(blocks).T.copy(), self.device)
        self.pages[self.fresh_pages(targets)] = self.pages[self.fresh_pages(sources)]

    def floats(self, page_ids: Tensor) -> Tensor:
        """[..., P] pages that hold fp32 numbers -> [..., numbers] (a copy)."""
        return self.pages[page_ids].flatten(-2).view(torch.float32)

    def write_floats(self, page_ids: Tensor, numbers: Tensor, places: Tensor | None = None) -> None:
        """Writes fp32 numbers [m] into whole pages [P], at the first or at given [m] places.

        The rest becomes zeros.
        """
        room = page_ids.numel() * self.page_bytes // 4
        if places is None:
            padded = torch.nn.functional.pad(numbers, (0, room - numbers.numel()))
        else:
            padded = numbers.new_zeros(room).scatter_(0, places, numbers)
        self.pages[page_ids] = padded.view(self.pages.dtype).view(page_ids.numel(), -1)


@dataclass(frozen=True)
class PackedPagePool(PagePool):
    """Pages of vLLM's CPU kernels: K, then V, each in an order of its own.

    Attributes:
        key_packing, value_packing: order of the elements inside a page.

    Raises:
        InvariantError: packings of other sizes than the page's.
    """

    key_packing: Packing
    value_packing: Packing

    def __post_init__(self) -> None:
        for packing in (self.key_packing, self.value_packing):
            sizes = (packing.block_size, packing.head_size)
            if sizes != (self.block_size, self.head_size):
                raise InvariantError(
                    f"expected packings of {self.block_size} tokens of {self.head_size} elements, "
                    f"got {packing.name} of {sizes[0]} of {sizes[1]}; take one of known_packings "
                    "for the page's own sizes."
                )

    def _rows_of(self, page_ids: Tensor, which: int) -> Tensor:
        packing = self.value_packing if which else self.key_packing
        return packing.to_rows(self._halves(2 * page_ids + which))

    def take_keys(self, page_ids: Tensor, tokens: Tensor) -> Tensor:
        """As `PagePool.take_keys`."""
        half = self.pages.shape[1] // 2
        return self.key_packing.take_rows(self.pages[:, :half], page_ids, tokens)

    def take_values(self, page_ids: Tensor, tokens: Tensor) -> Tensor:
        """As `PagePool.take_values`."""
        half = self.pages.shape[1] // 2
        return self.value_packing.take_rows(self.pages[:, half:], page_ids, tokens)

    def write(self, page_ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `PagePool.write`."""
        half = self.pages.shape[1] // 2
        self.pages[page_ids, :half] = self.key_packing.from_rows(keys)
        self.pages[page_ids, half:] = self.value_packing.from_rows(values)

    def _halves(self, halves: Tensor) -> Tensor:
        """[...] numbers of half pages, K before V -> [..., elements of a half] (a copy)."""
        size = self.pages.shape[1] // 2
        chosen = self.pages.view(-1, size).index_select(0, halves.flatten())
        return chosen.view(*halves.shape, size)


@dataclass(frozen=True)
class InterleavedPagePool(PagePool):
    """Pages of vLLM's GPU backends: a token's key and value lie side by side.

    page: block_size rows of [ K: head_size ][ V: head_size ]
    """

    def _rows_of(self, page_ids: Tensor, which: int) -> Tensor:
        return self._rows.unflatten(2, (2, -1))[:, :, which][page_ids]

    def take_keys(self, page_ids: Tensor, tokens: Tensor) -> Tensor:
        """As `PagePool.take_keys`."""
        return self._rows[..., : self.head_size][page_ids, tokens]

    def take_values(self, page_ids: Tensor, tokens: Tensor) -> Tensor:
        """As `PagePool.take_values`."""
        return self._rows[..., self.head_size :][page_ids, tokens]

    def write(self, page_ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """As `PagePool.write`."""
        self._rows[..., : self.head_size][page_ids] = keys
        self._rows[..., self.head_size :][page_ids] = values

    def entries(self, page_table: Tensor, lengths: Tensor) -> PagedEntries:
        """Sequences' entries as they lie, as kernels over pages take them.

        Args:
            page_table: [S, width] int32 or int64 page ids.
            lengths: [S] int32 or int64 resident tokens.
        """
        return PagedEntries(self.pages, page_table, lengths, self.block_size, self.head_size)

    def read_entries(self, page_table: Tensor, lengths: Tensor, layer: int) -> PagedEntries:
        """The same in the model's type: where pages hold another, in pages made for it.

        Args:
            page_table, lengths: as of `entries`.
            layer: whose heads the sequences are.
        """
        if self.quantization is None:
            return self.entries(page_table, lengths)
        size, width = self.block_size, page_table.shape[1]
        starts = torch.arange(width, device=self.device) * size
        page_ids = page_table.to(torch.int64).masked_fill(starts >= lengths.view(-1, 1), 0)
        both = (self.keys(page_ids, layer), self.values(page_ids, layer))
        pages = torch.cat(both, dim=-1).view(-1, 2 * size * self.head_size)
        table = torch.arange(len(pages), device=self.device).view(page_table.shape)
        return PagedEntries(pages, table, lengths, size, self.head_size)

    @cached_property
    def _rows(self) -> Tensor:
        """[num_pages, block_size, 2 * head_size] view of the pages."""
        return self.pages.unflatten(1, (self.block_size, 2 * self.head_size))


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
