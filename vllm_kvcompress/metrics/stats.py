"""Statistics of scheduler steps, on their way to /metrics: plain values and lists. No torch.

The engine core fills a `StepStats` per step; as a dictionary it survives pickle, JSON and
msgpack, which is how it reaches the API process (`vllm_plugin/compat/messages.py`), where
`vllm_plugin/api_server/stat_logger.py` hands it to the collectors of `prometheus.py`. A field that
is added to a counter has the counter's name and help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

EVICTED, EXTENDED, UNFINISHED = "evicted", "extended", "unfinished_event"
AFTER_FIRST_TOKEN = "after_first_token"
AT_ONCE_FOR_ROOM, AT_ONCE_FOR_BUFFERS = "at_once_for_room", "at_once_for_buffers"
SHADOW_SCORED, SHADOW_UNCOMPRESSED = "scored", "uncompressed"
SHADOW_DROPPED, SHADOW_FAILED = "dropped", "failed"
SHADOW_OUTCOMES = (SHADOW_SCORED, SHADOW_UNCOMPRESSED, SHADOW_DROPPED, SHADOW_FAILED)
HOST_FULL = "host_full"
FORGOTTEN_BECAUSE = (EVICTED, EXTENDED, UNFINISHED, HOST_FULL)  # why states are forgotten


def counted(name: str, help: str) -> Any:
    """Makes a field that is added to the counter `kvcompress_NAME_total`."""
    return field(default=0, metadata={"counter": (name, help)})


def counters_of(record: type[EventRecord] | type[StepStats]) -> dict[str, tuple[str, str]]:
    """Returns name and help of counters, by the fields that are added to them."""
    return {f.name: f.metadata["counter"] for f in fields(record) if "counter" in f.metadata}


@dataclass
class EventRecord:
    """Compression event of one request.

    Attributes:
        policy: the policy's name, as the user gave it.
        trigger: prompt, chunk, decode, pressure, ceiling, reasoning or prepare.
    """

    policy: str
    trigger: str
    source_tokens: int = counted(
        "source_tokens",
        "Tokens per KV head (mean over heads and layers) that compression events read; the "
        "partial last block of a request takes no part.",
    )
    resident_tokens: int = counted(
        "kept_tokens",
        "Tokens per KV head (mean over heads and layers) that compression events kept, out of "
        "kvcompress_source_tokens_total.",
    )
    blocks_freed: int = counted(
        "blocks_freed",
        "KV cache blocks that compression events handed back to vLLM's allocator.",
    )
    blocks_written: int = counted(
        "blocks_written",
        "Fresh KV cache blocks that compression events allocated and filled with what they kept. "
        "Freed minus written = blocks gained.",
    )


@dataclass
class DurationRecord:
    """Seconds that the first rank spent on one request's event, over all layers."""

    policy: str
    seconds: float


@dataclass
class SkippedRecord:
    """Count of events that a trigger called for and that were left out for one reason."""

    policy: str
    reason: str
    count: int


@dataclass
class ShadowRecord:
    """Answer that was scored again with the full cache.

    Attributes:
        num_tokens: tokens of the answer.
        lost_nats: sum over them of log p_compressed - log p_full.
        num_changed: positions at which the most likely token differs.
    """

    num_tokens: int
    lost_nats: float
    num_changed: int


@dataclass
class StepStats:
    """Events of one scheduler step, and what the running requests hold after it.

    Attributes:
        events: events that ran.
        durations: events whose duration became known; a GPU's become known some steps later.
        skipped: events that were left out.
        forgotten: forgotten states by reason, and requests that ended before their event did.
        prompt_events: events of prompts by when they ran: after the first token, or at once, for a
            reason.
        reclaimable_blocks: blocks that the pressure trigger would gain if it compressed all
            running requests now.
        most_held_tokens: tokens per KV head (mean over heads and layers) that the largest request
            has held after a step, since the start.
        spilled_states, spilled_tokens, spilled_bytes: kept states with a copy in host memory, the
            tokens that they stand for, and the bytes of the copies (`--kv-spill`).
        shadows: answers that were scored again (`--kv-shadow`).
        shadow_outcomes: ends of sampled answers by outcome.
    """

    events: list[EventRecord] = field(default_factory=list)
    durations: list[DurationRecord] = field(default_factory=list)
    skipped: list[SkippedRecord] = field(default_factory=list)
    forgotten: dict[str, int] = field(default_factory=dict)
    prompt_events: dict[str, int] = field(default_factory=dict)
    shadows: list[ShadowRecord] = field(default_factory=list)
    shadow_outcomes: dict[str, int] = field(default_factory=dict)
    reclaimable_blocks: int = 0
    most_held_tokens: int = 0
    spilled_states: int = 0
    spilled_tokens: int = 0
    spilled_bytes: int = 0
    logical_tokens: int = counted(
        "step_logical_tokens",
        "Logical tokens of the running requests, added up over steps.",
    )
    resident_tokens: int = counted(
        "step_resident_tokens",
        "Tokens per KV head (mean over heads and layers) that are resident in the KV cache for the "
        "tokens of kvcompress_step_logical_tokens_total, added up over steps. Logical over "
        "resident = the compression ratio of a period.",
    )
    held_pages: int = counted(
        "held_pages",
        "Pages (blocks of a KV head) per KV head, mean over heads and layers, that decoding "
        "requests held, added up over steps; 0 without --kv-read.",
    )
    read_pages: int = counted(
        "read_pages",
        "Pages (blocks of a KV head) per KV head, out of kvcompress_held_pages_total, that decode "
        "steps read.",
    )
    contexts_reused: int = counted(
        "contexts_reused",
        "Number of requests that began with a context which an earlier request had compressed, "
        "and did not read it again.",
    )
    conversations_continued: int = counted(
        "conversations_continued",
        "Number of requests that continued from the compressed state of an earlier turn of their "
        "conversation (--kv-reuse-conversations).",
    )
    continued_tokens: int = counted(
        "continued_tokens",
        "Tokens of prompts that were neither read nor compressed again, since a conversation was "
        "continued.",
    )
    states_spilled: int = counted(
        "states_spilled",
        "Number of times that a kept state went from the KV cache to host memory (--kv-spill).",
    )
    states_restored: int = counted(
        "states_restored",
        "Number of times that a kept state came back from host memory, for a request that "
        "continued it.",
    )
    shadow_tokens: int = counted(
        "shadow_tokens", "Tokens of the answers that were scored again with the full cache."
    )
    shadow_changed_tokens: int = counted(
        "shadow_changed_tokens",
        "Tokens, out of kvcompress_shadow_tokens_total, at whose position the full cache has "
        "another best candidate.",
    )
    shadow_lost_nats: float = counted(
        "shadow_lost_nats",
        "Log-probability that the full cache takes from the tokens of scored answers, in nats. "
        "Less kvcompress_shadow_gained_nats_total, over kvcompress_shadow_tokens_total = the mean "
        "loss per token.",
    )
    shadow_gained_nats: float = counted(
        "shadow_gained_nats",
        "Log-probability that the full cache adds to the tokens of answers that it finds more "
        "likely, in nats.",
    )

    @property
    def compression_ratio(self) -> float:
        """Logical over resident tokens; 1.0 when nothing runs or nothing was compressed."""
        return self.logical_tokens / self.resident_tokens if self.resident_tokens else 1.0

    def count_forgotten(self, reason: str) -> None:
        """Counts a kept state that is forgotten, or never came about."""
        self.forgotten[reason] = self.forgotten.get(reason, 0) + 1

    def count_prompt_event(self, timing: str) -> None:
        """Counts a prompt's event by when it runs."""
        self.prompt_events[timing] = self.prompt_events.get(timing, 0) + 1

    def count_shadow(self, outcome: str) -> None:
        """Counts a sampled answer by what became of it."""
        self.shadow_outcomes[outcome] = self.shadow_outcomes.get(outcome, 0) + 1

    def add_shadow(self, answer: ShadowRecord) -> None:
        """Adds a scored answer; counters only grow, so losses and gains have one each."""
        self.shadows.append(answer)
        self.shadow_tokens += answer.num_tokens
        self.shadow_changed_tokens += answer.num_changed
        self.shadow_lost_nats += max(0.0, answer.lost_nats)
        self.shadow_gained_nats += max(0.0, -answer.lost_nats)

    def take(self) -> Self:
        """Returns what was counted, and counts anew."""
        taken = replace(self)
        vars(self).update(vars(type(self)()))
        return taken

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain containers, which JSON and msgpack can carry."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Converts back from the result of `to_dict`."""
        kinds = {
            "events": EventRecord,
            "durations": DurationRecord,
            "skipped": SkippedRecord,
            "shadows": ShadowRecord,
        }
        lists = {name: [kind(**each) for each in values[name]] for name, kind in kinds.items()}
        return cls(**{**values, **lists})
