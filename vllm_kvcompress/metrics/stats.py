"""Statistics of scheduler steps, on their way to /metrics: plain values and lists. No torch.

The engine core fills a `StepStats` per step; as a dictionary it survives pickle, JSON and
msgpack, which is how it reaches the API process (`vllm_plugin/startup/compat.py`), where
`vllm_plugin/api_server/stat_logger.py` hands it to the collectors of `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

EVICTED, EXTENDED, UNFINISHED = "evicted", "extended", "unfinished_event"
FORGOTTEN_BECAUSE = (EVICTED, EXTENDED, UNFINISHED)  # reasons why kept states are forgotten


@dataclass
class EventRecord:
    """Compression event of one request.

    Attributes:
        policy: the policy's name, as the user gave it.
        trigger: prompt, chunk, decode, pressure or prepare.
        source_tokens: tokens per head that the event read (mean over heads and layers).
        resident_tokens: tokens per head that it kept (mean over heads and layers).
        blocks_freed: KV-cache blocks handed back to vLLM's allocator.
        blocks_written: fresh blocks that took the kept tokens.
    """

    policy: str
    trigger: str
    source_tokens: int
    resident_tokens: int
    blocks_freed: int
    blocks_written: int


@dataclass
class DurationRecord:
    """Duration of one request's compression event.

    Attributes:
        policy: the policy's name, as the user gave it.
        seconds: time that the first rank spent on the event, over all layers.
    """

    policy: str
    seconds: float


@dataclass
class SkippedRecord:
    """Count of events that a trigger called for and that were left out.

    Attributes:
        policy: the policy's name, as the user gave it.
        reason: reason why they were left out.
        count: number of events.
    """

    policy: str
    reason: str
    count: int


@dataclass
class StepStats:
    """Events of one scheduler step, and what the running requests hold after it.

    Attributes:
        events: events that ran.
        durations: events whose duration became known; a GPU's become known some steps later.
        skipped: events that were left out.
        logical_tokens: computed tokens of the running requests.
        resident_tokens: tokens per head of these that are still in the cache.
        contexts_reused: requests that began with a context compressed before.
        conversations_continued: requests that continued from the state of an earlier turn.
        continued_tokens: tokens that those requests neither read nor compressed again.
        forgotten: forgotten states by reason, and requests that ended before their event did.
        reclaimable_blocks: blocks that the pressure trigger would gain if it compressed all
            running requests now.
        held_pages: pages per head of decoding requests that read a part.
        read_pages: pages per head that their decode steps read.
    """

    events: list[EventRecord] = field(default_factory=list)
    durations: list[DurationRecord] = field(default_factory=list)
    skipped: list[SkippedRecord] = field(default_factory=list)
    logical_tokens: int = 0
    resident_tokens: int = 0
    contexts_reused: int = 0
    conversations_continued: int = 0
    continued_tokens: int = 0
    forgotten: dict[str, int] = field(default_factory=dict)
    reclaimable_blocks: int = 0
    held_pages: int = 0
    read_pages: int = 0

    @property
    def compression_ratio(self) -> float:
        """Logical over resident tokens; 1.0 when nothing runs or nothing was compressed."""
        return self.logical_tokens / self.resident_tokens if self.resident_tokens else 1.0

    def count_forgotten(self, reason: str) -> None:
        """Counts a kept state that is forgotten, or never came about."""
        self.forgotten[reason] = self.forgotten.get(reason, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain containers, which JSON and msgpack can carry."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Converts back from the result of `to_dict`."""
        events = [EventRecord(**event) for event in values["events"]]
        durations = [DurationRecord(**record) for record in values["durations"]]
        skipped = [SkippedRecord(**record) for record in values["skipped"]]
        lists = {"events": events, "durations": durations, "skipped": skipped}
        return cls(**{**values, **lists})
