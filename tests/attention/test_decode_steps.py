"""Steps of single tokens from buffers that stay where they are, against plain loops."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.accelerator import ACCELERATOR, Operators, launched, stand_in, watched
from tests.kernels.child import Child
from tests.kernels.events import kernel_names, only_triton
from tests.kernels.oracles import attend, corrected
from tests.step_cases import (
    CPU,
    DIM,
    GROUP,
    NUM_HEADS,
    NUM_LAYERS,
    PER_BLOCK,
    REQUESTS,
    SIZE,
    Request,
    Step,
    make_pool,
)
from vllm_kvcompress.attention.batch import ResidentBatches
from vllm_kvcompress.attention.decode_steps import DecodeSteps
from vllm_kvcompress.cache.page_tables import PageTables
from vllm_kvcompress.cache.pages import InterleavedPagePool
from vllm_kvcompress.cache.query_windows import PagedWindows, QueryWindows, window_blocks
from vllm_kvcompress.kernels import dispatch
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies.registry import resolve
from vllm_kvcompress.scheduling.plan import Observation

# A GPU that is not there makes no skipped tests.
GPUS = [torch.device("cuda")] if torch.cuda.is_available() else []
DEVICES = [CPU, *(pytest.param(device, marks=pytest.mark.gpu) for device in GPUS)]
SCALES = [0.4, 0.3]
QUERY_HEADS, ROOM = NUM_HEADS * GROUP, 6
WHOLE = Request("whole", 11, 1)
BATCHES = {
    "mixed": (REQUESTS[0], WHOLE, REQUESTS[3]),
    "compressed": (REQUESTS[3], REQUESTS[0]),
    "others": (WHOLE, Request("new", 1, 1)),
}


def make_step(batch: str, device: torch.device = CPU, policy: str = "snapkv") -> Step:
    """With keys and values of the uncompressed, too."""
    step = Step(resolve(policy), make_pool(InterleavedPagePool, device), BATCHES[batch])
    for row, request in enumerate(step.requests):
        if request.kept is None:
            blocks = step.block_table[row, : -(-request.num_tokens // SIZE)]
            for layer in range(NUM_LAYERS):
                for head in range(NUM_HEADS):
                    pages = [int(b) * PER_BLOCK + layer * NUM_HEADS + head for b in blocks]
                    step._write((request.name, layer, head), pages, request.num_tokens)
    return step


def fill(steps: DecodeSteps, step: Step, padding: int = 0) -> None:
    lengths = [request.num_tokens for request in step.requests] + [0] * padding
    seq_lens = upload(np.array(lengths, dtype=np.int32), step.pool.device)
    table = np.concatenate((step.block_table, np.zeros((padding, 8), dtype=np.int32)))
    compressed = any(request.kept is not None for request in step.requests)
    batches = [step.read()] if compressed else []
    # What is addressed has to stay as long as a step runs.
    step.kept_alive = (upload(table, step.pool.device), batches)
    steps.fill(batches, seq_lens, step.kept_alive[0], None)


def expected(
    step: Step, request: Request, layer: int, query_head: int, sink: float | None = None
) -> torch.Tensor:
    """Attention of a request's one query."""
    where, row = (request.name, layer, query_head // GROUP), step.requests.index(request)
    keys, values = step.keys[where].tolist(), step.values[where].tolist()
    bias = step.biases[where].tolist() if where in step.biases else []
    query, bias = step.queries[row, query_head].tolist(), bias + [0.0] * (len(keys) - len(bias))
    output, lse = attend(query, keys, values, bias, SCALES[layer])
    if where in step.states:
        output = corrected(output, lse, query, step.states[where].tolist(), SCALES[layer])
    share = 1.0 if sink is None else 1 / (1 + math.exp(sink - lse))
    return share * torch.tensor(output)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("policy", ["snapkv", "asymkv", "momentkv"])
def test_outputs_are_those_of_plain_loops(policy: str, padding: int, device: torch.device) -> None:
    """One after the other in the same buffers, larger batches before smaller ones."""
    for name in BATCHES:
        step = make_step(name, device, policy)
        pipeline = step.pipeline
        steps = DecodeSteps(step.pool, ROOM, QUERY_HEADS, SCALES, pipeline, records=False)
        for earlier in ("mixed", name):
            step = make_step(earlier, device, policy)
            steps.pool.pages.copy_(step.pool.pages)
            fill(steps, step, padding)
        queries = torch.cat((step.queries, torch.ones(padding, QUERY_HEADS, DIM)))
        for layer in range(NUM_LAYERS):
            found = torch.full_like(queries, torch.nan, device=device)
            steps.run(layer, queries.to(device), found)
            found = found.cpu()
            assert not found[len(step.requests) :].any()
            for row, request in enumerate(step.requests):
                for head in range(QUERY_HEADS):
                    wanted = expected(step, request, layer, head)
                    torch.testing.assert_close(found[row, head], wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_sinks_take_their_share_of_attention(device: torch.device) -> None:
    """In the layers that have them, of compressed requests and others."""
    step, sinks = make_step("mixed", device), torch.randn(NUM_HEADS, GROUP)
    addressed = {1: sinks.to(device)}
    steps = DecodeSteps(step.pool, ROOM, QUERY_HEADS, SCALES, step.pipeline, False, addressed)
    fill(steps, step)
    for layer, has_sinks in enumerate([False, True]):
        found = torch.zeros_like(step.queries, device=device)
        steps.run(layer, step.queries.to(device), found)
        for row, request in enumerate(step.requests):
            for head, sink in enumerate(sinks.flatten().tolist()):
                wanted = expected(step, request, layer, head, sink if has_sinks else None)
                torch.testing.assert_close(found[row, head].cpu(), wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("policy", ["snapkv", "asymkv", "momentkv"])
def test_outputs_of_kernels_are_those_of_plain_loops(policy: str, interpreter: Child) -> None:
    test = f"{__name__}.test_outputs_are_those_of_plain_loops"
    interpreter.call("tests.kernels.events.in_triton", test, policy, 2, CPU)


def make_windows(
    paged: bool, names: list[str], device: torch.device
) -> QueryWindows | PagedWindows:
    if not paged:
        return QueryWindows(NUM_LAYERS, 5, device)
    pool = make_pool(InterleavedPagePool, device)
    windows = PagedWindows(pool, 5, QUERY_HEADS)
    count = window_blocks(5, QUERY_HEADS, NUM_HEADS, 2 * SIZE)
    for index, name in enumerate(names):
        windows.hold(name, tuple(range(index * count, (index + 1) * count)))
    return windows


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_queries_go_where_windows_look_for_them(paged: bool, device: torch.device) -> None:
    """More and more requests decode, so that rings move."""
    names = [f"r{index}" for index in range(3 if paged else 12)]
    windows, expected = make_windows(paged, names, device), {}
    step = make_step("others", device)
    steps = DecodeSteps(step.pool, 16, QUERY_HEADS, SCALES, step.pipeline, records=True)
    generator = torch.Generator().manual_seed(1)
    for position in range(12):
        some = names[: position + 1]
        rows = [(name, index, Observation(0, position, 1)) for index, name in enumerate(some)]
        rows = [row for row in rows if row[0] != "r1"]
        seen = windows.addresses(rows, steps.like)
        padded = len(some) + 2
        table = torch.zeros(padded, 8, dtype=torch.int32, device=device)
        lengths = torch.zeros(padded, dtype=torch.int32, device=device)
        steps.fill([], lengths, table, seen)
        for layer in range(NUM_LAYERS):
            queries = torch.randn(padded, QUERY_HEADS, DIM, generator=generator)
            steps.run(layer, queries.to(device), torch.empty_like(queries, device=device))
            for name, index, _ in rows:
                expected.setdefault((layer, name), []).append(queries[index])
    for (layer, name), queries in expected.items():
        number = min(5, len(queries))
        found = windows.read(layer, windows.find([(name, 12)], number))
        assert torch.equal(found[:, 0].cpu(), torch.stack(queries[-number:])), (layer, name)


def kernels_of_a_step(policy: str) -> list[str]:
    """All that a step of one token each launches, whose queries may be remembered."""
    step = make_step("mixed", policy=policy)
    steps = DecodeSteps(step.pool, ROOM, QUERY_HEADS, SCALES, step.pipeline, records=True)
    with only_triton(), kernel_names() as names:
        fill(steps, step)
        for layer in range(NUM_LAYERS):
            steps.run(layer, step.queries, torch.empty_like(step.queries))
    return names


@pytest.mark.parametrize("policy", ["snapkv", "asymkv", "momentkv"])
def test_a_layer_launches_two_kernels_and_a_correction(policy: str, interpreter: Child) -> None:
    names = interpreter.call(f"{__name__}.kernels_of_a_step", policy)
    layer = ["_pieces_kernel", "_reduce_kernel"] + ["_correct_kernel"] * (policy == "momentkv")
    assert names == ["_append_kernel", "_sum_kernel", *NUM_LAYERS * layer]


def test_kernels_copy_queries_where_windows_look_for_them(interpreter: Child) -> None:
    test = f"{__name__}.test_queries_go_where_windows_look_for_them"
    interpreter.call("tests.kernels.events.in_triton", test, False, CPU)


@pytest.mark.parametrize(("policy", "most"), [("snapkv", 8), ("asymkv", 13), ("momentkv", 13)])
def test_a_layer_is_its_kernels_and_a_step_little_else(policy: str, most: int) -> None:
    """Nothing waits for the device, and what launches take is made of nothing but views."""
    with watched():
        step = make_step("mixed", ACCELERATOR, policy)
        steps = DecodeSteps(step.pool, ROOM, QUERY_HEADS, SCALES, step.pipeline, records=True)
        fill(steps, step)
    queries = upload(step.queries, ACCELERATOR)
    with launched(), Operators() as operators:
        fill(steps, step)
        filling = operators.count
        steps.run(1, queries, torch.empty_like(queries))
    assert operators.count == filling <= most


def test_a_step_that_begins_blocks_queues_six_launches_at_most() -> None:
    """Some of 64 requests begin a block in every step; copies to the device count, too.

    Steps in which a table moves to where there is room for more are left out.
    """
    tables = PageTables(make_pool(InterleavedPagePool, ACCELERATOR))
    names = [f"r{index}" for index in range(64)]
    for name in names:
        tables.begin_tail(tables.acquire(name), first_block=2, max_kept=3)
    batches, pipeline = ResidentBatches(tables), resolve("snapkv")
    steps = DecodeSteps(tables.pool, 64, QUERY_HEADS, SCALES, pipeline, records=True)
    block_table = torch.zeros(64, 500, dtype=torch.int32, device=ACCELERATOR)
    before, counts, last = 3 * SIZE + np.arange(64) % SIZE, Counter[int](), (None, None)
    for step in range(400):
        num_tokens = (before + step).astype(np.int32)
        seq_lens, launches = upload(num_tokens, ACCELERATOR), Counter[str]()

        def launch(module: str, name: str, seen: Counter[str] = launches) -> Any:
            seen[name] += 1
            return stand_in(module, name)

        with (
            launched(),
            mock.patch.object(dispatch, "triton_kernel", launch),
            Operators() as operators,
        ):
            (batch,) = batches.read(names, num_tokens, seq_lens, block_table)
            steps.fill([batch], seq_lens, block_table, None)
        assert launches["append_pages"] == 1
        tables_now = (batch.resident_offset, tables.rows.runs)
        if all(one is other for one, other in zip(tables_now, last, strict=True)):
            counts[operators.count + launches.total()] += 1
        last = tables_now
    assert set(counts) == {5, 6}  # the latter where rows get new runs of columns
    assert counts[5] > 350
