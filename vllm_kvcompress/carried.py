"""Numbers that a policy carries from event to event, in pages of the request's own.

    state pages of a layer:  [ per head: s numbers each ][ per entry: bias, positions, ... ]

All are fp32. Those per entry follow one another name by name (`Pipeline.carried_entries`), and
within a name head after head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.page_tables import PageTables
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import Selection


class CarriedNumbers:
    """Reads and writes them.

    Args:
        tables: whose pages hold them.
    """

    def __init__(self, tables: PageTables) -> None:
        self.tables = tables
        self.pool = tables.pool

    def per_head(self, pipeline: Pipeline, pages: Tensor) -> Tensor:
        """[..., num_heads, s] fp32 numbers per head in state pages [..., state_pages]."""
        num_heads, size = self.pool.num_heads, pipeline.state_size(self.pool.head_size)
        numbers = self.pool.floats(pages)[..., : num_heads * size]
        return numbers.unflatten(-1, (num_heads, size))

    def per_entry(
        self, pipeline: Pipeline, name: str, layer: int, slots: Tensor | slice, width: int
    ) -> Tensor:
        """[R, num_heads, width] fp32 numbers of the kept entries of requests, 0 behind them."""
        pool = self.pool
        which = pipeline.carried_entries.index(name)
        numbers = pool.floats(self.tables.state[layer, slots])
        counts = self.tables.counts[layer, slots].long() * pool.block_size
        first = counts.cumsum(dim=1) - counts
        first = first + pool.num_heads * pipeline.state_size(pool.head_size)
        first = first + which * counts.sum(dim=1, keepdim=True)
        nth = torch.arange(width, device=numbers.device)
        places = (first[..., None] + nth).clamp_max(numbers.shape[1] - 1)
        found = numbers.gather(1, places.flatten(1)).view(places.shape)
        return found.masked_fill(nth >= counts[..., None], 0)

    def write(
        self, pipeline: Pipeline, layer: int, slot: int, selection: Selection, pages: Tensor
    ) -> None:
        """Writes what an event leaves in a layer to state pages, and books these."""
        merged, numbers = selection.merged, []
        if pipeline.state_size(self.pool.head_size):
            assert merged.state is not None
            numbers.append(merged.state.flatten())
        heads = selection.heads(self.pool.block_size)
        for name in pipeline.carried_entries:
            entries = getattr(merged, name)
            numbers.append(entries[heads, selection.kept_indices].float())
        self.pool.write_floats(pages, torch.cat(numbers).float())
        self.tables.replace_state(layer, slot, pages)
