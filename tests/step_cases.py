"""A step with compressed requests over a pool of pages, for tests without vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm_kvcompress.attention.batch import ResidentBatch, ResidentBatches
from vllm_kvcompress.cache.page_order import known_packings
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.cache.query_windows import QueryWindows
from vllm_kvcompress.compression.event import LayerWeights
from vllm_kvcompress.compression.runner import EventRunner
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.kernels.merging.moments import moment_size, pack_moments, unpack_moments
from vllm_kvcompress.policies import Pipeline

NUM_LAYERS, NUM_HEADS, GROUP, SIZE, DIM = 2, 2, 3, 4, 8
NUM_BLOCKS, PER_BLOCK = 48, NUM_LAYERS * NUM_HEADS
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """One request of the step.

    Attributes:
        name: its id.
        num_tokens: logical ones, this step's included.
        num_queries: of this step.
        first_block: where its tail begins.
        kept: [num_layers][num_heads] kept pages; None: it is uncompressed.
    """

    name: str
    num_tokens: int
    num_queries: int
    first_block: int = 0
    kept: list[list[int]] | None = None


# A decoding request, one that is uncompressed, one that reads a chunk, and another that decodes.
REQUESTS = (
    Request("a", 18, 1, 4, [[3, 1], [0, 2]]),
    Request("uncompressed", 3, 3),
    Request("b", 14, 5, 2, [[1, 2], [4, 1]]),
    Request("c", 17, 1, 3, [[2, 0], [1, 1]]),
)


def make_pool(kind: type[PagePool], device: torch.device = CPU) -> PagePool:
    """Makes a pool of NaN pages, so that no result depends on unwritten ones."""
    common = dict(
        pages=torch.full((NUM_BLOCKS * PER_BLOCK, 2 * SIZE * DIM), float("nan"), device=device),
        pages_per_block=PER_BLOCK,
        layer_offsets=upload([0, NUM_HEADS], device),
        num_heads=NUM_HEADS,
        block_size=SIZE,
        head_size=DIM,
    )
    if kind is InterleavedPagePool:
        return InterleavedPagePool(**common)
    rows, columns = known_packings(SIZE, DIM)
    return PackedPagePool(**common, packings=(columns, rows))


@dataclass
class Step:
    """Compressed requests after their events, and this step's queries.

    Attributes:
        pipeline: the policy of all.
        pool: where their tokens lie.
        requests: of the batch, in order.
        keys, values: by (request, layer, head) what is resident, on the host.
        biases, states: what the policy carries, likewise; biases of the kept entries.
        queries: [num_tokens, num_query_heads, head_size] on the host.
    """

    pipeline: Pipeline
    pool: PagePool
    requests: tuple[Request, ...] = REQUESTS
    keys: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    values: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    biases: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    states: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(7)
        order = torch.randperm(NUM_BLOCKS, generator=self._random).tolist()
        # Kept pages lie anywhere in the first blocks, tails in the others.
        self._pages = [
            block * PER_BLOCK + page for block in order[:24] for page in range(PER_BLOCK)
        ]
        self._blocks = order[24:]
        tables = PageTables(self.pool)
        windows = QueryWindows(NUM_LAYERS, 4, self.pool.device)
        weights = [LayerWeights()] * NUM_LAYERS
        self.runner = EventRunner(tables, windows, {"policy": self.pipeline}, weights)
        self.batches = ResidentBatches(tables, self.runner.read_by_attention)
        tables.acquire("gone")
        self.block_table = np.zeros((len(self.requests), 8), dtype=np.int32)
        for row, request in enumerate(self.requests):
            count = math.ceil(request.num_tokens / SIZE)
            self.block_table[row, :count] = [self._blocks.pop() for _ in range(count)]
            if request.kept is not None:
                self._compress(row, request)
        tables.release("gone")
        starts = np.cumsum([0, *(request.num_queries for request in self.requests)])
        self.starts = starts.astype(np.int32)
        self.queries = self._draw(int(starts[-1]), NUM_HEADS * GROUP, DIM)

    def read(self) -> ResidentBatch:
        """Returns the batch that attention reads."""
        device = self.pool.device
        num_tokens = np.array([request.num_tokens for request in self.requests], dtype=np.int32)
        (batch,) = self.batches.read(
            [request.name for request in self.requests],
            num_tokens,
            upload(num_tokens, device),
            upload(self.block_table, device),
        )
        return batch

    def _compress(self, row: int, request: Request) -> None:
        """Writes the kept tokens of an event, and the tokens behind them."""
        assert request.kept is not None
        tables, device = self.runner.tables, self.pool.device
        slot = tables.acquire(request.name)
        for layer, counts in enumerate(request.kept):
            kept = [[self._pages.pop() for _ in range(count)] for count in counts]
            pages = [page for head in kept for page in head]
            tables.replace(
                range(layer, layer + 1), slot, upload(counts, device), upload(pages, device)
            )
            for head, tokens in enumerate(kept):
                tail = self.block_table[row, request.first_block :]
                tail = tail[: math.ceil(request.num_tokens / SIZE) - request.first_block]
                tokens = tokens + [int(b) * PER_BLOCK + layer * NUM_HEADS + head for b in tail]
                length = counts[head] * SIZE + request.num_tokens - request.first_block * SIZE
                self._write((request.name, layer, head), tokens, length)
            self._carry(request, layer, slot, counts)
        tables.begin_tail(slot, request.first_block, max(max(counts) for counts in request.kept))

    def _write(self, where: tuple[str, int, int], pages: list[int], length: int) -> None:
        """Writes a head's tokens; behind the last one NaN stays."""
        keys, values = self._draw(2, len(pages) * SIZE, DIM)
        keys[length:] = values[length:] = float("nan")
        shape, device = (len(pages), SIZE, DIM), self.pool.device
        ids = upload(pages, device)
        self.pool.write(ids, upload(keys.view(shape), device), upload(values.view(shape), device))
        self.keys[where], self.values[where] = keys[:length], values[:length]

    def _carry(self, request: Request, layer: int, slot: int, counts: list[int]) -> None:
        """Writes the policy state: numbers per head, then biases, in their own pages."""
        numbers = []
        if self.pipeline.corrects:
            states = 0.3 * self._draw(NUM_HEADS, moment_size(DIM))
            states[:, 0] = torch.tensor([5.0, 0.0])  # evicted entries
            packed = pack_moments(states, DIM)
            numbers += list(packed)
            states = unpack_moments(packed, DIM)
            for head, state in enumerate(states):
                self.states[request.name, layer, head] = state
        if self.pipeline.weighs_entries:
            for head, count in enumerate(counts):
                bias = torch.randint(1, 9, (count * SIZE,), generator=self._random).log()
                self.biases[request.name, layer, head] = bias
                numbers.append(bias)
        if numbers:
            flat = torch.cat(numbers)
            count = math.ceil(flat.numel() * 4 / self.pool.page_bytes)
            pages = upload([self._pages.pop() for _ in range(count)], self.pool.device)
            self.pool.write_floats(pages, upload(flat, self.pool.device))
            self.runner.tables.replace_state(layer, slot, pages)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)
