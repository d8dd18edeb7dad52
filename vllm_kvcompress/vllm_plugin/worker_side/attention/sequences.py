"""Some requests of a step, or their heads, as sequences of a kernel's own."""

from __future__ import annotations

from typing import Any

import numpy as np

HostNumbers = np.ndarray[Any, np.dtype[np.integer[Any]]]


def sequences(
    starts: HostNumbers, rows: HostNumbers, num_heads: int = 1
) -> tuple[HostNumbers, HostNumbers]:
    """A sequence for each head of each request: where its queries are, and where it begins.

    Args:
        starts: [requests + 1] first token of every request of the step.
        rows: [R] the requests.
        num_heads: of each.

    Returns:
        [T] int64 rows of the step's queries, flattened to one row per token and head; and
        [R * num_heads + 1] int32 first of them of every sequence.
    """
    lengths = np.diff(starts)[rows].repeat(num_heads)
    own_starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=own_starts[1:])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    nth = np.arange(len(sequence)) - own_starts[sequence]
    tokens = starts[rows].repeat(num_heads)[sequence] + nth
    return (tokens * num_heads + sequence % num_heads).astype(np.int64), own_starts
