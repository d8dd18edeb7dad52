"""Attention with biases and corrections, over both kinds of pages, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.child import Child
from tests.kernels.oracles import NONE, Vector, attend, corrected
from tests.step_cases import GROUP, NUM_HEADS, NUM_LAYERS, REQUESTS, Request, Step, make_pool
from vllm_kvcompress.attention.biased import biased_attention, query_batches
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.compression.event import LayerWeights
from vllm_kvcompress.policies.registry import resolve

SCALE = 0.4
KINDS: list[type[PagePool]] = [PackedPagePool, InterleavedPagePool]
POLICIES = ["snapkv", "asymkv", "momentkv"]
BATCHES = {
    "mixed": REQUESTS,
    "decoding": (REQUESTS[0], REQUESTS[3]),
    "one chunk": (REQUESTS[2],),
    "uncompressed first": (REQUESTS[1], REQUESTS[3], REQUESTS[2]),
}


SINKS = torch.tensor([[2.0, -1.0, 0.5, 3.0], [0.0, 1.0, 4.0, -2.0]])[:NUM_HEADS, :GROUP]


def expected(
    step: Step, request: Request, layer: int, query_head: int, index: int, sink: float = NONE
) -> Vector:
    """The output of one of a request's queries in this step."""
    row = step.requests.index(request)
    where = (request.name, layer, query_head // GROUP)
    seen = len(step.keys[where]) - (request.num_queries - 1 - index)
    query = step.queries[int(step.starts[row]) + index, query_head].tolist()
    bias = step.biases[where].tolist() if where in step.biases else []
    added = (bias + [0.0] * seen)[:seen]
    keys, values = step.keys[where].tolist()[:seen], step.values[where].tolist()[:seen]
    output, lse = attend(query, keys, values, added, SCALE)
    if where in step.states:
        output = corrected(output, lse, query, step.states[where].tolist(), SCALE)
    share = 1 / (1 + math.exp(sink - lse))
    return [share * number for number in output]


@pytest.mark.parametrize("batch_name", BATCHES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_plain_loops(
    kind: type[PagePool], policy: str, batch_name: str
) -> None:
    step = Step(resolve(policy), make_pool(kind), BATCHES[batch_name])
    batch = step.read()
    groups = query_batches(batch, step.starts)
    found = torch.full_like(step.queries, float("nan"))
    for layer in range(NUM_LAYERS):
        for group in groups:
            biased_attention(step.runner, layer, group, step.queries, found, SCALE)
        for row, request in enumerate(step.requests):
            start = int(step.starts[row])
            for index in range(request.num_queries):
                for query_head in range(NUM_HEADS * GROUP):
                    output = found[start + index, query_head]
                    if request.kept is None:
                        assert output.isnan().all()
                        continue
                    wanted = torch.tensor(expected(step, request, layer, query_head, index))
                    torch.testing.assert_close(output, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_take_their_share_of_attention(kind: type[PagePool]) -> None:
    """Several requests decode, and one reads a chunk."""
    step = Step(resolve("snapkv"), make_pool(kind), BATCHES["mixed"])
    step.runner.weights[1] = LayerWeights(sinks=SINKS)
    found = torch.zeros_like(step.queries)
    for group in query_batches(step.read(), step.starts):
        biased_attention(step.runner, 1, group, step.queries, found, SCALE)
    for row, request in enumerate(step.requests):
        for index in range(request.num_queries if request.kept is not None else 0):
            for query_head, sink in enumerate(SINKS.flatten().tolist()):
                output = found[int(step.starts[row]) + index, query_head]
                wanted = torch.tensor(expected(step, request, 1, query_head, index, sink))
                torch.testing.assert_close(output, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_of_kernels_are_those_of_plain_loops(policy: str, interpreter: Child) -> None:
    test = f"{__name__}.test_outputs_are_those_of_plain_loops"
    interpreter.call("tests.kernels.events.in_triton", test, InterleavedPagePool, policy, "mixed")


def test_requests_that_decode_are_one_group_and_chunks_are_alone() -> None:
    step = Step(resolve("asymkv"), make_pool(PackedPagePool))
    batch = step.read()
    decoding, chunk = query_batches(batch, step.starts)
    assert isinstance(decoding.tokens, torch.Tensor)
    assert decoding.tokens.tolist() == [0, 9]
    assert chunk.tokens == slice(4, 9)
    assert (decoding.num_queries, chunk.num_queries) == (1, 5)
    for group, heads in ((decoding, [0, 1, 4, 5]), (chunk, [2, 3])):
        for layer, (page_table, lengths) in enumerate(group.requests.layers):
            assert torch.equal(page_table, batch.page_table[layer, heads])
            assert torch.equal(lengths, batch.seq_lens[layer, heads])


def test_a_batch_that_only_decodes_is_taken_as_it_lies() -> None:
    step = Step(resolve("asymkv"), make_pool(PackedPagePool), BATCHES["decoding"])
    batch = step.read()
    (group,) = query_batches(batch, step.starts)
    assert group.tokens == slice(0, 2)
    assert group.requests is batch
    assert batch.policy_state is not None


def test_neighbours_that_decode_are_taken_as_they_lie() -> None:
    """Behind others that do not."""
    step = Step(resolve("asymkv"), make_pool(PackedPagePool), (REQUESTS[2], *BATCHES["decoding"]))
    decoding, chunk = query_batches(step.read(), step.starts)
    assert (decoding.tokens, chunk.tokens) == (slice(5, 7), slice(0, 5))


def test_what_attention_reads_is_found_again_only_when_something_changed() -> None:
    """And is then what the request holds."""
    step = Step(resolve("asymkv"), make_pool(PackedPagePool), BATCHES["decoding"])
    first = step.read().policy_state
    assert first is not None
    assert step.read().policy_state is first
    tables = step.runner.tables
    tables.release("c")
    slot = tables.acquire("c")
    for layer in range(NUM_LAYERS):
        tables.replace(range(layer, layer + 1), slot, torch.tensor([1, 2]), torch.tensor([7, 8, 9]))
        tables.replace_state(layer, slot, torch.tensor([5]))
    tables.begin_tail(slot, 3, 2)
    found = step.read().policy_state
    assert found is not None
    assert found.page_table[:, 1, :1].tolist() == [[5]] * NUM_LAYERS
    assert found.starts[:, 2:].tolist() == [[0, 4]] * NUM_LAYERS
    assert found.lengths[:, 2:].tolist() == [[4, 8]] * NUM_LAYERS
    assert torch.equal(found.lengths[:, :2], first.lengths[:, :2])
