"""Entries that merge with the one before."""

from __future__ import annotations

import math
from typing import Any

from tests.policies.oracles.heads import Head, Vector, dot, norm
from tests.policies.oracles.protection import protected
from tests.policies.oracles.selection import best

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
    """Number of entries left if all similar neighbours were merged."""
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
        return set(best(able, score, head.size - kept))
    ends = lone_ends(head, kept - 1, params)
    rounds = pair_rounds(masses, [1] * head.size, kept, ends)
    return {second for pairs in rounds for _, second in pairs}


def pair_rounds(
    masses: Vector, tokens: list[int], kept: int, ends: tuple[int, int]
) -> list[list[tuple[int, int]]]:
    """Pairs that merge in each round, as places of the first entries of both groups.

    Args:
        masses, tokens: of every entry.
        kept: entries to leave.
        ends: first and last entries that never merge.
    """
    places, masses, tokens = list(range(len(masses))), list(masses), list(tokens)
    rounds = []
    while len(places) > kept:
        links = range(ends[0] + 1, len(places) - ends[1])
        weight = {}
        for j in links:  # i counts the pair's first entry, behind the sinks
            pair = (masses[j] + masses[j - 1]) * (tokens[j] + tokens[j - 1])
            log = math.log(pair) if pair else -math.inf
            weight[j] = log - (j - ends[0]) * math.log(512) / 4096
        most = min(len(places) - kept, (len(links) + 2) // 3)
        taken: set[int] = set()
        for j in sorted(links, key=lambda j: (weight[j], -j)):
            if len(taken) < most and not taken & {j - 1, j + 1}:
                taken.add(j)
        rounds.append([(places[j - 1], places[j]) for j in sorted(taken)])
        for j in sorted(taken, reverse=True):
            masses[j - 1] += masses.pop(j)
            tokens[j - 1] += tokens.pop(j)
            del places[j]
    return rounds
