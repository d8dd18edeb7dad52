"""Scores of prepared contexts, collected step by step, and the event that reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.event_cases import (
    BLOCK_SIZE,
    GROUP,
    NUM_HEADS,
    SCALE,
    Request,
    left_by,
    make_pool,
)
from tests.kernels import oracles
from tests.policies.cases import HEAD_SIZE, NUM_LAYERS
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.compression import guard
from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.scheduling.rule import TRIGGER_PREPARE

POOLS = [InterleavedPagePool, PackedPagePool]
CONTEXT, END = 48, 103


class Preparation(Request):
    """A request that prepares its context, read in chunks."""

    def read(self, *ends: int, start: int = 0) -> None:
        """Reads chunks up to these positions; a token's query does not depend on them."""
        repetitions = self.runner.repetitions
        drawn = torch.randn(
            NUM_LAYERS,
            END,
            NUM_HEADS * GROUP,
            HEAD_SIZE,
            generator=torch.Generator().manual_seed(1),
        )
        self.queries = 3 * drawn
        for end in ends:
            starts, lengths = np.array([0, 5, 5 + end - start]), np.array([9, end])
            table = self.block_row.repeat(2, 1)
            work = repetitions.in_step({"x": 0, "r": 1}, starts, lengths, table)
            assert len(work) == (end > CONTEXT)
            for layer in range(NUM_LAYERS if work else 0):
                others = torch.full((5, NUM_HEADS * GROUP, HEAD_SIZE), float("nan"))
                batch = torch.cat([others, self.queries[layer, start:end]])
                repetitions.observe(layer, work[0], batch, SCALE)
            start = end

    def finish(self) -> Event:
        """Runs the event at the prompt's end."""
        plan = replace(self.plan(CONTEXT), position=END, window_size=0, trigger=TRIGGER_PREPARE)
        event = guard.begin(self.runner, plan, self.block_row)
        batches = self.runner.batches([event])
        for layer in range(NUM_LAYERS):
            batches = guard.run_layer(self.runner, batches, layer, SCALE)
        self.runner.finish(event)
        return event


def make(pool: type[PagePool], policy: str = "adakv", **more: Any) -> Preparation:
    pipeline = replace(resolve(policy), **more).bind(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_HEADS,
        num_query_heads=NUM_HEADS * GROUP,
        block_size=BLOCK_SIZE,
    )
    request = Preparation(pipeline, make_pool(pool), positions=(END,))
    request.runner.repetitions.register({"r": CONTEXT})
    return request


def keys_by_hand(request: Preparation, layer: int) -> torch.Tensor:
    """Returns [H, END, D] keys, block by block."""
    pool, heads = request.pool, []
    for head in range(NUM_HEADS):
        rows = []
        for block in request.block_row.tolist():
            page = block * pool.pages_per_block + layer * NUM_HEADS + head
            rows += list(pool.keys(torch.tensor(page), 0))
        heads.append(torch.stack(rows[:END]))
    return torch.stack(heads)


@pytest.mark.parametrize("pool", POOLS)
def test_scores_of_any_chunks_match_the_oracle(pool: type[PagePool]) -> None:
    """Also where a chunk holds the end of the context."""
    scores = []
    for ends in ((END,), (20, 50, 51, 80, END), (CONTEXT, END)):
        request = make(pool)
        request.read(*ends)
        layers = [request.runner.repetitions._of_layer("r", n) for n in range(NUM_LAYERS)]
        scores.append(torch.stack(layers))
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0])
    for layer in range(NUM_LAYERS):
        keys, queries = keys_by_hand(request, layer), request.queries[layer, CONTEXT:]
        expected = oracles.repetition_peaks(keys, queries, SCALE, CONTEXT)
        torch.testing.assert_close(scores[0][layer], torch.tensor(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("repeats", [False, True])
def test_event_keeps_the_highest_scored_tokens_of_the_context(
    pool: type[PagePool], repeats: bool
) -> None:
    """The first tokens stay, nothing behind the context does; a policy state is written."""
    request = make(pool, "leverage", repeats=repeats)
    request.read(70, END)
    event = request.finish()
    assert event.error is None
    assert (event.num_tail, len(event.blocks)) == (0, CONTEXT // BLOCK_SIZE)
    for layer, left in enumerate(left_by(request)):
        scores = request.runner.repetitions._of_layer("r", layer)
        keys = keys_by_hand(request, layer)
        start = 0
        for head, count in enumerate(left["counts"].tolist()):
            order = sorted(range(4, CONTEXT), key=lambda t, s=scores[head]: -float(s[t]))
            expected = sorted([*range(4), *order[: count * BLOCK_SIZE - 4]])
            kept = left["keys"][start : start + count].flatten(0, 1)
            torch.testing.assert_close(kept, keys[head, expected])
            start += count
        if repeats:  # positions, head after head
            assert set(left["carried"][: len(expected)].tolist()) <= set(range(CONTEXT))
            assert left["carried"].any()


def test_context_that_is_read_again_is_scored_again() -> None:
    request = make(InterleavedPagePool)
    request.read(END)
    before = request.runner.repetitions._of_layer("r", 1).clone()
    request.runner.repetitions._of_layer("r", 1).fill_(2.0)
    request.read(60, END)
    torch.testing.assert_close(request.runner.repetitions._of_layer("r", 1), before)


def test_event_with_an_unscored_chunk_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One chunk without scores fails the event, even if later chunks have some."""

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("not that much")

    request = make(InterleavedPagePool)
    request.read(70)
    with monkeypatch.context() as broken:
        broken.setattr("vllm_kvcompress.compression.repetitions.repetition_peaks", fail)
        request.read(80, start=70)
    request.read(END, start=80)
    assert isinstance(request.finish().error, KeyError)
    request.runner.repetitions.forget("r")
    assert not request.runner.repetitions._num_context
