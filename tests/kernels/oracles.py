"""The kernels again, as plain Python loops over numbers. Shares no code with the package."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

Vector = list[float]
NONE = -math.inf


def rows_of(entries: Any, which: int) -> list[list[Vector]]:
    """Per sequence the key rows (`which` 0) or value rows (1), read from the pages one by one."""
    pages = entries.pages.double().tolist()
    size, dims = entries.block_size, entries.head_size
    results = []
    for table, length in zip(
        entries.page_table.tolist(), entries.lengths.flatten().tolist(), strict=True
    ):
        rows = []
        for j in range(length):
            start = (2 * (j % size) + which) * dims
            rows.append(pages[table[j // size]][start : start + dims])
        results.append(rows)
    return results


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def bias_of(bias: Any, s: int, j: int) -> float:
    """Bias of entry j of sequence s; 0 for entries without one."""
    return float(bias[s, j]) if bias is not None and j < bias.shape[1] else 0.0


def numbers_of(numbers: Any, s: int) -> Vector:
    """Numbers of sequence s, read from their pages one by one."""
    pages, heads = numbers.pages.tolist(), len(numbers.starts) // len(numbers.page_table)
    table, size = numbers.page_table[s // heads].tolist(), numbers.pages.shape[1]
    places = range(int(numbers.starts[s]), int(numbers.starts[s] + numbers.lengths[s]))
    return [pages[table[place // size]][place % size] for place in places]


def attend(
    query: Vector, keys: list[Vector], values: list[Vector], added: Vector, scale: float
) -> tuple[Vector, float]:
    """Output and natural log-sum-exp; zeros and minus infinity where there are no keys."""
    if not keys:
        return [0.0] * len(query), NONE
    logits = [scale * dot(query, key) + more for key, more in zip(keys, added, strict=True)]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    weight_sum = sum(weights)
    output = [
        sum(weight * value[c] for weight, value in zip(weights, values, strict=True)) / weight_sum
        for c in range(len(query))
    ]
    return output, top + math.log(weight_sum)


def prefill(
    entries: Any, queries: Any, scale: float, bias: Any
) -> tuple[list[list[list[Vector]]], list[list[list[float]]]]:
    """[S][G][m][D] outputs and [S][G][m] log-sum-exps; query i of m misses the last m - 1 - i."""
    keys, values = rows_of(entries, 0), rows_of(entries, 1)
    outputs, sums = [], []
    for s, members in enumerate(queries.double().tolist()):
        results = [] if bias is None else numbers_of(bias, s)
        added = (results + [0.0] * len(keys[s]))[: len(keys[s])]
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


def corrected(output: Vector, lse: float, query: Vector, state: Vector, scale: float) -> Vector:
    """MomentKV's correction of one output (arXiv 2606.01563)."""
    dims = len(query)
    count, mean_key, mean_value = state[0], state[1 : 1 + dims], state[1 + dims : 1 + 2 * dims]
    cross = state[1 + 2 * dims :]
    if count == 0:
        return output
    weight = 1 / (1 + math.exp(math.log(count) + scale * dot(query, mean_key) - lse))
    estimate = [
        mean + scale / count * dot(cross[c * dims : (c + 1) * dims], query)
        for c, mean in enumerate(mean_value)
    ]
    return [weight * o + (1 - weight) * f for o, f in zip(output, estimate, strict=True)]


def window_mass(
    entries: Any,
    num_tail: int,
    queries: Any,
    scale: float,
    bias: Any,
    stride: int = 1,
    sinks: Any = None,
    added: Callable[[int, int, int, int], float] = lambda s, g, i, j: 0.0,
) -> list[list[float]]:
    """[S][capacity]: mean share of each entry in the softmax of the window's queries.

    Of `stride` queries one counts, from the last one back; `added` comes to the logit that query i
    of head g of sequence s has with entry j.
    """
    heads, window = rows_of(entries, 0), len(queries)
    group = queries.shape[1] // len(heads)
    rows = queries.double().tolist()
    results = []
    for s, keys in enumerate(heads):
        body = len(keys) - num_tail
        total = [0.0] * (entries.page_table.shape[1] * entries.block_size)
        counting = range(window - 1, -1, -stride)
        for i in counting:
            visible = len(keys) - (window - 1 - i)
            for g in range(group):
                logits = [
                    scale * dot(rows[i][s * group + g], keys[j])
                    + (bias_of(bias, s, j) if j < body else 0.0)
                    + added(s, g, i, j)
                    for j in range(max(0, visible))
                ]
                if sinks is not None:
                    logits.append(float(sinks[s, g]))
                weights = [math.exp(logit - max(logits)) for logit in logits]
                for j in range(min(body, max(0, visible))):
                    total[j] += weights[j] / sum(weights) / (len(counting) * group)
        results.append(total)
    return results


def repetition_peaks(
    keys: Any, queries: Any, scale: float, num_context: int, sinks: Any = None
) -> list[list[float]]:
    """[H][num_context]: the highest share that any query of the last tokens gives an entry."""
    rows, heads = queries.double().tolist(), keys.double().tolist()
    group = queries.shape[1] // len(heads)
    results = []
    for h, entries in enumerate(heads):
        highest = [0.0] * num_context
        for i, members in enumerate(rows):
            visible = entries[: len(entries) - (len(rows) - 1 - i)]
            for g, query in enumerate(members[h * group : (h + 1) * group]):
                weights = [math.exp(scale * dot(query, key)) for key in visible]
                if sinks is not None:
                    weights.append(math.exp(float(sinks[h, g])))
                for j in range(num_context):
                    highest[j] = max(highest[j], weights[j] / sum(weights))
        results.append(highest)
    return results


def keydiff(entries: Any, anchor: str) -> list[list[float]]:
    """[S][capacity]: minus the cosine with the mean key, or with the mean unit key."""
    results = []
    for keys in rows_of(entries, 0):
        norms = [math.sqrt(dot(key, key)) for key in keys]
        terms = [
            [x / norm if anchor != "mean_raw" else x for x in key]
            for key, norm in zip(keys, norms, strict=True)
        ]
        centre = [sum(column) / len(keys) for column in zip(*terms, strict=True)]
        scores = [0.0] * (entries.page_table.shape[1] * entries.block_size)
        for j, (key, norm) in enumerate(zip(keys, norms, strict=True)):
            scores[j] = -dot(key, centre) / norm / math.sqrt(dot(centre, centre))
        results.append(scores)
    return results


def value_norms(entries: Any, weight: Any, order: int) -> list[list[float]]:
    """[S][capacity]: mean over the group of the 1- or 2-norm of v W_O; weight [S, D, G, M]."""
    results = []
    for s, values in enumerate(rows_of(entries, 1)):
        norms = [0.0] * (entries.page_table.shape[1] * entries.block_size)
        for j, value in enumerate(values):
            for g in range(weight.shape[2]):
                columns = weight[s, :, g].double().t().tolist()
                parts = [abs(dot(value, column)) ** order for column in columns]
                norms[j] += sum(parts) ** (1 / order) / weight.shape[2]
        results.append(norms)
    return results


def moments(entries: Any, evicted: Any) -> list[list[float]]:
    """[S][moment_size]: count, mean key, mean value and cross moments, row by row, from scratch."""
    results = []
    for s, pair in enumerate(zip(rows_of(entries, 0), rows_of(entries, 1), strict=True)):
        keys, values = ([row for j, row in enumerate(rows) if evicted[s, j]] for rows in pair)
        dims, count = range(entries.head_size), len(keys)
        means = [
            [sum(row[c] for row in rows) / max(1, count) for c in dims] for rows in (keys, values)
        ]
        cross = [
            sum(
                (v[a] - means[1][a]) * (k[b] - means[0][b])
                for k, v in zip(keys, values, strict=True)
            )
            for a in dims
            for b in dims
        ]
        results.append([float(count), *means[0], *means[1], *cross])
    return results


def rerotated(row: Vector, step: int, frequencies: Vector, halves: bool) -> Vector:
    """A key, as complex numbers, so many positions later."""
    size, results = len(frequencies), list(row)
    for i, frequency in enumerate(frequencies):
        first, second = (i, i + size) if halves else (2 * i, 2 * i + 1)
        pair = complex(row[first], row[second]) * cmath.exp(1j * step * frequency)
        results[first], results[second] = pair.real, pair.imag
    return results


def merged(
    entries: Any, link: Any, weights: Any, which: int, rotated: Any = None
) -> list[list[Vector]]:
    """[S][capacity][D]: weighted means of groups at their first entries, zeros elsewhere."""
    results = []
    for s, rows in enumerate(rows_of(entries, which)):
        out = [[0.0] * entries.head_size for _ in range(link.shape[1])]
        j = 0
        while j < len(rows):
            end = j + 1
            while end < len(rows) and link[s, end]:
                end += 1
            group = [(float(weights[s, i]), rows[i]) for i in range(j, end)]
            if rotated is not None and len(group) > 1:
                rotary, steps = rotated
                frequencies = rotary.frequencies.double().tolist()
                group = [
                    (weight, rerotated(row, int(steps[s, i]), frequencies, rotary.halves))
                    for i, (weight, row) in enumerate(group, start=j)
                ]
            weight_sum = sum(weight for weight, _ in group)
            out[j] = [sum(w * row[c] for w, row in group) / weight_sum for c in range(len(out[j]))]
            j = end
        results.append(out)
    return results


def nearest(entries: Any, kept: list[list[bool]]) -> tuple[list[Vector], list[list[int]]]:
    """Highest cosine of each evicted key to a kept one, and which; 0 for all others."""
    cosines, places = [], []
    for keys, flags in zip(rows_of(entries, 0), kept, strict=True):
        best, where = [0.0] * entries.capacity, [0] * entries.capacity
        for i, key in enumerate(keys):
            highest = NONE
            for j, other in enumerate(keys):
                if flags[i] or not flags[j]:
                    continue
                sizes = math.sqrt(dot(key, key) * dot(other, other))
                cosine = dot(key, other) / sizes if sizes else 0.0
                if cosine > highest:
                    highest, best[i], where[i] = cosine, cosine, j
        cosines.append(best)
        places.append(where)
    return cosines, places


def perturbation(
    entries: Any, num_tail: int, queries: Any, scale: float, variant: str, stride: int = 1
) -> list[list[float]]:
    """[S][capacity]: squared change of the window's outputs without an entry, summed.

    Of `stride` queries one counts, from the last one back.
    """
    keys, values = rows_of(entries, 0), rows_of(entries, 1)
    group = queries.shape[1] // len(keys)
    rows = queries.double().tolist()
    results = []
    for s in range(len(keys)):
        total = [0.0] * entries.capacity
        for i in range(len(rows) - 1, -1, -stride):
            visible = max(0, len(keys[s]) - (len(rows) - 1 - i))
            for g in range(group):
                query = rows[i][s * group + g]
                logits = [scale * dot(query, keys[s][j]) for j in range(visible)]
                output, lse = attend(
                    query, keys[s][:visible], values[s][:visible], [0.0] * visible, scale
                )
                for j in range(min(visible, len(keys[s]) - num_tail)):
                    weight, e = math.exp(logits[j] - lse), logits[j]
                    apart = [v - o for v, o in zip(values[s][j], output, strict=True)]
                    changed = {
                        "value": values[s][j],
                        "key": [e * d for d in apart],
                        "joint": [v + e * d for v, d in zip(values[s][j], apart, strict=True)],
                    }[variant]
                    total[j] += weight * weight * dot(changed, changed)
        results.append(total)
    return results


def residuals(entries: Any, state: Any, scale: float) -> list[Vector]:
    """[S][capacity]: norms of v - mean v - (scale / n_e) X k; 0 behind the lengths."""
    dims, results = entries.head_size, []
    for s, (keys, values) in enumerate(zip(rows_of(entries, 0), rows_of(entries, 1), strict=True)):
        numbers = state[s].double().tolist()
        count, mean, cross = numbers[0], numbers[1 + dims : 1 + 2 * dims], numbers[1 + 2 * dims :]
        norms = [0.0] * entries.capacity
        for j, (key, value) in enumerate(zip(keys, values, strict=True)):
            rest = [
                value[a]
                - mean[a]
                - scale / max(count, 1) * dot(cross[a * dims : (a + 1) * dims], key)
                for a in range(dims)
            ]
            norms[j] = math.sqrt(dot(rest, rest))
        results.append(norms)
    return results


def neighbour_cosines(entries: Any) -> list[Vector]:
    """[S][capacity]: cosine with the key before."""
    results = []
    for keys in rows_of(entries, 0):
        cosines = [0.0] * entries.capacity
        for j in range(1, len(keys)):
            sizes = math.sqrt(dot(keys[j], keys[j])) * math.sqrt(dot(keys[j - 1], keys[j - 1]))
            cosines[j] = dot(keys[j], keys[j - 1]) / sizes if sizes else 0.0
        results.append(cosines)
    return results


def key_distances(entries: Any, others: Any) -> list[Vector]:
    """[S][capacity]: distance from the key at another place."""
    results = []
    for s, keys in enumerate(rows_of(entries, 0)):
        distances = [0.0] * entries.capacity
        for j, key in enumerate(keys):
            distances[j] = math.dist(key, keys[int(others[s, j])])
        results.append(distances)
    return results


def spread(
    entries: Any, kept: Any, shares: Any, num_targets: int, most: float
) -> list[list[Vector]]:
    """[S][capacity][D]: each evicted value's share goes to the next kept ones, up to `most`."""
    results = []
    for s, values in enumerate(rows_of(entries, 1)):
        room = entries.page_table.shape[1] * entries.block_size
        rows = [[0.0] * entries.head_size for _ in range(room)]
        weights = [0.0] * room
        for j, value in enumerate(values):
            later = [t for t in range(j + 1, len(values)) if kept[s, t]][:num_targets]
            for t in [] if kept[s, j] else later:
                given = [float(shares[s, j]) * x for x in value]
                rows[t] = [x + y for x, y in zip(rows[t], given, strict=True)]
                weights[t] += float(shares[s, j])
        for j, value in enumerate(values):
            if kept[s, j]:
                part = most / weights[j] if weights[j] > most else 1.0
                rows[j] = [part * x + y for x, y in zip(rows[j], value, strict=True)]
        results.append(rows)
    return results


def merged_into(
    entries: Any, which: int, kept: Any, targets: Any, weights: Any
) -> list[list[Vector]]:
    """[S][capacity][D]: kept rows averaged with those that go to them (D2O)."""
    results = []
    for s, held in enumerate(rows_of(entries, which)):
        room = entries.page_table.shape[1] * entries.block_size
        rows = [[0.0] * entries.head_size for _ in range(room)]
        for t in range(len(held)):
            if not kept[s, t]:
                continue
            coming = [j for j in range(len(held)) if weights[s, j] > 0 and int(targets[s, j]) == t]
            weight_sum = 1 + sum(float(weights[s, j]) for j in coming)
            rows[t] = [
                (held[t][c] + sum(float(weights[s, j]) * held[j][c] for j in coming)) / weight_sum
                for c in range(entries.head_size)
            ]
        results.append(rows)
    return results
