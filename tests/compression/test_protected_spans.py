"""Tokens that a request protects stay whole in every head, through any number of events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compression.test_in_place import LAYER_DEPENDENT
from tests.event_cases import BLOCK_SIZE, NUM_HEADS, Request, left_by, make_pool
from tests.policies.cases import NUM_LAYERS, POLICIES, Shape, make_pipeline
from vllm_kvcompress.cache.pages import InterleavedPagePool, PackedPagePool, PagePool
from vllm_kvcompress.policies import describe
from vllm_kvcompress.policies.streamingllm import StreamingLLM
from vllm_kvcompress.scheduling.plan import Spans, num_in_spans

EVICTING = [p for p in POLICIES if not any(part.stages.merge for part in describe(p))]
POSITIONS = (70, 103, 115, 140)
SHAPE = Shape(pages=(9, 9), group=2, block_size=BLOCK_SIZE)
LONG_SPANS = ((8, 40), (66, 100))
SPANS = ((5, 9), (66, 68), (80, 86))  # within the first event, around its partial block, later


def token_of_key(request: Request) -> list[dict[tuple[float, ...], tuple[int, int]]]:
    """Returns for each layer which head and token every key belongs to, before any event."""
    pool, blocks = request.pool, request.block_row.long()
    layers = []
    for layer in range(NUM_LAYERS):
        keys = pool.keys(pool.layer_page_ids(layer, blocks), layer).flatten(1, 2)
        layers.append(
            {
                tuple(keys[head, token].tolist()): (head, token)
                for head in range(NUM_HEADS)
                for token in range(request.positions[-1])
            }
        )
    return layers


def kept_tokens(
    request: Request, token_of: list[dict[tuple[float, ...], tuple[int, int]]]
) -> list[list[list[int]]]:
    """Returns the tokens in each layer's and head's full pages, in their order there."""
    layers = []
    for layer, left in enumerate(left_by(request)):
        keys, start, heads = left["keys"].flatten(0, 1), 0, []
        for head, count in enumerate(left["counts"].tolist()):
            rows = keys[start : start + count * BLOCK_SIZE].tolist()
            places = [token_of[layer][tuple(row)] for row in rows]
            assert {owner for owner, _ in places} == {head}
            heads.append([token for _, token in places])
            start += count * BLOCK_SIZE
        layers.append(heads)
    return layers


def wanted(spans: Spans, position: int) -> list[int]:
    """Protected tokens in full blocks, in a plain loop."""
    end = position // BLOCK_SIZE * BLOCK_SIZE
    return [token for start, stop in spans for token in range(start, stop) if token < end]


@pytest.mark.parametrize(
    ("policy", "in_place"),
    [
        *((policy, False) for policy in EVICTING),
        *((policy, True) for policy in EVICTING if policy not in LAYER_DEPENDENT),
    ],
)
@pytest.mark.parametrize("kind", [PackedPagePool, InterleavedPagePool])
def test_every_head_keeps_protected_tokens_once_and_first(
    policy: str, kind: type[PagePool], in_place: bool, tmp_path: Path
) -> None:
    """Every policy that only evicts: in any layer, as many pages in all as without."""
    pipeline = make_pipeline(policy, SHAPE, tmp_path)
    plain = Request(pipeline, make_pool(kind), "tokens", POSITIONS, in_place)
    ours = Request(pipeline, make_pool(kind), "tokens", POSITIONS, in_place, SPANS)
    token_of = token_of_key(ours)
    for position in POSITIONS:
        assert sum(plain.compress(position).layer_pages) == sum(ours.compress(position).layer_pages)
        expected = wanted(SPANS, position)
        for heads in kept_tokens(ours, token_of):
            for tokens in heads:
                assert sorted(tokens[: len(expected)]) == expected
                assert len({*tokens}) == len(tokens)


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("kind", [PackedPagePool, InterleavedPagePool])
def test_every_span_keeps_its_share_in_every_head(
    policy: str, kind: type[PagePool], tmp_path: Path
) -> None:
    """In mode fair: of what the policy chooses freely, at every event of a request."""
    pipeline = replace(make_pipeline(policy, SHAPE, tmp_path), span_share=None)
    request = Request(pipeline, make_pool(kind), "tokens", POSITIONS, protected=LONG_SPANS)
    token_of = token_of_key(request)
    protection = pipeline.protection
    held: list[list[set[int]]] = [[set()] * NUM_HEADS] * NUM_LAYERS
    start, num_lost = 0, 0
    for position in POSITIONS:
        request.compress(position)
        end = position // BLOCK_SIZE * BLOCK_SIZE
        layers = kept_tokens(request, token_of)
        for heads, heads_before in zip(layers, held, strict=True):
            for tokens, before in zip(heads, heads_before, strict=True):
                assert len({*tokens}) == len(tokens)
                fraction = protection.recent_fraction * (len(tokens) + position - end)
                recent = max(protection.num_recent, int(fraction), 1)
                free = max(0, len(tokens) - protection.num_sinks - recent)
                for first, last in LONG_SPANS:
                    span = set(range(first, min(last, end)))
                    candidates = span & (before | {*range(start, end)})
                    share = min(len(span) * free // end, len(candidates))
                    assert len(span & {*tokens}) >= share
                    num_lost += len(span) - len(span & {*tokens})
        held, start = [[{*tokens} for tokens in heads] for heads in layers], end
    assert num_lost


@pytest.mark.parametrize("policy", EVICTING)
def test_every_head_keeps_a_part_of_the_prompt(policy: str, tmp_path: Path) -> None:
    """A tenth of the first 60 tokens, however many are generated behind them."""
    pipeline = replace(make_pipeline(policy, SHAPE, tmp_path), span_share=0.1)
    pool = make_pool(InterleavedPagePool)
    request = Request(pipeline, pool, "tokens", POSITIONS, protected=((0, 60),))
    token_of = token_of_key(request)
    for position in POSITIONS:
        request.compress(position)
        for heads in kept_tokens(request, token_of):
            for tokens in heads:
                assert len({*tokens} & {*range(60)}) >= 6


@settings(deadline=None, max_examples=25)
@given(
    bounds=st.lists(st.integers(0, 139), max_size=6, unique=True),
    num_sinks=st.integers(0, 3),
)
def test_what_is_left_goes_to_the_policy(bounds: list[int], num_sinks: int) -> None:
    """StreamingLLM beside any spans: its first tokens and its latest share the rest."""
    ends = sorted(bounds)[: len(bounds) // 2 * 2]
    spans = [(ends[i], min(ends[i + 1], ends[i] + 4)) for i in range(0, len(ends), 2)]
    request = Request(
        StreamingLLM(num_sinks).pipeline(),
        make_pool(PackedPagePool),
        "tokens",
        POSITIONS,
        protected=tuple(spans),
    )
    token_of = token_of_key(request)
    held: list[int] = []
    for position in POSITIONS:
        request.compress(position)
        end = position // BLOCK_SIZE * BLOCK_SIZE
        start = held[-1] + 1 if held else 0
        candidates = sorted({*held, *range(start, end)})
        protected = wanted(tuple(spans), position)
        others = [token for token in candidates if token not in protected]
        room = 24 - len(protected)
        first = others[:num_sinks]
        latest = [token for token in others if token not in first][len(first) - room :]
        for heads in kept_tokens(request, token_of):
            for tokens in heads:
                assert sorted(tokens) == sorted([*protected, *first, *latest])
        held = sorted([*protected, *first, *latest])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=3), st.integers(0, 100))
def test_tokens_of_spans_are_counted_as_by_a_loop(pairs: list[tuple[int, int]], end: int) -> None:
    spans = tuple((min(pair), max(pair)) for pair in pairs)
    expected = sum(1 for start, stop in spans for token in range(start, stop) if token < end)
    assert num_in_spans(spans, end) == expected


def test_requests_that_protect_nothing_are_as_alone_in_a_batch() -> None:
    """No event of a step without protected tokens has a mask."""
    request = Request(StreamingLLM().pipeline(), make_pool(PackedPagePool))
    event = request.runner.begin(request.plan(70), request.block_row)
    (batch,) = request.runner.batches([event])
    assert batch.protected is None
    assert torch.equal(batch.slots, torch.tensor([event.slot]))
