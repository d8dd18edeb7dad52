"""Records what a worker's events keep; sent to workers through `LLM.collective_rpc`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.compression.recent_events import RecentEvents


class RecordedEvents(RecentEvents):
    """Holds every event, with what `recorded_events` needs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[Sequence[Event], int]] = []

    def add(self, parts: Sequence[Event], block_size: int) -> None:
        """Adds one request's event: its parts in all cache groups."""
        super().add(parts, block_size)
        self.all.append((parts, block_size))


def record_events(worker: Any) -> None:
    """Begins a new record of our worker's events."""
    worker.compression.recent_events = RecordedEvents()


def recorded_events(worker: Any) -> list[dict[str, Any]]:
    """Returns the events since `record_events`, as plain numbers.

    `kept_tokens` has the tokens of every layer and KV head, cache group after cache group.
    """
    return [
        {
            "request_id": parts[0].plan.request_id,
            "position": parts[0].plan.position,
            "compressed_tokens": parts[0].plan.end_block * size,
            "kept_tokens": [
                (counts * size).tolist() for part in parts for counts in part.page_counts
            ],
            # As tokens per head.
            "policy_state_tokens": fmean(
                fmean(part.state_pages) * size / len(part.page_counts[0]) for part in parts
            ),
        }
        for parts, size in worker.compression.recent_events.all
    ]
