"""How much memory an event takes for a while, known before there is one.

The event runs over shapes alone (torch's meta device), and what it would hold at once is counted.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.cache.query_windows.rings import QueryWindows
from vllm_kvcompress.compression.runner import Event, EventRunner, LayerWeights
from vllm_kvcompress.compression.stopwatch import Stopwatch
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.rotary import Rotary
from vllm_kvcompress.scheduling.plan import EventPlan

# What CUDA's operators take beside their results, in bytes per element that they go through.
HIDDEN_BYTES = {"sort": 48, "nonzero_static": 16}
META = torch.device("meta")
REQUEST = "request"


@dataclass(frozen=True)
class EventShape:
    """What the memory of an event depends on, beside the policy.

    Attributes:
        num_tokens: resident tokens of the longest head, or an upper bound.
        num_layers: compressed layers.
        num_heads: KV heads of this rank.
        num_query_heads: of this rank.
        head_size: elements of a key.
        block_size: tokens of a page.
        dtype: of the cache.
    """

    num_tokens: int
    num_layers: int
    num_heads: int
    num_query_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    @property
    def num_blocks(self) -> int:
        """Pages of the longest head."""
        return -(-self.num_tokens // self.block_size)


def event_workspace_bytes(pipeline: Pipeline, shape: EventShape) -> int:
    """Upper bound of the memory that an event takes in a layer, on a GPU, beside the cache.

    The next layer takes the same again. Neither page tables nor rings of queries are counted,
    which stay; nor are the few bytes by which allocators round up.

    Args:
        pipeline: the policy, bound to the model.
        shape: of the event. It may keep everything, and may be a request's second one.
    """
    pool = _pool(shape)
    runner = EventRunner(
        PageTables(pool),
        _windows(pipeline, shape),
        {pipeline.name: pipeline},
        [_weights(shape)] * shape.num_layers,
    )
    event = _event(runner, pipeline, shape)
    with LiveBytes() as memory:
        # In the last one, since policies may leave the first layers alone.
        runner.run_layer(event, shape.num_layers - 1, 1.0)
    peak: int = memory.peak
    return peak


class LiveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of tensors that are made inside and alive at the same time.

    Attributes:
        live: now.
        peak: at most so far.
    """

    def __init__(self, hidden_bytes: dict[str, int] = HIDDEN_BYTES) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._hidden_bytes = hidden_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        former = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in _tensors(results):
            storage = tensor.untyped_storage()
            if storage._cdata not in former:
                former.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._release, storage.nbytes())
        hidden = self._hidden_bytes.get(func.overloadpacket.__name__, 0)
        self.peak = max(self.peak, self.live + hidden * sum(tensor.numel() for tensor in given))
        return results

    def _release(self, size: int) -> None:
        self.live -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _pool(shape: EventShape) -> InterleavedPagePool:
    """Whose pages nobody counts, since no number of a page is ever read."""
    page = 2 * shape.block_size * shape.head_size
    return InterleavedPagePool(
        pages=torch.empty(1, page, dtype=shape.dtype, device=META),
        pages_per_block=shape.num_layers * shape.num_heads,
        layer_offsets=torch.empty(shape.num_layers, dtype=torch.int64, device=META),
        num_heads=shape.num_heads,
        block_size=shape.block_size,
        head_size=shape.head_size,
    )


def _windows(pipeline: Pipeline, shape: EventShape) -> QueryWindows:
    """With one ring, which is full."""
    windows = QueryWindows(shape.num_layers, pipeline.needs.window_size, META)
    size = (shape.num_layers, 1, windows.window_size, shape.num_query_heads, shape.head_size)
    windows.ring = torch.empty(size, dtype=shape.dtype, device=META)
    windows.slots[REQUEST] = 0
    return windows


def _weights(shape: EventShape) -> LayerWeights:
    group, dims = shape.num_query_heads // shape.num_heads, shape.head_size
    return LayerWeights(
        output_weight=torch.empty(shape.num_heads, dims, group, 1, dtype=shape.dtype, device=META),
        output_gram=torch.empty(shape.num_query_heads, dims, dims, device=META),
        rotary=Rotary(torch.empty(dims // 2, device=META)),
    )


def _event(runner: EventRunner, pipeline: Pipeline, shape: EventShape) -> Event:
    """An event that reads `num_tokens` per head and a partial block, and keeps all it can."""
    pool, tables, num_blocks = runner.pool, runner.tables, shape.num_blocks
    slot = tables.acquire(REQUEST)
    total = num_blocks * shape.num_heads
    sizes = (shape.num_heads, shape.head_size, shape.block_size, pool.page_bytes)
    state_pages = pipeline.state_pages(total, *sizes)
    pages = torch.empty(total + state_pages, dtype=torch.int64, device=META)
    tables.replace(0, slot, torch.empty(shape.num_heads, dtype=torch.int64, device=META), pages)
    tables.replace_state(0, slot, pages[:state_pages])
    tables.begin_tail(slot, num_blocks, num_blocks)
    resident = num_blocks if pipeline.repeats else 0
    plan = EventPlan(
        request_id=REQUEST,
        group=0,
        policy=pipeline.name,
        trigger="",
        position=(num_blocks + 1) * shape.block_size - 1,
        window_size=pipeline.needs.window_size,
        first_block=resident,
        end_block=num_blocks,
        resident_blocks=resident,
        fresh_block_ids=(),
    )
    return Event(
        plan=plan,
        slot=slot,
        pipeline=pipeline,
        blocks=torch.empty(num_blocks + 1 - resident, dtype=torch.int64, device=META),
        fresh_pages=pages,
        layer_pages=[total] * shape.num_layers,
        stopwatch=Stopwatch(META),
        state_pages=state_pages,
        layer_starts=[0] * shape.num_layers,
    )
