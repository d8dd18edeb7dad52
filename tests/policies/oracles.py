"""Every policy again, as plain Python loops over numbers.

Shares no code with the package: no torch beyond reading the inputs, no vectorisation. A head is a
list of entries in position order; entries of the full blocks come first, then the tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvcompress.policies.base import LayerView

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def norm(a: Vector) -> float:
    return math.sqrt(dot(a, a))


@dataclass
class Head:
    """One KV head of one layer.

    Attributes:
        keys, values: entries of the full blocks.
        tail_keys, tail_values: entries of the partial block.
        queries: by position of the window, the group's query vectors, oldest first.
        weights: by member of the group, W_O rows [D][M].
        scale: softmax scale.
        frequencies: of RoPE, radians per position; dims i and i + r / 2 turn together.
    """

    keys: list[Vector]
    values: list[Vector]
    tail_keys: list[Vector]
    tail_values: list[Vector]
    queries: list[list[Vector]]
    weights: list[list[Vector]]
    scale: float
    frequencies: Vector

    @property
    def size(self) -> int:
        return len(self.keys)

    @property
    def num_tail(self) -> int:
        return len(self.tail_keys)


def heads_of(view: LayerView) -> list[Head]:
    num_heads = view.num_heads
    group = view.queries.shape[1] // num_heads
    heads = []
    for h in range(num_heads):
        size = int(view.lengths[h])
        own = range(h * group, (h + 1) * group)
        assert view.output_weight is not None
        assert view.rotary is not None
        heads.append(
            Head(
                keys=view.kv.keys()[h, :size].double().tolist(),
                values=view.kv.values()[h, :size].double().tolist(),
                tail_keys=view.kv.tail_keys()[h].double().tolist(),
                tail_values=view.kv.tail_values()[h].double().tolist(),
                queries=[[row[q].double().tolist() for q in own] for row in view.queries],
                weights=[view.output_weight[h, :, g].double().tolist() for g in range(group)],
                scale=view.scale,
                frequencies=view.rotary.frequencies.double().tolist(),
            )
        )
    return heads


# --- scores -----------------------------------------------------------------------------------


def mass(head: Head) -> Vector:
    """Mean attention of the window's queries to each entry of the full blocks."""
    everything = head.keys + head.tail_keys
    window = len(head.queries)
    total = [0.0] * head.size
    for i, members in enumerate(head.queries):
        visible = len(everything) - (window - 1 - i)
        if visible <= 0:
            continue
        for query in members:
            logits = [head.scale * dot(query, key) for key in everything[:visible]]
            top = max(logits)
            exps = [math.exp(logit - top) for logit in logits]
            whole = sum(exps)
            for j in range(min(visible, head.size)):
                total[j] += exps[j] / whole
    count = window * len(head.queries[0]) if head.queries else 1
    return [value / count for value in total]


def perturbation(head: Head, variant: str) -> Vector:
    """OBCache: squared change of the window's outputs, summed over queries and group."""
    keys, values = head.keys + head.tail_keys, head.values + head.tail_values
    window, columns = len(head.queries), range(len(values[0]))
    total = [0.0] * head.size
    for i, members in enumerate(head.queries):
        visible = len(keys) - (window - 1 - i)
        if visible <= 0:
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


def keydiff(head: Head, anchor: str, metric: str) -> Vector:
    keys, size = head.keys, head.size
    unit = [[x / norm(k) for x in k] if norm(k) else k for k in keys]
    if anchor == "pairwise":
        return [-sum(dot(a, b) for b in unit) for a in unit]
    columns = range(len(keys[0]))
    if anchor == "mean_normalized":
        centre = [sum(k[c] for k in unit) / size for c in columns]
    elif anchor == "mean_raw":
        centre = [sum(k[c] for k in keys) / size for c in columns]
    else:
        centre = [sorted(k[c] for k in keys)[(size - 1) // 2] for c in columns]
    length = norm(centre)
    if metric == "dot":
        return [-dot(centre, k) for k in keys]
    if metric == "euclidean":
        return [math.dist(centre, k) for k in keys]
    return [-dot(centre, u) / length if length else 0.0 for u in unit]


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


def higher_rank(head: Head, params: dict[str, Any]) -> Vector:
    """Spans: by all queries that are observed, by the last of them, pooled, or by the key."""
    last = replace(head, queries=head.queries[-params["near_size"] :])
    rows = [mass(head), pooled(last, mass(last), params["kernel_size"], "max")]
    bare = replace(head, queries=[])
    rows.append(pooled(bare, leverage(head, params["keys"]), params["key_kernel_size"], "max"))
    return [float(max(rank_of(j, row) for row in rows)) for j in range(head.size)]


def rank_of(j: int, row: Vector) -> int:
    return sum((row[i], i) < (row[j], j) for i in range(len(row)))


def turned(vector: Vector, steps: int, frequencies: Vector) -> Vector:
    """As it would be so many positions later."""
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
        whole = sum(math.exp(logit - top) for logit in logits[sinks:])
        for j in range(sinks, head.size):
            total[j] += math.exp(logits[j] - top) / whole / len(head.weights)
    if not params["use_vnorm"]:
        return total
    return [(s + params["epsilon"]) * norm(v) for s, v in zip(total, head.values, strict=True)]


def scores_of(policy: str, heads: list[Head], params: dict[str, Any]) -> list[Vector]:
    base = policy.split("+")[0]
    if base in ("streamingllm", "duoattention"):
        return [[float(j) for j in range(head.size)] for head in heads]
    if base == "knorm":
        return [[-norm(key) for key in head.keys] for head in heads]
    if base == "keydiff":
        return [keydiff(head, params["anchor"], params["metric"]) for head in heads]
    if "obcache" in policy:
        changes = [perturbation(head, params["variant"]) for head in heads]
        if base == "h2o":
            return changes
        return [
            pooled(head, row, params["kernel_size"], params["pooling"])
            for head, row in zip(heads, changes, strict=True)
        ]
    if base == "spans":
        return [higher_rank(head, params) for head in heads]
    if base == "leverage":
        return [leverage(head, params["keys"]) for head in heads]
    if base == "expected":
        width = max(head.size + head.num_tail for head in heads)
        return [expected(head, width, params) for head in heads]
    masses = [mass(head) for head in heads]
    if base in ("h2o", "d2o", "momentkv", *LINKING):
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


# --- protection -------------------------------------------------------------------------------


def protected(head: Head, kept: int, sinks: int, recent: int, share: float) -> set[int]:
    """The entries of a head that stay, when `kept` of its full-block entries do."""
    if share:
        recent = math.floor((kept + head.num_tail) * share)
    wanted = recent > 0 or share > 0
    recent = max(0, recent - head.num_tail)  # the tail is recent and stays anyway
    if sinks + recent > kept:
        least = 1 if wanted and not head.num_tail else 0
        recent = min(recent, max(least, kept - sinks), kept)
        sinks = min(sinks, kept - recent)
    return {j for j in range(head.size) if j < sinks or j >= head.size - recent}


def protection_of(policy: str, params: dict[str, Any]) -> tuple[int, int, float]:
    base = policy.split("+")[0]
    if base == "streamingllm":
        return params["num_sinks"], 0, 0.0
    if base == "duoattention":
        return params["sinks"], 0, 0.0
    if base in ("knorm", "tova", "leverage"):
        return 0, 0, 0.0
    if base == "keydiff":
        return 0, 0, params["recent_fraction"] if "window" in policy else 0.0
    if base == "h2o":
        return 0, 0, params["recent_fraction"]
    if base == "d2o":
        return params["num_sinks"], 0, params["recent_fraction"]
    if base == "kvmerger":
        return 0, 0, params["recent_fraction"]
    if base in ("asymkv", "kvslimmer"):
        return params["num_sinks"], 0, 0.0
    if base == "momentkv":
        return params["num_sinks"], params["window_size"], 0.0
    if base == "spans":
        return params["num_sinks"], params["near_size"], 0.0
    if base == "expected":
        return params["n_sink"], 0, 0.0
    return 0, params["window_size"], 0.0


# --- allocation -------------------------------------------------------------------------------


def divide(shares: Vector, total: int, floors: list[int], caps: list[int]) -> list[int]:
    """min(max(m * share, floor), cap) with m found by bisection, then largest remainders."""
    whole = sum(shares)
    weights = [s / whole + 1e-9 if whole else 1.0 for s in shares]

    def ideal(multiple: float) -> Vector:
        return [
            min(max(multiple * w, lo), hi) for w, lo, hi in zip(weights, floors, caps, strict=True)
        ]

    low, high = 0.0, 1e15
    for _ in range(300):
        middle = (low + high) / 2
        if sum(ideal(middle)) < total:
            low = middle
        else:
            high = middle
    exact = ideal(high)
    pages = [math.floor(x + 1e-6) for x in exact]
    while sum(pages) < total:
        best = None
        for h in range(len(pages)):
            rest = round((exact[h] - pages[h]) * 1e6)
            if pages[h] < caps[h] and (best is None or rest > best[0]):
                best = (rest, h)
        assert best is not None
        pages[best[1]] += 1
        exact[best[1]] -= 1e9  # once each
    return pages


def ada_shares(
    heads: list[Head],
    scores: list[Vector],
    total_tokens: int,
    protection: tuple[int, int, float],
    params: dict[str, Any],
) -> Vector:
    count = len(heads)
    fixed = [protected(head, min(head.size, total_tokens // count), *protection) for head in heads]
    selectable = total_tokens - sum(map(len, fixed))
    mean = selectable / count
    if params.get("normalize") == "on":
        scores = [
            weighed_by_share(head, row, stay, math.floor(mean))
            for head, row, stay in zip(heads, scores, fixed, strict=True)
        ]
    ranked = [
        sorted(
            (j for j in range(head.size) if j not in fixed[h]),
            key=lambda j, h=h: (scores[h][j], j),
            reverse=True,
        )
        for h, head in enumerate(heads)
    ]
    phi, won = params["safeguard"], [0] * count
    if params["safeguard_mode"] == "floor":
        won = [min(math.floor(phi * mean), len(order)) for order in ranked]
    rest = [(scores[h][j], h, j) for h, order in enumerate(ranked) for j in order[won[h] :]]
    for _, h, _ in sorted(rest, reverse=True)[: selectable - sum(won)]:
        won[h] += 1
    if params["safeguard_mode"] == "blend":
        return [(1 - phi) * w + phi * mean + len(f) for w, f in zip(won, fixed, strict=True)]
    return [float(w + len(f)) for w, f in zip(won, fixed, strict=True)]


def weighed_by_share(head: Head, row: Vector, stay: set[int], count: int) -> Vector:
    """A head's scores times what the best of those that compete have of their sum."""
    open_scores = sorted((row[j] for j in range(head.size) if j not in stay), reverse=True)
    share = sum(open_scores[:count]) / sum(open_scores) if any(open_scores) else 0.0
    return [share * score for score in row]


def duo_pages(gates: Vector, few: int, caps: list[int], total: int) -> list[int]:
    """A few pages for everyone, then heads by gate up to everything."""
    few = min(few, total // len(caps))
    pages = [min(few, cap) for cap in caps]
    order = sorted(range(len(caps)), key=lambda h: (-gates[h], h))
    for h in order:
        while pages[h] < caps[h] and sum(pages) < total:
            pages[h] += 1
    return pages


def headkv_shares(
    table: list[Vector], layer: int, total: int, beta: float, window_pages: float
) -> Vector:
    """b = window + s * pool + c - c / beta, c such that the layer's heads sum to its total."""
    num_heads, num_all = len(table[layer]), len(table) * len(table[layer])
    window_pages = min(window_pages, total / num_heads)

    def shares(c: float) -> Vector:
        pool = c / beta * num_all
        return [window_pages + score * pool + c - c / beta for score in table[layer]]

    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < total else (low, middle)
    return shares(high)


# --- links ------------------------------------------------------------------------------------

LINKING = ("kvmerger", "asymkv", "kvslimmer")


def lone_ends(head: Head, room: int, params: dict[str, Any]) -> tuple[int, int]:
    """How many first and last entries are never linked; the last ones shrink first."""
    wanted = params["num_recent"] if params["num_recent"] >= 0 else params["window_size"]
    recent = 0
    while recent + head.num_tail < wanted and recent + params["num_sinks"] < room:
        recent += 1
    if wanted and not head.num_tail and not recent and wanted > 0 and room:
        recent = 1  # the very last token stays what it is
    sinks = 0
    while sinks < params["num_sinks"] and sinks + recent < room:
        sinks += 1
    return sinks, min(recent, max(0, room + 1 - sinks) // 2)


def similar_neighbours(head: Head, free: set[int], max_set: int) -> tuple[list[int], Vector]:
    """Entries that may join the one before, the weakest of every half set left out; cosines."""
    score, half = [0.0] * head.size, (max_set + 1) // 2
    for j in range(1, head.size):
        a, b = head.keys[j], head.keys[j - 1]
        score[j] = dot(a, b) / (norm(a) * norm(b))
    able = {j for j in free if j - 1 in free}
    for start in range(0, head.size, half):
        window = range(start, start + half)
        if all(j in able for j in window):
            able.remove(min(window, key=lambda j: score[j]))
    return sorted(able), score


def mergeable(head: Head, masses: Vector, kept: int, params: dict[str, Any]) -> int:
    """Entries that would be left if all similar neighbours were merged."""
    stay = protected(head, kept, 0, 0, params["recent_fraction"])
    open_entries = [j for j in range(head.size) if j not in stay]
    heavy = best(open_entries, masses, math.floor(params["heavy_fraction"] * kept))
    able, score = similar_neighbours(head, set(open_entries) - set(heavy), params["max_set"])
    return head.size - sum(score[j] > params["threshold"] for j in able)


def links(
    policy: str, head: Head, masses: Vector, kept: int, stay: set[int], params: dict[str, Any]
) -> set[int]:
    """Entries that join the one before them; every entry stands for one token."""
    if policy == "kvmerger":
        open_entries = [j for j in range(head.size) if j not in stay]
        heavy = best(open_entries, masses, math.floor(params["heavy_fraction"] * kept))
        free = set(open_entries) - set(heavy)
        able, score = similar_neighbours(head, free, params["max_set"])
        if params["budget_mode"] == "threshold":
            able = [j for j in able if score[j] > params["threshold"]]
    else:
        sinks, recent = lone_ends(head, kept - 1, params)
        able = list(range(sinks + 1, head.size - recent))
        score = [-math.inf] * head.size
        for j in able:
            pair = 2 * (masses[j] + masses[j - 1])
            # i counts the pair's first entry, behind the sinks.
            score[j] = -math.log(pair) + (j - sinks) * math.log(512) / 4096 if pair else math.inf
    return set(best(able, score, head.size - kept))


# --- selection --------------------------------------------------------------------------------


def best(candidates: list[int], score: Vector, count: int) -> list[int]:
    """The `count` highest; of equals, the later."""
    return sorted(candidates, key=lambda j: (score[j], j), reverse=True)[:count]


def select(
    head: Head, score: Vector, kept: int, stay: set[int], critical: dict[str, Any] | None
) -> list[int]:
    candidates = [j for j in range(head.size) if j not in stay]
    budget = kept - len(stay)
    if critical is None:
        return sorted([*stay, *best(candidates, score, budget)])
    first = best(candidates, score, math.floor(critical["alpha"] * budget))
    weighted = weighted_scores(head, score, critical)
    others = [j for j in candidates if j not in first]
    if critical["guard"] == "on":
        unsure = mass(head)
        if sum(unsure[j] for j in others) >= 0.5:
            weighted = score
    second = best(others, weighted, budget - len(first))
    return sorted([*stay, *first, *second])


def weighted_scores(head: Head, score: Vector, critical: dict[str, Any]) -> Vector:
    """CriticalKV's second stage; exact weights after snapkv's scores."""
    epsilon = critical["epsilon"]
    if critical["weights"] == "product":
        nu = value_norms(head, critical["norm"])
        return [(s + epsilon) * v for s, v in zip(score, nu, strict=True)]
    total, group = [0.0] * head.size, len(head.weights)
    for g in range(group):
        alone = replace(head, queries=[[row[g]] for row in head.queries], weights=[head.weights[g]])
        own = pooled(alone, mass(alone), critical["kernel_size"], critical["pooling"])
        for j, nu_j in enumerate(value_norms(alone, critical["norm"])):
            total[j] += (own[j] + epsilon) * nu_j / group
    return total


def compress(
    policy: str, view: LayerView, total: int, params: dict[str, Any], profile: Any = None
) -> tuple[list[int], list[list[int]]]:
    """Pages per head, and kept entries per head in position order.

    Args:
        policy: the policy string.
        view: the layer.
        total: pages of the layer.
        params: every parameter of the policy (for duoattention also `sinks` and `few`).
        profile: table of the layer's and other heads' values by layer and KV head.
    """
    heads, size = heads_of(view), view.block_size
    base = policy.split("+")[0]
    scores = scores_of(policy, heads, params)
    sinks, recent, share = protection_of(policy, params)
    caps = [head.size // size for head in heads]
    need = math.ceil((sinks + max(0, recent - view.num_tail)) / size)
    floor = min(max(1, need), total // len(heads))
    floors = [min(floor, cap) for cap in caps]
    if base == "duoattention":
        counts = duo_pages(profile[view.layer], params["few"], caps, total)
    elif "adakv" in policy.split("+") or base == "momentkv":
        shares = ada_shares(heads, scores, total * size, (sinks, recent, share), params)
        counts = divide(shares, total, floors, caps)
    elif params.get("sizes") == "heads":
        mean = total * size // len(heads)
        left = [
            float(mergeable(head, row, min(head.size, mean), params))
            for head, row in zip(heads, scores, strict=True)
        ]
        counts = divide(left, total, floors, caps)
    elif base == "headkv":
        window = params["window_size"] / size
        shares = headkv_shares(profile, view.layer, total, params["beta"], window)
        counts = divide(shares, total, floors, caps)
    else:
        counts = divide([1.0] * len(heads), total, floors, caps)
    critical = params if "criticalkv" in policy else None
    if base == "momentkv":
        # Nothing was evicted before: the residual is the value itself.
        scores = [
            chunk_means(
                [s * norm(v) for s, v in zip(row, head.values, strict=True)], params["chunk_size"]
            )
            for head, row in zip(heads, scores, strict=True)
        ]
    kept = []
    for head, score, count in zip(heads, scores, counts, strict=True):
        stay = protected(head, count * size, sinks, recent, share)
        if base in LINKING:
            joined = links(base, head, score, count * size, stay, params)
            first = [j for j in range(head.size) if j not in joined and j not in stay]
            num_open = count * size - len(stay)
            kept.append(sorted([*stay, *best(first, score, num_open)]))
            continue
        kept.append(select(head, score, count * size, stay, critical))
    return counts, kept
