"""Attention with biases and corrections, over both kinds of pages, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.oracles import Vector, attend, dot
from tests.step_cases import DIM, GROUP, NUM_HEADS, NUM_LAYERS, REQUESTS, Request, Step, make_pool
from vllm_kvcompress.gathered_attention import gathered_attention, query_groups
from vllm_kvcompress.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.policies.registry import resolve

SCALE = 0.4
KINDS: list[type[PagePool]] = [PackedPagePool, InterleavedPagePool]
POLICIES = ["snapkv", "asymkv", "momentkv"]
BATCHES = {
    "mixed": REQUESTS,
    "decoding": (REQUESTS[0], REQUESTS[3]),
    "one chunk": (REQUESTS[2],),
    "whole first": (REQUESTS[1], REQUESTS[3], REQUESTS[2]),
}


def corrected(output: Vector, lse: float, query: Vector, state: Vector) -> Vector:
    """MomentKV's correction of one output (arXiv 2606.01563)."""
    count, mean_key, mean_value = state[0], state[1 : 1 + DIM], state[1 + DIM : 1 + 2 * DIM]
    cross = state[1 + 2 * DIM :]
    if count == 0:
        return output
    weight = 1 / (1 + math.exp(math.log(count) + SCALE * dot(query, mean_key) - lse))
    estimate = [
        mean + SCALE / count * dot(cross[c * DIM : (c + 1) * DIM], query)
        for c, mean in enumerate(mean_value)
    ]
    return [weight * o + (1 - weight) * f for o, f in zip(output, estimate, strict=True)]


def expected(step: Step, request: Request, layer: int, query_head: int, nth: int) -> Vector:
    """The output of the nth of a request's queries in this step."""
    row = step.requests.index(request)
    where = (request.name, layer, query_head // GROUP)
    seen = len(step.keys[where]) - (request.num_queries - 1 - nth)
    query = step.queries[int(step.starts[row]) + nth, query_head].tolist()
    bias = step.biases[where].tolist() if where in step.biases else []
    added = (bias + [0.0] * seen)[:seen]
    keys, values = step.keys[where].tolist()[:seen], step.values[where].tolist()[:seen]
    output, lse = attend(query, keys, values, added, SCALE)
    if where in step.states:
        output = corrected(output, lse, query, step.states[where].tolist())
    return output


@pytest.mark.parametrize("batch_name", BATCHES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_plain_loops(
    kind: type[PagePool], policy: str, batch_name: str
) -> None:
    step = Step(resolve(policy), make_pool(kind), BATCHES[batch_name])
    batch = step.read()
    groups = query_groups(batch, step.starts)
    found = torch.full_like(step.queries, float("nan"))
    for layer in range(NUM_LAYERS):
        for group in groups:
            found[group.tokens] = gathered_attention(
                step.runner, layer, batch, group, step.queries, SCALE
            )
        for row, request in enumerate(step.requests):
            start = int(step.starts[row])
            for nth in range(request.num_queries):
                for query_head in range(NUM_HEADS * GROUP):
                    output = found[start + nth, query_head]
                    if request.kept is None:
                        assert output.isnan().all()
                        continue
                    wanted = torch.tensor(expected(step, request, layer, query_head, nth))
                    torch.testing.assert_close(output, wanted, rtol=2e-4, atol=2e-5)


def test_requests_that_decode_are_one_group_and_chunks_are_alone() -> None:
    step = Step(resolve("asymkv"), make_pool(PackedPagePool))
    decoding, chunk = query_groups(step.read(), step.starts)
    slots = step.runner.tables.slots
    assert decoding.tokens.tolist() == [[0], [9]]
    assert decoding.slots.tolist() == [slots["a"], slots["c"]]
    assert decoding.sequences is not None
    assert decoding.sequences.tolist() == [0, 1, 4, 5]
    assert chunk.tokens.tolist() == [[4, 5, 6, 7, 8]]
    assert chunk.slots.tolist() == [slots["b"]]
    assert chunk.sequences is not None
    assert chunk.sequences.tolist() == [2, 3]


def test_a_batch_that_only_decodes_is_taken_as_it_lies() -> None:
    step = Step(resolve("asymkv"), make_pool(PackedPagePool), BATCHES["decoding"])
    (group,) = query_groups(step.read(), step.starts)
    assert group.sequences is None
    assert group.tokens.tolist() == [[0], [1]]
