"""Spans keep passages around what the last queries attend to, what many do, and unusual keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offline.gathered_kv import GatheredKV
from tests.policies.cases import HEAD_SIZE, Shape, make_pipeline, make_view
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.top_entries import ranks
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.base import LayerView
from vllm_kvcompress.policies.keydiff import KeyDiff
from vllm_kvcompress.policies.keyspans import KeySpans
from vllm_kvcompress.policies.spans import Spans

SHAPE = Shape((16,), group=1)  # 64 tokens
FAR, NEAR, AFTER, BEFORE = 32, 4, 7, 1
WANTED_BY_LAST, WANTED_BY_MANY, UNLIKE_OTHERS = 20, [5, 40], 50


def passage_view() -> LayerView:
    """The last queries attend to one token, all others to two others, none to an unusual one."""
    view = make_view(SHAPE, FAR)
    keys, queries = torch.zeros(1, 64, HEAD_SIZE), torch.zeros(FAR, 1, HEAD_SIZE)
    keys[0, WANTED_BY_LAST, 0] = 30.0
    keys[0, WANTED_BY_MANY, 1] = 30.0
    keys[0, UNLIKE_OTHERS, 2] = 1.0
    queries[-NEAR:, 0, 0] = 1.0
    queries[:-NEAR, 0, 1] = 1.0
    keys += 0.01 * torch.randn(keys.shape, generator=torch.Generator().manual_seed(0))
    return replace(view, kv=GatheredKV.of(keys, keys), queries=queries, scale=1.0)


def test_spans_keep_a_passage_popular_tokens_and_an_unusual_key() -> None:
    """Among 3k kept tokens at least k are the best by each rank.

    SnapKV's window alone would lose the ones, H2O's sum alone the passage around the other, and
    both what nobody has asked for yet.
    """
    policy = Spans(FAR, NEAR, AFTER, BEFORE, key_kernel_size=1, keys="rotated")
    scores = policy.score(passage_view())[0]
    passage = range(WANTED_BY_LAST - BEFORE, WANTED_BY_LAST + AFTER + 1)
    best = set(scores[: 64 - NEAR].topk(3 * len(passage)).indices.tolist())
    assert UNLIKE_OTHERS in best
    assert best >= {*passage}
    assert best >= {*WANTED_BY_MANY}


@given(seed=st.integers(0, 99), num_each=st.integers(1, 9), weight=st.sampled_from([1.0, 3.0]))
def test_key_weight_times_as_many_tokens_are_kept_by_key(
    seed: int, num_each: int, weight: float
) -> None:
    """The best 2n + weight * n by score include the best weight * n by KeyDiff."""
    view = make_view(replace(SHAPE, seed=seed), FAR)
    policy = KeySpans(FAR, NEAR, key_weight=weight)
    num_unusual = int(weight) * num_each
    best = policy.score(view)[0].topk(2 * num_each + num_unusual).indices.tolist()
    assert {*best} >= {*KeyDiff().score(view)[0].topk(num_unusual).indices.tolist()}


def test_heads_with_little_room_keep_what_is_attended_to_alone() -> None:
    """The most unusual key, which nobody attends to, is kept from `min_kept` on."""
    view = passage_view()
    unusual = int(KeyDiff().score(view)[0, 1:-NEAR].argmax()) + 1
    policy = KeySpans(FAR, NEAR, num_recent=2, num_sinks=1, min_kept=0.25)
    scores = policy.score(view)
    kept = {
        count: policy.select(view, scores, torch.tensor([count]), policy.protection)[0]
        for count in (12, 16)
    }
    assert [int(mask.sum()) for mask in kept.values()] == [12, 16]
    assert kept[12][WANTED_BY_LAST]
    assert kept[16][WANTED_BY_LAST]
    assert not kept[12][unusual]
    assert kept[16][unusual]


@given(numbers=st.lists(st.integers(0, 9), min_size=4, max_size=12), factor=st.floats(0.1, 1e6))
def test_ranks_ignore_the_scale_and_put_the_later_of_equals_higher(
    numbers: list[int], factor: float
) -> None:
    scores = torch.tensor([numbers], dtype=torch.float32)
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    places = ranks(scores, everywhere)[0].tolist()
    assert places == ranks(scores * factor, everywhere)[0].tolist()
    for i, one in enumerate(numbers):
        assert places[i] == sum((other, j) < (one, i) for j, other in enumerate(numbers))


def test_entries_behind_a_head_s_length_are_not_counted() -> None:
    scores = torch.full((1, 64), float("nan"))
    scores[0, :3] = torch.tensor([0.5, 0.1, 0.3])
    assert ranks(scores, torch.arange(64)[None] < 3)[0, :3].tolist() == [2, 0, 1]


def test_first_tokens_are_kept_under_a_small_budget(tmp_path: Path) -> None:
    """First tokens, which most queries attend to, are kept even of a short prompt."""
    view = make_view(Shape((32,), group=1), 300)
    pipeline = make_pipeline(
        "spans", Shape((32,), group=1), tmp_path, near_size=32, window_size=256
    )
    kept = compress_layer(pipeline, view, 8).kept_indices.tolist()
    assert kept == [0, 1, *range(98, 128)]


def test_contradictory_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="near_size: expected at most window_size, 16, found 32"):
        resolve("spans", {"window_size": 16})
    with pytest.raises(ConfigError, match="key_kernel_size: expected an odd number"):
        resolve("spans", {"key_kernel_size": 2})
