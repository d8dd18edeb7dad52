"""Every policy again, as plain Python loops over numbers: a file per stage.

Shares no code with the package: no torch beyond reading the inputs, no vectorisation. A head is a
list of entries in position order; entries of the full blocks come first, then the tail.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tests.policies.oracles.attention import chunk_means, mass, pooled, value_norms
from tests.policies.oracles.budgets import ada_shares, divide, duo_pages, headkv_shares
from tests.policies.oracles.heads import Head, dot, heads_of, norm
from tests.policies.oracles.keys import keydiff
from tests.policies.oracles.links import LINKING, links, mergeable, pair_rounds
from tests.policies.oracles.protection import protected, protection_of
from tests.policies.oracles.redundancy import rkv
from tests.policies.oracles.scores import scores_of
from tests.policies.oracles.selection import best, select
from vllm_kvcompress.policies.base import LayerView

__all__ = [
    "Head",
    "best",
    "compress",
    "divide",
    "dot",
    "heads_of",
    "keydiff",
    "mass",
    "norm",
    "pair_rounds",
    "pooled",
    "protected",
    "rkv",
    "value_norms",
]


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
    elif "headkv" in policy.split("+"):
        even, num_all = params["even_share"], len(profile) * len(heads)
        shares = [even + (1 - even) * score * num_all for score in profile[view.layer]]
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
    if base == "keyspans":
        attended = [
            mass(replace(head, queries=head.queries[-params["near_size"] :])) for head in heads
        ]
        has_room = [
            count * size >= params["min_kept"] * head.size
            for head, count in zip(heads, counts, strict=True)
        ]
        scores = [
            score if room else row
            for score, row, room in zip(scores, attended, has_room, strict=True)
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
