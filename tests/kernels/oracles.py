"""The kernels again, as plain Python loops over numbers. Shares no code with the package."""

from __future__ import annotations

import math
from typing import Any

Vector = list[float]
NONE = -math.inf


def rows_of(entries: Any, which: int) -> list[list[Vector]]:
    """Per sequence the key rows (`which` 0) or value rows (1), read from the pages one by one."""
    pages = entries.pages.double().tolist()
    size, dims = entries.block_size, entries.head_size
    found = []
    for table, length in zip(
        entries.page_table.tolist(), entries.lengths.flatten().tolist(), strict=True
    ):
        rows = []
        for j in range(length):
            start = (which * size + j % size) * dims
            rows.append(pages[table[j // size]][start : start + dims])
        found.append(rows)
    return found


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def bias_of(bias: Any, s: int, j: int) -> float:
    """Of entry j of sequence s; entries without one have 0."""
    return float(bias[s, j]) if bias is not None and j < bias.shape[1] else 0.0


def attend(
    query: Vector, keys: list[Vector], values: list[Vector], added: Vector, scale: float
) -> tuple[Vector, float]:
    """Output and natural log-sum-exp; zeros and minus infinity where there are no keys."""
    if not keys:
        return [0.0] * len(query), NONE
    logits = [scale * dot(query, key) + more for key, more in zip(keys, added, strict=True)]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    whole = sum(weights)
    output = [
        sum(weight * value[c] for weight, value in zip(weights, values, strict=True)) / whole
        for c in range(len(query))
    ]
    return output, top + math.log(whole)


def prefill(
    entries: Any, queries: Any, scale: float, bias: Any
) -> tuple[list[list[list[Vector]]], list[list[list[float]]]]:
    """[S][G][m][D] outputs and [S][G][m] log-sum-exps; query i of m misses the last m - 1 - i."""
    keys, values = rows_of(entries, 0), rows_of(entries, 1)
    outputs, sums = [], []
    for s, members in enumerate(queries.double().tolist()):
        added = [bias_of(bias, s, j) for j in range(len(keys[s]))]
        pairs = []
        for rows in members:
            seen = [max(0, len(keys[s]) - (len(rows) - 1 - i)) for i in range(len(rows))]
            pairs.append(
                [
                    attend(row, keys[s][:n], values[s][:n], added[:n], scale)
                    for row, n in zip(rows, seen, strict=True)
                ]
            )
        outputs.append([[pair[0] for pair in row] for row in pairs])
        sums.append([[pair[1] for pair in row] for row in pairs])
    return outputs, sums
