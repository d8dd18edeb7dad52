"""R-KV: importance less redundancy, pair by pair."""

from __future__ import annotations

import math
from typing import Any

from tests.policies.oracles.heads import Head, Vector, dot, norm


def rkv(head: Head, params: dict[str, Any]) -> Vector:
    """Score of the full blocks' entries; the paper's variant says nothing of the window's."""
    keys, code = head.keys + head.tail_keys, params["variant"] == "code"
    before = max(0, len(keys) - len(head.queries))
    part = params["mix_lambda"]
    score = [0.0] * len(keys)
    for j, value in enumerate(importance(head, keys[:before], params)):
        score[j] += part * value
    compared = keys if code else keys[:before]
    for j, value in enumerate(redundancy(compared, params["threshold"], code)):
        score[j] -= (1 - part) * value
    return score[: head.size]


def importance(head: Head, keys: list[Vector], params: dict[str, Any]) -> Vector:
    half = params["kernel_size"] // 2
    count, rows = len(keys), []
    for members in head.queries:
        logits = [max(head.scale * dot(query, key) for query in members) for key in keys]
        exps = [math.exp(logit - max(logits)) for logit in logits]
        rows.append([value / sum(exps) for value in exps])
    if not rows or not keys:
        return []
    if params["variant"] == "code":
        mean = [sum(row[j] for row in rows) / len(rows) for j in range(count)]
        return [max(mean[max(0, j - half) : j + half + 1]) for j in range(count)]
    pooled = [[max(row[max(0, j - half) : j + max(1, half)]) for j in range(count)] for row in rows]
    return [sum(row[j] for row in pooled) / len(rows) for j in range(count)]


def redundancy(keys: list[Vector], threshold: float, code: bool) -> Vector:
    count = len(keys)
    cosines = [[0.0] * count for _ in keys]
    for i in range(count):
        for j in range(count):
            if i != j:
                cosines[i][j] = dot(keys[i], keys[j]) / (norm(keys[i]) * norm(keys[j]) + 1e-12)
    links = [row[:] for row in cosines]  # row i: how token i is linked to others
    for i in range(count):
        alike = [j for j in range(count) if cosines[i][j] > threshold]
        if code:
            links[i][alike[-1] if alike else 0] = 0.0
        elif alike:
            links[alike[-1]][i] = 0.0
    means = [sum(links[i][j] for i in range(count)) / count for j in range(count)]
    exps = [math.exp(mean) for mean in means]
    return [value / sum(exps) for value in exps]
