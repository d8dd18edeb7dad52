"""The last events of a worker, which the status page shows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.compression.stopwatch import Stopwatch
from vllm_kvcompress.scheduling.plan import EventPlan

NUM_EVENTS = 20


@dataclass(frozen=True)
class RecentEvent:
    """One request's event, over all cache groups.

    Attributes:
        finished_at: seconds since 1970.
        block_size: tokens of a block.
        plan: plan of the first cache group.
        stopwatches: one for each group.
        page_counts: [num_heads] int64 of every layer, group after group.
    """

    finished_at: float
    block_size: int
    plan: EventPlan
    stopwatches: Sequence[Stopwatch]
    page_counts: Sequence[Tensor]

    def to_dict(self) -> dict[str, Any]:
        """Returns counts and times as plain numbers; waits for the device.

        Returns:
            `source_tokens` and `kept_tokens` are means over KV heads; `kept_by_head` has the tokens
            of every layer and KV head of this rank; `seconds` is None while a device still works.
        """
        plan, num_groups = self.plan, len(self.stopwatches)
        num_kept = plan.num_kept_blocks
        seconds = [stopwatch.seconds for stopwatch in self.stopwatches]
        return {
            "finished_at": self.finished_at,
            "policy": plan.policy,
            "trigger": plan.trigger,
            "source_tokens": plan.num_source_blocks * self.block_size,
            "kept_tokens": num_kept * self.block_size,
            "blocks_freed": plan.num_freed_blocks * num_groups,
            "blocks_written": len(plan.fresh_block_ids) * num_groups,
            "seconds": None if None in seconds else sum(each or 0.0 for each in seconds),
            "kept_by_head": [(counts * self.block_size).tolist() for counts in self.page_counts],
        }


class RecentEvents:
    """A ring buffer of events; adding one neither copies nor waits."""

    def __init__(self) -> None:
        self._events: deque[RecentEvent] = deque(maxlen=NUM_EVENTS)

    def add(self, parts: Sequence[Event], block_size: int) -> None:
        """Adds one request's event: its parts in all cache groups."""
        self._events.append(
            RecentEvent(
                finished_at=time.time(),
                block_size=block_size,
                plan=parts[0].plan,
                stopwatches=[part.stopwatch for part in parts],
                page_counts=[counts for part in parts for counts in part.page_counts],
            )
        )

    def to_list(self) -> list[dict[str, Any]]:
        """Returns all events, the latest first."""
        return [event.to_dict() for event in reversed(self._events)]
