"""TriAttention: cosines of the mean query's and the key's angles, distance by distance."""

from __future__ import annotations

import cmath
import math
from typing import Any

from tests.policies.oracles.heads import Head, Vector


def triattention(
    head: Head, end: int, statistics: list[list[Vector]], params: dict[str, Any]
) -> Vector:
    """Scores of the full blocks' entries, which lie at their positions.

    Args:
        head: the KV head.
        end: tokens that have been read.
        statistics: by query head of the group, real and imaginary means and mean magnitudes.
        params: of the policy.
    """
    rows = []
    for real, imaginary, magnitudes in statistics:
        row = [
            expected_logit(head, position, end, list(map(complex, real, imaginary)), params)
            + spread(head, position, list(map(complex, real, imaginary)), magnitudes)
            for position in range(head.size)
        ]
        if params["normalize"] == "on":
            mean = sum(row) / len(row)
            deviation = math.sqrt(sum((score - mean) ** 2 for score in row) / len(row))
            row = [(score - mean) / max(deviation, 1e-6) for score in row]
        rows.append(row)
    return [max(row[j] for row in rows) for j in range(head.size)]


def expected_logit(
    head: Head, position: int, end: int, mean: list[complex], params: dict[str, Any]
) -> float:
    """The mean over distances of sum_f |q_f| |k_f| cos(w_f (end - position + d) + phi_f)."""
    distances, distance = [], 1
    while distance <= params["max_distance"]:
        distances.append(distance)
        distance *= 2
    total = 0.0
    for distance in distances:
        for f, key in enumerate(unrotated(head, position)):
            angle = frequency(head, f) * (end - position + distance)
            angle += cmath.phase(mean[f] * key.conjugate())
            total += abs(mean[f]) * abs(key) * math.cos(angle)
    return total / len(distances)


def spread(head: Head, position: int, mean: list[complex], magnitudes: Vector) -> float:
    """sum_f (a_f - |q_f|) |k_f|."""
    keys = unrotated(head, position)
    return sum((magnitudes[f] - abs(mean[f])) * abs(key) for f, key in enumerate(keys))


def frequency(head: Head, f: int) -> float:
    """Radians per position; the last pairs do not turn."""
    return head.frequencies[f] if f < len(head.frequencies) else 0.0


def unrotated(head: Head, position: int) -> list[complex]:
    """A key before RoPE: of rotary dims the first half is real, so is that of the others."""
    key, size = head.keys[position], len(head.frequencies)
    rest = len(key) - 2 * size
    real = key[:size] + key[2 * size : 2 * size + rest // 2]
    imaginary = key[size : 2 * size] + key[2 * size + rest // 2 :]
    return [
        complex(a, b) * cmath.exp(-1j * frequency(head, f) * position)
        for f, (a, b) in enumerate(zip(real, imaginary, strict=True))
    ]
