"""Scores from what the window's queries attend to, and from values."""

from __future__ import annotations

import math

from tests.policies.oracles.heads import Head, Vector, dot, norm


def mass(head: Head, stride: int = 1) -> Vector:
    """Mean attention of every stride-th query of the window to each entry, from the last back."""
    everything = head.keys + head.tail_keys
    window = len(head.queries)
    total, count = [0.0] * head.size, 0
    for i, members in enumerate(head.queries):
        visible = len(everything) - (window - 1 - i)
        if (window - 1 - i) % stride:
            continue
        count += len(members)
        if visible <= 0:
            continue
        for query in members:
            logits = [head.scale * dot(query, key) for key in everything[:visible]]
            top = max(logits)
            exps = [math.exp(logit - top) for logit in logits]
            denominator = sum(exps)
            for j in range(min(visible, head.size)):
                total[j] += exps[j] / denominator
    return [value / max(1, count) for value in total]


def perturbation(head: Head, variant: str, stride: int = 1) -> Vector:
    """OBCache: squared change of the window's outputs, summed over queries and group.

    Of one query in `stride` from the last on.
    """
    keys, values = head.keys + head.tail_keys, head.values + head.tail_values
    window, columns = len(head.queries), range(len(values[0]))
    total = [0.0] * head.size
    for i, members in enumerate(head.queries):
        visible = len(keys) - (window - 1 - i)
        if visible <= 0 or (window - 1 - i) % stride:
            continue
        for query in members:
            logits = [head.scale * dot(query, key) for key in keys[:visible]]
            exps = [math.exp(logit - max(logits)) for logit in logits]
            weights = [value / sum(exps) for value in exps]
            out = [sum(w * values[j][c] for j, w in enumerate(weights)) for c in columns]
            for j in range(min(visible, head.size)):
                value, from_key = values[j], [values[j][c] - out[c] for c in columns]
                change = {
                    "value": value,
                    "key": [logits[j] * x for x in from_key],
                    "joint": [x + logits[j] * y for x, y in zip(value, from_key, strict=True)],
                }[variant]
                total[j] += weights[j] ** 2 * dot(change, change)
    return total


def chunk_means(scores: Vector, size: int) -> Vector:
    chunks = [scores[start : start + size] for start in range(0, len(scores), size)]
    return [sum(chunk) / len(chunk) for chunk in chunks for _ in chunk]


def pooled(head: Head, raw: Vector, kernel: int, how: str) -> Vector:
    """Pools the columns left of the window; the window's own keep their mass."""
    left = max(0, head.size - max(0, len(head.queries) - head.num_tail))
    half = kernel // 2
    out = list(raw)
    for j in range(left):
        around = [raw[i] for i in range(max(0, j - half), min(left, j + half + 1))]
        out[j] = max(around) if how == "max" else sum(around) / kernel
    return out


def passages(head: Head, raw: Vector, num_after: int, num_before: int) -> Vector:
    """Raises a column left of the window to the highest one whose passage it belongs to."""
    left = max(0, head.size - max(0, len(head.queries) - head.num_tail))
    out = list(raw)
    for peak in range(left):
        for j in range(max(0, peak - num_before), min(left, peak + num_after + 1)):
            out[j] = max(out[j], raw[peak])
    return out


def value_norms(head: Head, how: str) -> Vector:
    out = []
    for value in head.values:
        total = 0.0
        for weight in head.weights:
            columns = range(len(weight[0]))
            projected = [sum(value[d] * weight[d][m] for d in range(len(value))) for m in columns]
            total += sum(map(abs, projected)) if how == "l1" else norm(projected)
        out.append(total / len(head.weights))
    return out
