"""The plain operators that the matrix of models gives to engines, against loops over numbers."""

from __future__ import annotations

from math import exp, log1p, sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_parts import linear_operators, operators


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.5


def softplus(x: float) -> float:
    return log1p(exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_are_chosen_by_score_and_bias_and_weighed_by_score(score: str) -> None:
    logits, bias = numbers(5, 6), numbers(6)
    weights, ids = torch.empty(5, 2), torch.empty(5, 2, dtype=torch.int32)
    by_score = {"softmax": lambda rows: rows.softmax(-1), "sigmoid": torch.sigmoid}[score]
    operators.top_k(by_score)(weights, ids, None, logits, True, bias, routed_scaling_factor=2.5)
    for row, values in enumerate(logits.tolist()):
        total = sum(exp(x) for x in values)
        scores = [exp(x) / total if score == "softmax" else sigmoid(x) for x in values]
        order = sorted(range(6), key=lambda at: -(scores[at] + float(bias[at])))[:2]
        assert ids[row].tolist() == order
        expected = [2.5 * scores[at] / sum(scores[each] for each in order) for at in order]
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("first", [0, 4])
def test_mamba_scans_tokens_one_by_one_and_decodes_behind(first: int) -> None:
    """The last token is a decode step; `first` tokens were scanned in a step before."""
    channels, width, length, block = 3, 2, 7, 1
    u, delta, z = (
        numbers(channels, length),
        numbers(channels, length) + 1,
        numbers(channels, length),
    )
    a, d, bias = -numbers(channels, width).abs(), numbers(channels), numbers(channels) / 2
    b, c = numbers(1, width, length), numbers(1, width, length + 1)[:, :, 1:]
    states = numbers(2, channels, width)  # of a request that was there before
    expected = []
    for channel in range(channels):
        state = [0.0] * width
        for at in range(length):
            step, value = softplus(float(delta[channel, at] + bias[channel])), float(u[channel, at])
            for n in range(width):
                decay = exp(step * float(a[channel, n]))
                state[n] = state[n] * decay + step * float(b[0, n, at]) * value
            out = sum(state[n] * float(c[0, n, at]) for n in range(width))
            gate = float(z[channel, at])
            expected.append((out + float(d[channel]) * value) * gate * sigmoid(gate))
    where = torch.tensor([block])
    outputs = z.clone()
    for start, end in [(0, first), (first, length - 1)]:
        part, out = slice(start, end), outputs[:, start:end]
        starts, has_state = torch.tensor([0, end - start]), torch.tensor([start > 0])
        rows = u[:, part], delta[:, part], a, b[:, :, part], c[:, :, part], d, out, bias
        operators.selective_scan(*rows, True, starts, where, has_state, states)
    row = [rows[:, -1][None] for rows in (u, delta, b[0], c[0], z)]
    out = torch.empty(1, channels)
    more = row[4], bias, True, where[None], where[None], None, out
    operators.state_update(states, row[0], row[1], a, row[2], row[3], d, *more)
    outputs[:, -1] = out[0]
    assert outputs.flatten().tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("per_channel", [False, True])
def test_delta_rule_of_a_prompt_and_a_decode_step(per_channel: bool) -> None:
    """States forget by a gate, and are corrected towards the value of each key."""
    length, heads, size = 5, 2, 3
    q, k, v = (numbers(1, length, heads, size + more)[..., :size] for more in (0, 1, 2))
    beta = numbers(1, length, heads).abs()
    gates = -numbers(1, length, heads, *[size] * per_channel).abs()
    expected = []
    for head in range(heads):
        state = [[0.0] * size for _ in range(size)]  # of values and keys
        for at in range(length):
            norm_q, norm_k = (
                sqrt(sum(float(x) ** 2 for x in rows[0, at, head])) for rows in (q, k)
            )
            key = [float(x) / norm_k for x in k[0, at, head]]
            query = [float(x) / norm_q / sqrt(size) for x in q[0, at, head]]
            for i in range(size):
                for j in range(size):
                    gate = gates[0, at, head, j] if per_channel else gates[0, at, head]
                    state[i][j] *= exp(float(gate))
                read = sum(state[i][j] * key[j] for j in range(size))
                error = float(beta[0, at, head]) * (float(v[0, at, head, i]) - read)
                for j in range(size):
                    state[i][j] += error * key[j]
                expected.append(sum(state[i][j] * query[j] for j in range(size)))
    blocks = torch.zeros(2, heads, size, size)
    prompt, last = slice(0, length - 1), slice(length - 1, length)
    outputs = []
    for part, where in ((prompt, None), (last, torch.tensor([1]))):
        rows = [rows[:, part] for rows in (q, k, v, gates, beta)]
        starts = torch.tensor([0, rows[0].shape[1]])
        states = blocks[1:] if where is None else blocks
        out, states = linear_operators.delta_rule(*rows, states, starts, where)
        if where is None:
            assert not blocks.any()
            blocks[1] = states[0]
        outputs.append(out[0])
    found = torch.cat(outputs).transpose(0, 1).flatten().tolist()  # by head
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_linear_attention_with_a_constant_decay() -> None:
    q, k, v = numbers(2, 3), numbers(2, 4)[:, :3], numbers(2, 5)[:, :3]
    state, slopes = numbers(2, 3, 3), torch.tensor([0.1, 0.7])
    before = state.clone()
    out = linear_operators.decayed(state, q, k, v, slopes)
    for head in range(2):
        for j in range(3):
            column = []
            for i in range(3):
                kept = float(before[head, i, j]) * exp(-float(slopes[head]))
                column.append(kept + float(k[head, i]) * float(v[head, j]))
            assert state[head, :, j].tolist() == pytest.approx(column, rel=1e-5)
            answer = sum(float(q[head, i]) * column[i] for i in range(3))
            assert float(out[head, j]) == pytest.approx(answer, rel=1e-4)


def test_mla_reads_blocks_of_any_length() -> None:
    cache, query, out = numbers(4, 3, 6), numbers(1, 2, 6), torch.empty(1, 2, 4)
    table, length = torch.tensor([[2, 0, 3]]), torch.tensor([5])
    linear_operators.mla_decode(out, query, cache, 0.5, table, length)
    rows = [cache[block, at].tolist() for block, at in [(2, 0), (2, 1), (2, 2), (0, 0), (0, 1)]]
    for head in range(2):
        asked = query[0, head].tolist()
        weights = [exp(0.5 * sum(x * y for x, y in zip(asked, row, strict=True))) for row in rows]
        for element in range(4):
            total = sum(weight * row[element] for weight, row in zip(weights, rows, strict=True))
            assert float(out[0, head, element]) == pytest.approx(total / sum(weights), rel=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_norms_are_gated_before_or_behind(before: bool) -> None:
    x, z, weight = numbers(1, 4), numbers(1, 5)[:, :4], numbers(4)
    gates = [sigmoid(float(gate)) for gate in z[0]]
    values = [float(each) * (1 if before else gate) for each, gate in zip(x[0], gates, strict=True)]
    expected = []
    for at, value in enumerate(values):
        group = values[at // 2 * 2 : at // 2 * 2 + 2]
        norm = value / sqrt(sum(each**2 for each in group) / 2 + 1e-6) * float(weight[at])
        expected.append(norm * (gates[at] if before else 1))
    options: dict[str, Any] = {"norm_before_gate": before, "activation": "sigmoid"}
    normed = linear_operators.gated_norm(
        x, weight, None, z, group_size=2, is_rms_norm=True, **options
    )
    assert normed[0].tolist() == pytest.approx(expected, rel=1e-4)


def test_routers_of_other_scores_are_left_alone() -> None:
    """Where vLLM's router for CPUs has an answer, that one is given."""
    routing = operators.routing_with_sigmoid(lambda self, *_: "vLLM's")
    router = SimpleNamespace(
        use_grouped_topk=False,
        custom_routing_function=None,
        scoring_func="softmax",
        top_k=2,
        renormalize=False,
        routed_scaling_factor=1.0,
        e_score_correction_bias=None,
    )
    logits = numbers(3, 4)
    assert routing(router, None, logits) == "vLLM's"
    router.scoring_func = "sigmoid"
    weights, ids = routing(router, None, logits)
    assert ids.tolist() == logits.topk(2).indices.tolist()
    assert torch.equal(weights, logits.sigmoid().gather(1, ids.long()))
    router.use_grouped_topk = True
    assert routing(router, None, logits) == "vLLM's"
