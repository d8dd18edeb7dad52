"""KV-cache specs: of layers that are compressed, and of others beside them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

from vllm_kvcompress.config import Settings
from vllm_kvcompress.scheduling.read_rule import PromptChunks
from vllm_kvcompress.scheduling.rule import CompressionRule

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class PolicyDemand:
    """What a policy asks of the rule that plans its events.

    Attributes:
        policy: its name.
        window_size: queries that it observes at an event.
        least_blocks: blocks that an event leaves at least.
        window_blocks: blocks for a request's last queries; 0 unless under pressure.
        blocks_on_top: blocks of a policy state that does not count in the budget.
    """

    policy: str
    window_size: int
    least_blocks: int
    window_blocks: int = 0
    blocks_on_top: int = 0


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec(FullAttentionSpec):
    """Full attention whose requests are compressed by `rule`, or by one that they ask for.

    Attributes:
        settings: the server's settings.
        demands: of every policy that requests may be compressed with.
    """

    settings: Settings
    demands: tuple[PolicyDemand, ...]

    @classmethod
    def from_full_attention(
        cls, spec: FullAttentionSpec, settings: Settings, demands: tuple[PolicyDemand, ...]
    ) -> Self:
        """The same layer, compressed."""
        return cls(**_fields(spec), settings=settings, demands=demands)

    def rule_of(self, settings: Settings) -> CompressionRule:
        """When requests with these settings are compressed, for this spec's block size."""
        found = [demand for demand in self.demands if demand.policy == settings.policy]
        demand = found[0] if found else PolicyDemand(settings.policy, 0, 1)
        return settings.rule(
            self.block_size,
            demand.window_size,
            demand.least_blocks,
            demand.window_blocks,
            demand.blocks_on_top,
        )

    @cached_property
    def rule(self) -> CompressionRule:
        """When requests are compressed that ask for nothing."""
        return self.rule_of(self.settings)

    @cached_property
    def rules(self) -> tuple[CompressionRule, ...]:
        """The server's rule, and those of the largest and smallest requests may ask for."""
        settings = self.settings
        bounds = (None, settings.min_request_budget, settings.max_request_budget)
        asked = [
            settings.for_request(policy, budget)
            for policy in dict.fromkeys((settings.policy, *settings.request_policies))
            for budget in dict.fromkeys(bounds)
        ]
        return tuple(dict.fromkeys(map(self.rule_of, asked)))

    @cached_property
    def pressure_mark(self) -> float | None:
        """Used part of the pool from which on requests are compressed for room, if they are."""
        return next((rule.pressure_mark for rule in self.rules if rule.pressure_mark), None)

    @cached_property
    def chunks(self) -> PromptChunks | None:
        """The chunks in which prompts are read in part; None: they are read whole."""
        return PromptChunks.of(self.settings.read_rule, self.block_size)

    def max_prefix_hit(self, num_prompt_tokens: int) -> int:
        """Longest prefix-cache hit that every rule can use, in tokens.

        vLLM looks for hits without saying for which request.
        """
        return min(rule.max_prefix_hit(num_prompt_tokens) for rule in self.rules)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for a group of layers, which must agree in everything."""
        if any(spec != specs[0] for spec in specs[1:]):
            raise AssertionError("all layers of a compressed group must have the same spec")
        return copy.deepcopy(specs[0])

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of this layer's cache for a request of the maximum length.

        Before the pool's size is known vLLM asks whether one such request fits: that is its peak,
        while it is read. Afterwards it asks, for its report, how many requests fit: then it is
        the pool's share of one, of which the others hold only what is left of them.
        """
        max_model_len = vllm_config.model_config.max_model_len
        pool_blocks = vllm_config.cache_config.num_gpu_blocks
        if pool_blocks is None:
            most = max(rule.admission_blocks(max_model_len) for rule in self.rules)
            return most * int(self.page_size_bytes)
        share = pool_blocks / self.rule.concurrency(max_model_len, pool_blocks)
        num_bytes: int = math.ceil(share) * self.page_size_bytes
        return num_bytes


def is_compressible(spec: AttentionSpec) -> bool:
    """Whether a layer's spec is plain full attention."""
    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )


@dataclass(frozen=True, kw_only=True)
class DependentSlidingWindowSpec(SlidingWindowSpec):
    """A sliding window beside compressed layers, of whose attention its values are computed."""


@dataclass(frozen=True, kw_only=True)
class DependentChunkedLocalSpec(ChunkedLocalAttentionSpec):
    """The same of attention within chunks."""


_DEPENDENT = {
    SlidingWindowSpec: DependentSlidingWindowSpec,
    ChunkedLocalAttentionSpec: DependentChunkedLocalSpec,
}


def dependent_on_compressed(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a layer that is not compressed itself, for a model that has compressed ones.

    It says nothing new, and has a block manager of ours. Kinds of attention that never stand
    beside plain full attention stay as they are.
    """
    kind = _DEPENDENT.get(type(spec))
    return spec if kind is None else kind(**_fields(spec))


def _fields(spec: AttentionSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in type(spec).__dataclass_fields__}
