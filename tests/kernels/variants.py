"""Which kernels Triton would compile, noted while it interprets; for a child process of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import triton

from tests import event_cases
from tests.compression import test_event_batches
from tests.event_cases import GROUP, HEAD_SIZE, NUM_HEADS, Request, make_pool
from tests.kernels.events import only_triton
from tests.policies import cases
from tests.policies.cases import Shape, make_pipeline
from vllm_kvcompress.attention.batch import ResidentBatches
from vllm_kvcompress.attention.biased import biased_attention, query_batches
from vllm_kvcompress.attention.decode_steps import DecodeSteps
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.compression.dummy_runs import DummyRuns
from vllm_kvcompress.kernels.attention import decode_attention
from vllm_kvcompress.kernels.common import launch_triton
from vllm_kvcompress.kernels.common.transfers import upload

Variant = tuple[str, tuple[tuple[str, Any], ...]]


class Noting:
    """A kernel that notes what Triton would compile for a launch, and then is launched.

    Attributes:
        noted: of all kernels, since somebody cleared it.
    """

    noted: ClassVar[set[Variant]] = set()

    def __init__(self, function: Callable[..., None], changing: tuple[str, ...]) -> None:
        self.kernel = triton.jit(function)
        self.name, self.changing = function.__name__, changing
        self.signature = inspect.signature(function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            named = {name: kwargs[name] for name in kwargs if name in self.signature.parameters}
            given = self.signature.bind(*args, **named).arguments
            options = [(name, kwargs[name]) for name in kwargs if name not in named]
            kinds = [(name, self.kind(name, value)) for name, value in given.items()]
            Noting.noted.add((self.name, tuple(sorted([*kinds, *options]))))
            self.kernel[grid](*args, **kwargs)

        return launch

    def kind(self, name: str, value: Any) -> Any:
        """What of an argument the compiled kernel depends on."""
        if isinstance(value, tuple):  # whose numbers Triton specializes, whatever the names
            return tuple(self.kind(name, each) for each in value)
        if "constexpr" in str(self.signature.parameters[name].annotation):
            return repr(value)
        if isinstance(value, torch.Tensor):
            aligned = name in launch_triton.PARTS or value.data_ptr() % 16 == 0
            return f"{value.dtype} {'at 16 bytes' if aligned else 'anywhere'}"
        if isinstance(value, int) and name not in self.changing:
            return "1" if value == 1 else f"int {value % 16 == 0}"
        return type(value).__name__


def noting_kernel(*changing: str) -> Callable[[Callable[..., None]], Noting]:
    """Instead of `launch_triton.kernel`."""
    return lambda function: Noting(function, changing)


def not_warmed_up(
    policy: str, params: dict[str, object], shape: Shape, directory: Path
) -> tuple[int, list[Variant]]:
    """How many variants warming up compiles, and which ones requests need besides.

    Args:
        policy: of `tests.policies.cases.POLICIES`.
        params: its parameters.
        shape: of the requests.
        directory: for profiles.
    """
    launch_triton.kernel = noting_kernel
    for module in (cases, event_cases, test_event_batches):
        module.NUM_LAYERS = 1  # others launch the same
    event_cases.BLOCK_SIZE = test_event_batches.BLOCK_SIZE = shape.block_size
    pipeline = make_pipeline(policy, shape, directory, **params)
    courses = [("fraction", (280, 411)), ("tokens", (165,))]
    with only_triton():
        Noting.noted = set()
        runner = Request(pipeline, make_pool(InterleavedPagePool)).runner
        DummyRuns(runner, NUM_HEADS * GROUP, block=0).warm_up(pipeline.needs_biased_attention)
        warm, Noting.noted = Noting.noted, set()
        for budget, positions in courses:
            request = Request(pipeline, make_pool(InterleavedPagePool), budget, positions)
            for position in positions:
                request.compress(position)
                if pipeline.needs_biased_attention:
                    attend(request, position)
        lengths = (280, 300, 299)
        pool = make_pool(InterleavedPagePool, num_blocks=3 * test_event_batches.BLOCKS_EACH)
        test_event_batches.Step(pipeline, pool, lengths).run(together=True)
    return len(warm), sorted(Noting.noted - warm)


def not_compiled_for_one(directory: Path) -> tuple[int, list[Variant]]:
    """How many variants decode attention of one request takes, and which ones several need besides.

    Three query heads for each of three KV heads, as SmolLM2-135M has: what kernels write for each
    query head and request begins at a multiple of 16 bytes for some numbers of requests alone.
    """
    launch_triton.kernel = noting_kernel
    heads, size, head_size = 3, 16, 16
    pool = InterleavedPagePool(
        pages=torch.zeros(8 * heads, 2 * size * head_size),
        pages_per_block=heads,
        layer_offsets=torch.zeros(1, dtype=torch.int64),
        num_heads=heads,
        block_size=size,
        head_size=head_size,
    )
    pipeline, numbers = make_pipeline("snapkv", Shape((1,) * heads), directory), range(1, 5)
    steps = DecodeSteps(pool, max(numbers), 3 * heads, [1.0], pipeline, records=True)
    with only_triton():
        Noting.noted = set()
        attend_requests(steps, 1)
        warm, Noting.noted = Noting.noted, set()
        for number in numbers:
            attend_requests(steps, number)
    return len(warm), sorted(Noting.noted - warm)


def attend_requests(steps: DecodeSteps, number: int) -> None:
    """A token of each of so many uncompressed requests, in a replayed step and in another one."""
    pool = steps.pool
    table = torch.arange(number, dtype=torch.int32)[:, None]
    lengths = torch.full((number,), 9, dtype=torch.int32)
    queries = torch.randn(number, *steps.like.shape[1:])
    steps.fill([], lengths, table, None)
    steps.run(0, queries, torch.empty_like(queries))
    entries = pool.entries(
        (table * pool.num_heads + torch.arange(pool.num_heads, dtype=torch.int32)).view(-1, 1),
        lengths.repeat_interleave(pool.num_heads),
    )
    decode_attention(entries, queries.reshape(len(entries.lengths), -1, pool.head_size), 1.0)


def attend(request: Request, position: int) -> None:
    """Attention of a generated token, and of chunks of several lengths."""
    runner = request.runner
    batches = ResidentBatches(runner.tables, runner.read_by_attention)
    tokens = np.array([position])
    lengths, row = upload(tokens.astype(np.int32), runner.pool.device), request.block_row[None]
    (batch,) = batches.read(["r"], tokens, lengths, row)
    for num_queries in (1, 2, 7, 9, 33):
        queries = torch.randn(num_queries, NUM_HEADS * GROUP, HEAD_SIZE)
        for group in query_batches(batch, np.array([0, num_queries])):
            for layer in range(runner.pool.num_layers):
                biased_attention(runner, layer, group, queries, queries.clone(), 1.0)
