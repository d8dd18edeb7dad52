"""Turns requests of a step, or their heads, into sequences for a kernel."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from vllm_kvcompress.attention.batch import HostNumbers

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def sequences(
    starts: HostNumbers, rows: HostNumbers, num_heads: int = 1
) -> tuple[Rows, HostNumbers]:
    """Returns the query rows of every sequence, and where each sequence begins among them.

    Args:
        starts: [requests + 1] first token of every request of the step.
        rows: [R] the requests.
        num_heads: sequences per request.

    Returns:
        [T] int64 rows of the step's queries, flattened to one row per token and head; and
        [R * num_heads + 1] int32 index of every sequence's first row in them.
    """
    lengths = np.diff(starts)[rows].repeat(num_heads)
    own_starts: HostNumbers = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=own_starts[1:])
    sequence: HostNumbers = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(sequence)) - own_starts[sequence]
    tokens = starts[rows].repeat(num_heads)[sequence] + offsets
    return (tokens * num_heads + sequence % num_heads).astype(np.int64), own_starts
