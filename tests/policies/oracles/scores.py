"""The score of every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.policies.oracles.attention import mass, passages, perturbation, pooled
from tests.policies.oracles.heads import Head, Vector, norm
from tests.policies.oracles.keys import expected, keydiff, leverage
from tests.policies.oracles.links import LINKING
from tests.policies.oracles.redundancy import rkv
from tests.policies.oracles.trigonometry import triattention


def scores_of(policy: str, heads: list[Head], params: dict[str, Any]) -> list[Vector]:
    base = policy.split("+")[0]
    if base in ("streamingllm", "duoattention"):
        return [[float(j) for j in range(head.size)] for head in heads]
    if base == "knorm":
        return [[-norm(key) for key in head.keys] for head in heads]
    if base == "keydiff":
        return [keydiff(head, params["anchor"]) for head in heads]
    if "obcache" in policy:
        stride = params.get("stride", 1)
        changes = [perturbation(head, params["variant"], stride) for head in heads]
        if base == "h2o":
            return changes
        return [
            pooled(head, row, params["kernel_size"], params["pooling"])
            for head, row in zip(heads, changes, strict=True)
        ]
    if base in ("spans", "keyspans"):
        return [higher_rank(head, params) for head in heads]
    if base == "leverage":
        return [leverage(head, params["keys"]) for head in heads]
    if base == "rkv":
        return [rkv(head, params) for head in heads]
    if base == "triattention":
        end = max(head.size + head.num_tail for head in heads)
        return [
            triattention(head, end, statistics, params)
            for head, statistics in zip(heads, params["statistics"], strict=True)
        ]
    if base == "expected":
        width = max(head.size + head.num_tail for head in heads)
        return [expected(head, width, params) for head in heads]
    masses = [mass(head, params.get("stride", 1)) for head in heads]
    if base in ("attention", "h2o", "d2o", "momentkv", *LINKING):
        return masses
    if base == "tova":
        # A head that is shorter than another has nothing to say about the rest.
        width = max(len(row) for row in masses)
        mean = [sum(row[j] for row in masses if j < len(row)) / len(masses) for j in range(width)]
        return [mean[: head.size] for head in heads]
    return [
        pooled(head, row, params["kernel_size"], params["pooling"])
        for head, row in zip(heads, masses, strict=True)
    ]


def higher_rank(head: Head, params: dict[str, Any]) -> Vector:
    """Highest rank by all observed queries, the last ones pooled, or the key (spans, keyspans)."""
    last = replace(head, queries=head.queries[-params["near_size"] :])
    near = passages(last, mass(last), params["num_after"], params["num_before"])
    rows = [mass(head, params["stride"]), near]
    if "key_weight" in params:
        unusual, weight = keydiff(head, "mean_normalized"), params["key_weight"]
    else:
        bare, weight = replace(head, queries=[]), 1.0
        unusual = pooled(bare, leverage(head, params["keys"]), params["key_kernel_size"], "max")
    by_key = [head.size - (head.size - rank_of(j, unusual)) / weight for j in range(head.size)]
    return [max(*(float(rank_of(j, row)) for row in rows), by_key[j]) for j in range(head.size)]


def rank_of(j: int, row: Vector) -> int:
    return sum((row[i], i) < (row[j], j) for i in range(len(row)))
