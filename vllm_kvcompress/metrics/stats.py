"""What a scheduler step did, on its way to /metrics: ints, floats, texts and lists. No torch.

The engine core fills a `StepStats` per step; as a dictionary it survives pickle, JSON and
msgpack, which is how it reaches the API process (`vllm_plugin/startup/compat.py`), where
`vllm_plugin/api_server/stat_logger.py` hands it to the collectors of `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

EVICTED, EXTENDED, UNFINISHED = "evicted", "extended", "unfinished_event"
FORGOTTEN_BECAUSE = (EVICTED, EXTENDED, UNFINISHED)  # what was kept of a conversation


@dataclass
class EventRecord:
    """One compression event of one request.

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
    """How long one compression event of one request took.

    Attributes:
        policy: the policy's name, as the user gave it.
        seconds: time that the first rank spent on the event, over all layers.
    """

    policy: str
    seconds: float


@dataclass
class SkippedRecord:
    """Events that a trigger called for but that were left out.

    Attributes:
        policy: the policy's name, as the user gave it.
        reason: why.
        count: how many.
    """

    policy: str
    reason: str
    count: int


@dataclass
class StepStats:
    """What one scheduler step did, and what the running requests hold after it.

    Attributes:
        events: the events that ran.
        durations: of events whose duration became known; a GPU's are known some steps later.
        skipped: events that were left out.
        logical_tokens: computed tokens of the running requests.
        resident_tokens: of those, tokens per head that are still in the cache.
        contexts_reused: requests that began with a context which was compressed before.
        conversations_continued: requests that went on from what an earlier turn had left.
        continued_tokens: that these neither read nor compressed again.
        forgotten: kept states that are no more, by reason.
        reclaimable_blocks: blocks that the pressure trigger would gain from the running requests,
            if all of them were compressed now.
        held_pages: pages per head of the decoding requests, where these read a part.
        read_pages: of those, pages per head that a decode step reads.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain containers only: safe for JSON and msgpack."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`."""
        events = [EventRecord(**event) for event in values["events"]]
        durations = [DurationRecord(**record) for record in values["durations"]]
        skipped = [SkippedRecord(**record) for record in values["skipped"]]
        lists = {"events": events, "durations": durations, "skipped": skipped}
        return cls(**{**values, **lists})
