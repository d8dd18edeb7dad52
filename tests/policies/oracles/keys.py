"""Scores from keys, and from future queries."""

from __future__ import annotations

import math
from typing import Any

from tests.policies.oracles.heads import Head, Vector, dot, norm


def keydiff(head: Head, anchor: str) -> Vector:
    keys, size = head.keys, head.size
    unit = [[x / norm(k) for x in k] if norm(k) else k for k in keys]
    averaged = unit if anchor == "mean_normalized" else keys
    centre = [sum(k[c] for k in averaged) / size for c in range(len(keys[0]))]
    length = norm(centre)
    return [-dot(centre, u) / length if length else 0.0 for u in unit]


def turned(vector: Vector, steps: int, frequencies: Vector) -> Vector:
    """The vector rotated by RoPE to a later position."""
    out, half = list(vector), len(frequencies)
    for i, frequency in enumerate(frequencies):
        a, b, angle = vector[i], vector[i + half], steps * frequency
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def leverage(head: Head, space: str) -> Vector:
    """x (X^T X + ridge I)^-1 x of the keys, at position 0 if unrotated, by Gaussian elimination."""
    rows = head.keys
    if space == "unrotated":
        rows = [turned(key, -j, head.frequencies) for j, key in enumerate(rows)]
    size, columns = len(rows), range(len(rows[0]))
    mean = [sum(row[c] for row in rows) / size for c in columns]
    rows = [[row[c] - mean[c] for c in columns] for row in rows]
    matrix = [[sum(row[i] * row[j] for row in rows) for j in columns] for i in columns]
    floor = 1e-3 * sum(matrix[i][i] for i in columns) / len(columns)
    out = []
    for row in rows:
        lines = [[*matrix[i], row[i]] for i in columns]
        for i in columns:
            lines[i][i] += floor
        for i in columns:
            for k in columns:
                if k != i:
                    part = lines[k][i] / lines[i][i]
                    lines[k] = [a - part * b for a, b in zip(lines[k], lines[i], strict=True)]
        out.append(sum(row[i] * lines[i][-1] / lines[i][i] for i in columns))
    return out


def expected(head: Head, width: int, params: dict[str, Any]) -> Vector:
    """Expected Attention, of a head whose layer has `width` tokens."""
    window, sinks, future = head.queries, params["n_sink"], params["n_future_positions"]
    columns = range(len(head.keys[0]))
    begin = width - sinks - len(window)  # tokens before the window that are no sinks
    window = window[-begin if begin < 0 else 0 :] or window[-1:]
    unit = [[float(i == j) for j in columns] for i in columns]
    turns = [[turned(row, t, head.frequencies) for t in range(future)] for row in unit]
    turn = [[sum(row[c] for row in rows) / future for c in columns] for rows in turns]
    keys, total = head.keys + head.tail_keys, [0.0] * head.size
    for member in range(len(head.weights)):
        asked = [
            turned(members[member], len(window) - i, head.frequencies)
            for i, members in enumerate(window)
        ]
        mean = [sum(query[c] for query in asked) / len(asked) for c in columns]
        away = [[query[c] - mean[c] for c in columns] for query in asked]
        mean = [sum(mean[i] * turn[i][c] for i in columns) for c in columns]
        away = [[sum(row[i] * turn[i][c] for i in columns) for c in columns] for row in away]
        logits = []
        for key in keys:
            logit = head.scale * dot(mean, key)
            if params["use_covariance"]:
                logit += head.scale**2 / 2 * sum(dot(row, key) ** 2 for row in away) / len(away)
            logits.append(logit)
        top = max(logits[sinks:], default=0.0)
        denominator = sum(math.exp(logit - top) for logit in logits[sinks:])
        for j in range(sinks, head.size):
            total[j] += math.exp(logits[j] - top) / denominator / len(head.weights)
    if not params["use_vnorm"]:
        return total
    return [(s + params["epsilon"]) * norm(v) for s, v in zip(total, head.values, strict=True)]
