"""MomentKV's state, score and correction, against plain loops and where they are exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offline.gathered_kv import GatheredKV
from tests.policies import oracles
from tests.policies.cases import HEAD_SIZE, Shape, make_view
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.attention import attention_with_lse
from vllm_kvcompress.kernels.merging.moments import (
    add_to_moments,
    moment_residuals,
    moment_size,
    pack_moments,
    packed_size,
    unpack_moments,
)
from vllm_kvcompress.kernels.merging.moments import corrected as with_moments
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.base import PageShape
from vllm_kvcompress.scheduling.rule import CompressionRule

DIM, SCALE = 5, 0.4


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def nothing(num_heads: int = 1) -> torch.Tensor:
    return torch.zeros(num_heads, moment_size(DIM))


def state_of(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The moments of these entries, all evicted at once."""
    everything = torch.ones(keys.shape[:2], dtype=torch.bool)
    return add_to_moments(GatheredKV.of(keys, values), nothing(len(keys)), everything)


def attend(query: list[float], keys: list[list[float]], values: list[list[float]]) -> list[float]:
    logits = [SCALE * sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    weights = [math.exp(logit) for logit in logits]
    total = sum(weights)
    return [
        sum(w * value[d] for w, value in zip(weights, values, strict=True)) / total
        for d in range(len(values[0]))
    ]


def corrected(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """[S, G, m, D] with [S, n, D] resident entries."""
    lengths = torch.full((len(keys),), keys.shape[1])
    outputs, lse = attention_with_lse(queries, keys, values, lengths, SCALE)
    return with_moments(outputs, lse, queries, state, SCALE)


def test_moments_are_the_sums_of_the_loop() -> None:
    keys, values = normal(2, 9, DIM), normal(2, 9, DIM, seed=1)
    evicted = torch.rand(2, 9, generator=torch.Generator().manual_seed(2)) < 0.6
    state = add_to_moments(GatheredKV.of(keys, values), nothing(2), evicted)
    for head in range(2):
        some = [j for j in range(9) if evicted[head, j]]
        mean_key = [sum(float(keys[head, j, d]) for j in some) / len(some) for d in range(DIM)]
        mean_value = [sum(float(values[head, j, d]) for j in some) / len(some) for d in range(DIM)]
        # The paper's S = sum v (k - mean k)^T, which is the same.
        cross = [
            sum(float(values[head, j, a]) * (float(keys[head, j, b]) - mean_key[b]) for j in some)
            for a in range(DIM)
            for b in range(DIM)
        ]
        expected = [float(len(some)), *mean_key, *mean_value, *cross]
        assert state[head].tolist() == pytest.approx(expected, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(batches=st.lists(st.integers(0, 2), min_size=12, max_size=12), seed=st.integers(0, 99))
def test_moments_of_one_batch_equal_those_of_several(batches: list[int], seed: int) -> None:
    """Entries of NaN that are not evicted do not matter."""
    keys, values = 3 * normal(1, 12, DIM, seed=seed) + 5, normal(1, 12, DIM, seed=seed + 1)
    state = nothing()
    for batch in range(3):
        evicted = torch.tensor([[number == batch for number in batches]])
        hidden = ~evicted[..., None]
        nan = float("nan")
        kv = GatheredKV.of(keys.masked_fill(hidden, nan), values.masked_fill(hidden, nan))
        state = add_to_moments(kv, state, evicted)
    assert torch.allclose(state, state_of(keys, values), atol=1e-3)


def test_residuals_are_what_the_moments_do_not_predict() -> None:
    state = state_of(normal(1, 6, DIM, seed=3), normal(1, 6, DIM, seed=4))
    keys, values = normal(1, 4, DIM, seed=5), normal(1, 4, DIM, seed=6)
    actual = moment_residuals(GatheredKV.of(keys, values), state, SCALE)[0].tolist()
    mean = state[0, 1 + DIM : 1 + 2 * DIM].tolist()
    cross = state[0, 1 + 2 * DIM :].view(DIM, DIM).tolist()
    for j in range(4):
        key, value = keys[0, j].tolist(), values[0, j].tolist()
        rest = [
            value[a] - mean[a] - SCALE / 6 * sum(cross[a][b] * key[b] for b in range(DIM))
            for a in range(DIM)
        ]
        assert actual[j] == pytest.approx(math.hypot(*rest), rel=1e-4)
    residuals = moment_residuals(GatheredKV.of(keys, values), nothing(), SCALE)[0].tolist()
    assert residuals == pytest.approx([math.hypot(*v) for v in values[0].tolist()], rel=1e-5)


def test_attention_and_log_sum_exp_are_those_of_the_loop() -> None:
    """Sequences of different lengths, causal among the last queries, large padding."""
    lengths = [7, 3, 5]
    keys, values = normal(3, 9, DIM), normal(3, 9, DIM, seed=1)
    queries = normal(3, 2, 3, DIM, seed=2)
    for row, length in enumerate(lengths):
        keys[row, length:] = values[row, length:] = 100.0
    outputs, lse = attention_with_lse(queries, keys, values, torch.tensor(lengths), SCALE)
    assert lse.dtype == torch.float32
    for row, length in enumerate(lengths):
        for member in range(2):
            for index in range(3):
                seen = length - 2 + index
                query = queries[row, member, index].tolist()
                some = keys[row, :seen].tolist()
                expected = attend(query, some, values[row, :seen].tolist())
                assert outputs[row, member, index].tolist() == pytest.approx(expected, abs=1e-5)
                total = sum(
                    math.exp(SCALE * sum(a * b for a, b in zip(query, key, strict=True)))
                    for key in some
                )
                assert float(lse[row, member, index]) == pytest.approx(math.log(total), abs=1e-5)


def test_nothing_evicted_is_plain_attention() -> None:
    keys, values, queries = normal(2, 6, DIM), normal(2, 6, DIM, seed=1), normal(2, 2, 1, DIM)
    plain, _ = attention_with_lse(queries, keys, values, torch.tensor([6, 6]), SCALE)
    assert torch.equal(corrected(queries, keys, values, nothing(2)), plain)


@pytest.mark.parametrize("case", ["one", "equal keys"])
def test_the_correction_is_exact(case: str) -> None:
    """With one evicted entry, or evicted entries of equal keys, it is attention to everything."""
    keys, values = normal(1, 8, DIM), normal(1, 8, DIM, seed=1)
    num_evicted = 1
    if case == "equal keys":
        num_evicted = 4
        keys[0, :4] = keys[0, 0].clone()
    queries = normal(1, 3, 2, DIM, seed=2)
    state = state_of(keys[:, :num_evicted], values[:, :num_evicted])
    actual = corrected(queries[:, :, 1:], keys[:, num_evicted:], values[:, num_evicted:], state)
    for member in range(3):
        expected = attend(queries[0, member, 1].tolist(), keys[0].tolist(), values[0].tolist())
        assert actual[0, member, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_equal_evicted_values_are_estimated_exactly_and_weighed_too_little() -> None:
    """The estimate is the value; by convexity the evicted weight is at least what is assumed."""
    keys, values = 2 * normal(1, 9, DIM), normal(1, 9, DIM, seed=1)
    values[0, :5] = 1.0
    values[0, 5:] = 0.0
    queries = normal(1, 1, 1, DIM, seed=2)
    state = state_of(keys[:, :5], values[:, :5])
    share = corrected(queries, keys[:, 5:], values[:, 5:], state)[0, 0, 0].tolist()
    exact = attend(queries[0, 0, 0].tolist(), keys[0].tolist(), values[0].tolist())
    assert share == pytest.approx([share[0]] * DIM, abs=1e-6)
    assert 0 < share[0] <= exact[0] + 1e-6


@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 8),
    head_size=st.sampled_from([32, 64, 128]),
    policy=st.sampled_from(["momentkv", "kvmerger", "d2o", "snapkv"]),
)
def test_the_least_blocks_hold_the_state_and_a_page_per_head(
    heads: int, head_size: int, policy: str
) -> None:
    pipeline = resolve(policy)
    page_bytes = 2 * 32 * head_size * 2
    shape = PageShape(heads, head_size, 32, page_bytes)
    least = pipeline.least_blocks(shape)

    def room(blocks: int) -> int:
        pages = blocks * heads
        return pages - pipeline.state_pages(pages, shape)

    assert room(least) >= heads
    assert least == 1 or room(least - 1) < heads
    if policy == "momentkv":
        state = pipeline.state_pages(least * heads, shape)
        assert (state - 1) * page_bytes < 4 * heads * packed_size(head_size) <= state * page_bytes
    if policy == "snapkv":
        assert least == 1


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dims", [5, 8])
def test_sixteen_bits_hold_cross_moments_of_any_size(size: float, dims: int) -> None:
    """Errors up to 1/2,000 of the largest; counts and means are exact; packing is idempotent."""
    keys, values = size * normal(2, 40, dims), 3 * normal(2, 40, dims, seed=1)
    everything = torch.ones(2, 40, dtype=torch.bool)
    kv = GatheredKV.of(keys, values)
    state = add_to_moments(kv, torch.zeros(2, moment_size(dims)), everything)
    packed = pack_moments(state, dims)
    assert packed.shape == (2, packed_size(dims))
    actual = unpack_moments(packed, dims)
    means = 1 + 2 * dims
    assert torch.equal(actual[:, :means], state[:, :means])
    largest = state[:, means:].abs().amax(dim=1, keepdim=True)
    assert ((actual - state)[:, means:].abs() <= largest / 2000).all()
    assert torch.allclose(pack_moments(actual, dims), packed, rtol=1e-6, equal_nan=True)
    nothing = torch.zeros(2, moment_size(dims))
    assert not unpack_moments(pack_moments(nothing, dims), dims).any()


def test_without_cross_moments_a_state_is_short_and_predicts_the_mean() -> None:
    state = state_of(normal(1, 6, DIM, seed=3), normal(1, 6, DIM, seed=4))
    packed = pack_moments(state, DIM, order=0)
    assert packed.shape == (1, 2 + 2 * DIM)
    actual = unpack_moments(packed, DIM)
    assert torch.equal(actual[:, : 1 + 2 * DIM], state[:, : 1 + 2 * DIM])
    assert not actual[:, 1 + 2 * DIM :].any()
    assert resolve("momentkv", {"order": 0}).state_size(64) == 2 + 2 * 64


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_rounds_predict_with_what_earlier_ones_evicted(rounds: int) -> None:
    """Entries of least weight times residual are evicted in parts, as by plain loops."""
    shape, window = Shape((9,), tail=1, group=1), 5
    view = make_view(shape, window)
    pipeline = resolve("momentkv", {"window_size": window, "chunk_size": 1, "rounds": rounds})
    head = oracles.heads_of(view)[0]
    masses, kept = oracles.mass(head), 12
    stay = oracles.protected(head, kept, 1, window, 0.0)
    left, gone = list(range(36)), list[int]()
    for part in range(1, rounds + 1):
        weights = [
            math.inf if j in stay else masses[j] * unpredicted(head, gone, j) for j in range(36)
        ]
        best = oracles.best(left, weights, 36 - (36 - kept) * part // rounds)
        gone += [j for j in left if j not in best]
        left = sorted(best)
    scores = pipeline.scorer.score(view)
    actual = pipeline.selector.select(view, scores, torch.tensor([kept]), pipeline.protection)
    assert actual[0].nonzero()[:, 0].tolist() == left


def unpredicted(head: oracles.Head, gone: list[int], j: int) -> float:
    """Norm of v_j - mean v - scale / n sum (v - mean v) ((k - mean k) . k_j)."""
    if not gone:
        return oracles.norm(head.values[j])
    dims, count = range(HEAD_SIZE), len(gone)
    mean_key = [sum(head.keys[i][d] for i in gone) / count for d in dims]
    mean_value = [sum(head.values[i][d] for i in gone) / count for d in dims]
    rest = [head.values[j][d] - mean_value[d] for d in dims]
    for i in gone:
        centred = [head.keys[i][d] - mean_key[d] for d in dims]
        near = head.scale / count * oracles.dot(centred, head.keys[j])
        rest = [rest[d] - near * (head.values[i][d] - mean_value[d]) for d in dims]
    return oracles.norm(rest)


def test_uncorrected_outputs_need_no_state_after_the_only_event() -> None:
    pipeline = replace(resolve("momentkv", {"correct": "off"}), repeats=False)
    assert not pipeline.needs_biased_attention
    assert pipeline.state_size(64) == 0
    assert replace(pipeline, repeats=True).state_size(64) == packed_size(64)


# Llama 3.1 8B: 8 heads of 128 numbers, blocks of 16 tokens in 16 bits.
LLAMA = PageShape(8, 128, 16, 2 * 16 * 128 * 2)


def test_a_budget_that_the_state_leaves_too_little_of_is_refused_with_the_figures() -> None:
    """A head's state is 33,800 bytes, 66.02 tokens: 34 pages of 16 for eight heads, 68 tokens."""
    pipeline = resolve("momentkv")
    pipeline.check_room(112, LLAMA)
    said = (
        r"much as 68 tokens.*at least 33 tokens.*found 28 of 96; give at least 112, or state_room"
    )
    with pytest.raises(ConfigError, match=said):
        pipeline.check_room(96, LLAMA)
    resolve("snapkv").check_room(32, LLAMA)


def test_a_state_on_top_leaves_the_budget_to_tokens() -> None:
    """The paper's smallest budget is 128 tokens."""
    pipeline = resolve("snapkv+momentfix", {"state_room": "on_top"})
    heads, block_size = LLAMA.num_heads, LLAMA.block_size
    on_top = pipeline.blocks_on_top(LLAMA)
    assert on_top == 5
    pipeline.check_room(128, LLAMA)
    rule = CompressionRule(block_size, tokens=128, blocks_on_top=on_top)
    pages = rule.target_blocks(4096, 4096) * heads
    state = pipeline.state_pages(pages, LLAMA)
    assert pages - state >= 128 // block_size * heads
    assert resolve("snapkv+momentfix").blocks_on_top(LLAMA) == 0
