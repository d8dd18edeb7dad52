"""What the engine, its workers and the API server ask of a server's settings."""

from __future__ import annotations

from vllm_kvcompress.config.auto import NO_POLICY, PROFILED_FROM, PROFILED_POLICY
from vllm_kvcompress.config.fields import PROMPTS_PLUGIN, PROTECT_PLUGIN, SettingsFields
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.scheduling.rule import CompressionRule, PolicyDemand
from vllm_kvcompress.scheduling.triggers import Trigger, parse_triggers


class DerivedSettings(SettingsFields):
    """Values that follow from the fields of `Settings`; none of them is stored."""

    @property
    def has_heads(self) -> bool:
        """Whether the server's own policy has measured heads once it serves."""
        return self.measure_heads or self.profile is not None

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that compress requests of this server, its own first."""
        policies = dict.fromkeys((self.policy, *self.request_policies))
        return tuple(policy for policy in policies if policy != NO_POLICY)

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        """Conditions under which requests are compressed."""
        return parse_triggers(self.trigger)

    @property
    def pressure_mark(self) -> float | None:
        """Used part of the pool above which requests are compressed; None: never for that."""
        return next((t.mark for t in self.triggers if t.mark is not None), None)

    @property
    def ceilings(self) -> tuple[int, ...]:
        """The smallest and the largest ceiling that requests have; none: they have no ceiling."""
        return tuple(each for each in (self.min_request_ceiling, self.ceiling) if each is not None)

    @property
    def span_share(self) -> float | None:
        """Part of protected tokens that every head keeps; None: as much as it keeps of all."""
        if self.protect_mode == "fair":
            return None
        return 1.0 if self.keep_prompt is None else self.keep_prompt

    @property
    def read_rule(self) -> ReadRule | None:
        """How much of the cache decode steps read; None: everything."""
        return None if self.read is None else ReadRule.parse(self.read, self.read_min_tokens)

    @property
    def draft_rule(self) -> ReadRule | None:
        """How much of the cache draft steps read; None: nothing is drafted."""
        return None if self.draft is None else ReadRule.parse(self.draft)

    @property
    def plugins(self) -> tuple[str, ...]:
        """The endpoint plugins that the API server needs for them."""
        of_prompts = (PROMPTS_PLUGIN,) if self.prompts is not None else ()
        return of_prompts + ((PROTECT_PLUGIN,) if self.protect else ())

    @property
    def has_own_events(self) -> bool:
        """Whether requests have events that depend on neither budget nor trigger."""
        return self.ceiling is not None or self.after_reasoning is not None

    @property
    def conversations(self) -> str | None:
        """How conversations go on if that was asked for; None: it was not, or asked not to."""
        return None if self.reuse_conversations == "off" else self.reuse_conversations

    @property
    def continues_unasked(self) -> bool:
        """Whether conversations go on compressed without being asked to, where the engine can.

        With measured heads that forgets next to nothing (docs/results/conversations.md).
        """
        has_room = isinstance(self.budget, float) and PROFILED_FROM <= self.budget < 1
        is_measured = self.policy == PROFILED_POLICY and self.trigger == "prompt" and has_room
        return is_measured and self.reuse_conversations is None and self.prompts is None

    @property
    def repeats(self) -> bool:
        """Whether a request may be compressed more than once."""
        later = any(trigger.kind != "prompt" for trigger in self.triggers)
        later = later or self.has_own_events
        return later or self.conversations is not None or self.continues_unasked

    @property
    def compresses_while_generating(self) -> bool:
        """Whether many requests may come near an event at once, one token at a time."""
        by_interval = any(trigger.kind in ("chunk", "decode") for trigger in self.triggers)
        return by_interval or self.has_own_events

    @property
    def compresses(self) -> bool:
        """Whether requests that ask for nothing are compressed."""
        return self.policy != NO_POLICY and (self.budget != 1.0 or self.has_own_events)

    @property
    def may_compress(self) -> bool:
        """Whether any request can be compressed, whatever it asks for."""
        keeps_all = self.budget == 1.0 and self.min_request_budget in (None, 1.0)
        return bool(self.policies) and (self.has_own_events or not keeps_all)

    @property
    def acts(self) -> bool:
        """Whether any request is served otherwise than by stock vLLM."""
        return self.may_compress or self.read is not None or self.draft is not None

    def rule(self, block_size: int, demand: PolicyDemand, split: int = 1) -> CompressionRule:
        """Returns the budget and triggers in tokens and blocks.

        Chunks and ceilings are whole blocks of vLLM's, of `split` blocks each.
        """
        if not self.compresses:
            return CompressionRule(block_size, fraction=1.0, at_prompt_end=False, split=split)
        allocated_size = block_size * split
        intervals = {trigger.kind: trigger.every for trigger in self.triggers}
        if self.budget == 1.0:
            intervals = {}  # only events of other settings compress
        chunk_tokens = intervals.get("chunk")
        if chunk_tokens is not None:
            chunk_tokens = ceil_div(chunk_tokens, allocated_size) * allocated_size
        is_fraction = isinstance(self.budget, float)
        return CompressionRule(
            block_size=block_size,
            fraction=self.budget if is_fraction else None,
            tokens=None if is_fraction else int(self.budget),
            at_prompt_end="prompt" in intervals,
            chunk_tokens=chunk_tokens,
            decode_tokens=intervals.get("decode"),
            pressure_mark=self.pressure_mark,
            min_tokens=self.min_tokens,
            span_share=self.span_share,
            ceiling_blocks=None if self.ceiling is None else self.ceiling // allocated_size,
            after_reasoning=self.after_reasoning,
            split=split,
            leaves_states=self.conversations is not None or self.continues_unasked,
            **vars(demand),
        )
