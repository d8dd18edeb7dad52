"""One request's compression events over a pool of pages, for tests without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.policies.cases import HEAD_SIZE, HIDDEN_SIZE, NUM_LAYERS
from vllm_kvcompress.cache.page_order import known_packings
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.cache.quantization import LayerScaled, Quantization
from vllm_kvcompress.cache.query_windows import QueryWindows
from vllm_kvcompress.compression.event import Event, LayerWeights
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.value_norms import output_roots
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.scheduling.plan import EventPlan, Observation, Spans
from vllm_kvcompress.scheduling.rule import CompressionRule

BLOCK_SIZE = 4
NUM_HEADS = 2
GROUP = 2
NUM_BLOCKS = 96
SCALE = HEAD_SIZE**-0.5
BUDGETS: dict[str, dict[str, float]] = {"fraction": {"fraction": 0.4}, "tokens": {"tokens": 24}}
CPU = torch.device("cpu")


def make_pool(
    kind: type[PagePool],
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    num_blocks: int = NUM_BLOCKS,
    quantization: Quantization | None = None,
) -> PagePool:
    """Makes a pool of NaN pages, so that no result depends on unwritten ones."""
    shape = (num_blocks * NUM_LAYERS * NUM_HEADS, 2 * BLOCK_SIZE, HEAD_SIZE)
    pages = torch.full(shape, float("nan"), dtype=dtype, device=device)
    if quantization is not None:
        row = quantization.filled(float("nan"), quantization.row_size(HEAD_SIZE))
        pages = row.repeat(*shape[:2], 1).to(device)
    common: dict[str, Any] = dict(
        pages=pages.flatten(1),
        quantization=quantization,
        pages_per_block=NUM_LAYERS * NUM_HEADS,
        layer_offsets=upload([layer * NUM_HEADS for layer in range(NUM_LAYERS)], device),
        num_heads=NUM_HEADS,
        block_size=BLOCK_SIZE,
        head_size=HEAD_SIZE,
    )
    if kind is InterleavedPagePool:
        return InterleavedPagePool(**common)
    keys, values = known_packings(BLOCK_SIZE, HEAD_SIZE)[:2]
    return PackedPagePool(**common, packings=(keys, values))


def make_weights(device: torch.device, dtype: torch.dtype = torch.float32) -> list[LayerWeights]:
    """Makes every layer's weights that any policy may ask for."""
    generator = torch.Generator().manual_seed(11)
    weights = []
    for _ in range(NUM_LAYERS):
        weight = torch.randn(NUM_HEADS, HEAD_SIZE, GROUP, HIDDEN_SIZE, generator=generator)
        wide = weight.transpose(1, 2).flatten(0, 1)
        rotary = Rotary(upload(torch.tensor([1.0, 0.3, 0.05]), device))
        weights.append(
            LayerWeights(
                output_weight=upload(weight.to(dtype), device),
                output_root=upload(output_roots(wide).to(dtype), device),
                rotary=rotary,
            )
        )
    return weights


def state_numbers(pool: PagePool, page_ids: Tensor) -> Tensor:
    """[n] fp32 numbers of [P] pages of policy state (a copy)."""
    return pool.pages[page_ids].flatten().view(torch.float32)


@dataclass
class Request:
    """A request that is compressed once, and again after more tokens.

    Attributes:
        pipeline: its policy, bound to `NUM_LAYERS` layers of `NUM_HEADS` heads.
        pool: where its tokens lie.
        budget: of `CompressionRule`.
        positions: of its events.
        in_place: events after the first stay in the blocks of the one before, if as many are kept.
        protected: tokens that every head keeps.
        split: blocks in one of vLLM's, of which the last sources stay with the tail and take kept
            tokens; 1: events take fresh blocks alone.
    """

    pipeline: Pipeline
    pool: PagePool
    budget: str = "fraction"
    positions: tuple[int, ...] = (70, 103)
    in_place: bool = False
    protected: Spans = ()
    split: int = 1
    runner: EventRunner = field(init=False)
    block_row: Tensor = field(init=False)
    _first_block: int = 0
    _kept_blocks: int = 0
    _free_blocks: list[int] = field(init=False)
    _block_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        device, dtype = self.pool.device, self.pool.dtype
        windows = QueryWindows(NUM_LAYERS, self.pipeline.needs.window_size, device)
        self.runner = EventRunner(
            PageTables(self.pool),
            windows,
            {self.pipeline.name: self.pipeline},
            make_weights(device, dtype),
        )
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        held = -(-self.positions[-1] // BLOCK_SIZE)
        self._block_ids, self._free_blocks = order[:held], order[held:]
        self.block_row = upload(np.array(order[:held], dtype=np.int32), device)
        self._write_tokens(order[:held])

    def run(self) -> list[Event]:
        """Runs all events over all layers."""
        return [self.compress(position) for position in self.positions]

    def compress(self, position: int) -> Event:
        """Runs the request's next event."""
        plan = self.plan(position)
        if self._kept_blocks:
            slot = np.array([self.runner.tables.slots["r"]])
            tokens, row = np.array([position]), np.zeros(1, dtype=np.int64)
            self.runner.tables.extend_tails(slot, row, self.block_row[None], tokens)
        self.observe(plan)
        event = self.runner.begin(plan, self.block_row)
        (batch,) = self.runner.batches([event])
        for layer in range(NUM_LAYERS):
            self.runner.run_layer(batch, layer, SCALE)
        self.runner.finish(event)
        self._first_block, self._kept_blocks = plan.end_block, plan.num_kept_blocks
        return event

    def plan(self, position: int) -> EventPlan:
        """Returns the plan that a scheduler would make."""
        least = self.pipeline.least_blocks(self.pool.page_shape)
        rule = CompressionRule(BLOCK_SIZE, least_blocks=least, **BUDGETS[self.budget])
        num_fresh = rule.target_blocks(position, position)
        stays = self.in_place and num_fresh == self._kept_blocks
        end_block, beside = position // BLOCK_SIZE, 0
        if not stays:
            beside = min(end_block % self.split, num_fresh)
        fresh = [] if stays else [self._free_blocks.pop() for _ in range(num_fresh - beside)]
        return EventPlan(
            request_id="r",
            group=0,
            policy=self.pipeline.name,
            trigger="prompt",
            position=position,
            window_size=min(self.pipeline.needs.window_size, position),
            first_block=self._first_block,
            end_block=end_block,
            beside_tail=tuple(self._block_ids[end_block - beside : end_block]),
            resident_blocks=self._kept_blocks,
            fresh_block_ids=tuple(fresh),
            protected=self.protected,
        )

    def observe(self, plan: EventPlan) -> None:
        """Records the last queries, as attention does while a step runs."""
        num_queries = plan.window_size
        if not num_queries:
            return
        windows, dtype = self.runner.windows, self.pool.dtype
        seen = Observation(0, plan.position - num_queries, num_queries)
        where = windows.locate([("r", 0, seen)])
        generator = torch.Generator().manual_seed(plan.position)
        for layer in range(NUM_LAYERS):
            queries = torch.randn(num_queries, NUM_HEADS * GROUP, HEAD_SIZE, generator=generator)
            windows.record(layer, upload(2 * queries.to(dtype), self.pool.device), where)

    def _write_tokens(self, block_ids: list[int]) -> None:
        """Writes random keys and values in every layer; behind the last token NaN stays."""
        pool, num_tokens = self.pool, self.positions[-1]
        generator = torch.Generator().manual_seed(5)
        shape = (len(block_ids), NUM_LAYERS * NUM_HEADS, BLOCK_SIZE, HEAD_SIZE)
        drawn = torch.randn(2, *shape, generator=generator)
        behind = torch.arange(len(block_ids) * BLOCK_SIZE).view(-1, 1, BLOCK_SIZE, 1) >= num_tokens
        drawn = drawn.masked_fill(behind, float("nan"))
        if pool.quantization is not None:
            drawn = written_in(pool.quantization, drawn)
        keys, values = (part.flatten(0, 1) for part in drawn)
        pages = pool.fresh_pages(upload(block_ids, pool.device))
        pool.write(pages, upload(keys, pool.device), upload(values, pool.device))


def written_in(quantization: Quantization, numbers: Tensor) -> Tensor:
    """Returns [..., row_size] rows for [..., HEAD_SIZE] numbers; with a scale per token random
    codes, whose scales are NaN where the numbers are."""
    if isinstance(quantization, LayerScaled):
        return numbers.to(quantization.stored).view(torch.uint8)
    generator = torch.Generator().manual_seed(6)
    size = quantization.row_size(HEAD_SIZE) - 4
    codes = torch.randint(8, 120, (*numbers.shape[:-1], size), generator=generator)
    scales = numbers[..., :1].abs() / 100 + numbers.sum(-1, keepdim=True) * 0
    return torch.cat([codes.to(torch.uint8), scales.contiguous().view(torch.uint8)], dim=-1)


def left_by(request: Request) -> list[dict[str, Tensor]]:
    """Returns what the events left in each layer: pages by head, their tokens, policy state."""
    return left_in(request.runner.tables, "r")


def left_in(tables: PageTables, request_id: str) -> list[dict[str, Tensor]]:
    """Returns what events left of a request in page tables, layer by layer."""
    pool, slot, layers = tables.pool, tables.slots[request_id], []
    for layer in range(NUM_LAYERS):
        counts = tables.counts[layer, slot]
        table = tables.rows.read(torch.tensor([slot]), int(counts.max()))[layer, 0]
        rows = [row[: int(count)].long() for row, count in zip(table, counts, strict=True)]
        pages = torch.cat(rows)
        carried = torch.zeros(0)
        if tables.state.shape[2]:
            carried = state_numbers(pool, tables.state[layer, slot])
        layers.append(
            dict(
                counts=counts,
                pages=pages,
                keys=pool.keys(pages, layer),
                values=pool.values(pages, layer),
                carried=carried,
            )
        )
    return layers


def once(pipeline: Pipeline) -> Pipeline:
    """Returns the policy for a request that is compressed once."""
    return replace(pipeline, repeats=False)
