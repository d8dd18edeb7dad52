"""Entries that are kept whatever their score."""

from __future__ import annotations

import math
from typing import Any

from tests.policies.oracles.heads import Head


def protected(head: Head, kept: int, sinks: int, recent: int, share: float) -> set[int]:
    """Protected entries of a head that keeps `kept` full-block entries."""
    if share:
        recent = max(recent, math.floor((kept + head.num_tail) * share))
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
    if base in ("attention", "keyspans"):
        return params["num_sinks"], params["num_recent"], 0.0
    if base == "spans":
        return params["num_sinks"], params["near_size"], 0.0
    if base == "triattention":
        return 0, params["num_recent"], 0.0
    if base == "expected":
        return params["n_sink"], 0, 0.0
    return 0, params["window_size"], 0.0
