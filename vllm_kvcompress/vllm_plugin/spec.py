"""KV-cache specs of compressed layers, and of layers beside them in the same model."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError, UnsupportedError
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.read_rule import PromptChunks
from vllm_kvcompress.scheduling.rule import CompressionRule, PolicyDemand

MIN_BUFFERS = 8  # ring buffers for last queries
PART_SIZES = (16, 64)  # fewest and most tokens of a part, where vLLM's blocks are divided
MAX_DRAFT_BLOCK = 256  # tokens; prefix hits end at such blocks
PAGE_PADDING = 64  # bytes


@dataclass(frozen=True, kw_only=True)
class CompressedAttentionSpec(FullAttentionSpec):
    """Full attention whose requests are compressed by the server's rule or one that they choose.

    Attributes:
        settings: the server's settings.
        demands: needs of every policy that requests may choose, each with its name.
        part_size: tokens of a part, where blocks are divided for attention kernels; 0: they are
            not.
    """

    settings: Settings
    demands: tuple[tuple[str, PolicyDemand], ...]
    part_size: int = 0

    @classmethod
    def from_full_attention(
        cls,
        spec: FullAttentionSpec,
        settings: Settings,
        demands: tuple[tuple[str, PolicyDemand], ...],
        part_size: int = 0,
    ) -> Self:
        """Makes the spec of a full-attention layer that is compressed.

        What only an MLA layer's spec says is dropped: it has one KV head and no room for values.
        """
        fields = {name: getattr(spec, name) for name in FullAttentionSpec.__dataclass_fields__}
        return cls(**fields, settings=settings, demands=demands, part_size=part_size)

    @property
    def kernel_block_size(self) -> int:
        """Tokens of what attention kernels see as a block, and of a page."""
        return self.part_size or int(self.block_size)

    @property
    def split(self) -> int:
        """Number of blocks of attention kernels in a block of vLLM's."""
        split: int = self.block_size // self.kernel_block_size
        return split

    @cached_property
    def of_kernels(self) -> Self:
        """The same with attention kernels' blocks as blocks."""
        of_kernels: Self = self.copy_with_new_block_size(self.kernel_block_size)
        return self if self.split == 1 else of_kernels

    def demand_of(self, policy: str) -> PolicyDemand:
        """Returns the needs of a policy."""
        return dict(self.demands).get(policy, PolicyDemand())

    def rule_of(self, settings: Settings) -> CompressionRule:
        """Returns the rule for requests with these settings, at this spec's block sizes."""
        demand = self.demand_of(settings.policy)
        return settings.rule(self.kernel_block_size, demand, self.split)

    @cached_property
    def rule(self) -> CompressionRule:
        """The server's rule, for requests that choose nothing."""
        return self.rule_of(self.settings)

    @cached_property
    def rules(self) -> tuple[CompressionRule, ...]:
        """The server's rules, and those of the largest and smallest numbers to choose from."""
        settings = self.settings
        bounds = (None, settings.min_request_budget, settings.max_request_budget)
        asked = [
            settings.for_request(
                RequestOptions(policy=policy, budget=budget, ceiling=ceiling), num_tokens
            )
            for policy in dict.fromkeys((settings.policy, *settings.request_policies))
            for budget in dict.fromkeys(bounds)
            for ceiling in dict.fromkeys((None, settings.min_request_ceiling))
            for num_tokens in (0, *settings.longer_budgets)
        ]
        return tuple(dict.fromkeys(map(self.rule_of, asked)))

    @cached_property
    def pressure_mark(self) -> float | None:
        """Used share of the pool from which on requests are compressed; None: no such trigger."""
        return next((rule.pressure_mark for rule in self.rules if rule.pressure_mark), None)

    @cached_property
    def chunks(self) -> PromptChunks | None:
        """Chunks of prompts whose queries read a part of the cache; None: they read all of it."""
        return PromptChunks.of(self.settings.read_rule, self.kernel_block_size)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Returns the spec of a group of layers, whose specs must be equal."""
        if any(spec != specs[0] for spec in specs[1:]):
            raise AssertionError("all layers of a compressed group must have the same spec")
        return copy.deepcopy(specs[0])

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Returns bytes of this layer's cache for a request of the maximum length.

        Before the pool's size is known vLLM asks whether one such request fits: the answer is its
        peak, during prefill. Later vLLM asks, for its report, how many requests fit: the answer is
        one request's share of a pool in which all others are compressed already.
        """
        max_model_len = vllm_config.model_config.max_model_len
        pool_blocks = vllm_config.cache_config.num_gpu_blocks
        if pool_blocks is None:
            peak = max(rule.admission_blocks(max_model_len) for rule in self.rules)
            return peak * int(self.page_size_bytes)
        share = pool_blocks / self.rule.concurrency(max_model_len, pool_blocks)
        num_bytes: int = math.ceil(share) * self.page_size_bytes
        return num_bytes


@dataclass(frozen=True)
class QueryBuffers:
    """Ring buffers for last queries that a GPU allocates before its memory is measured.

    Attributes:
        number: ring buffers; elsewhere more follow when they are needed.
        for_prompt_events: how many of them may wait for their prompt's first token. The others are
            for prompts that the next step goes on to read.
    """

    number: int
    for_prompt_events: int

    @classmethod
    def of(cls, vllm_config: VllmConfig, settings: Settings) -> Self:
        """Counts them: one per request that may need one, or eight and more during prefill.

        During prefill few requests need one from one step to the next, unless vLLM prefills many
        at once.
        """
        config = vllm_config.scheduler_config
        if settings.compresses_while_generating:
            return cls(config.max_num_seqs, config.max_num_seqs)
        max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        num_prefills = ceil_div(config.max_num_batched_tokens, max_chunk)
        number = min(config.max_num_seqs, max(MIN_BUFFERS, 2 * num_prefills))
        return cls(number, max(0, number - num_prefills))


def part_size(block_size: int, supported: Sequence[int | MultipleOf]) -> int:
    """Returns the tokens of the parts into which a long block is divided; 0: it is not.

    It is the largest divisor within `PART_SIZES` that attention kernels take as a block size.

    Args:
        block_size: tokens of a block.
        supported: block sizes that they support, as a backend of vLLM's names them.
    """
    fewest, most = PART_SIZES
    if block_size <= most:
        return 0
    for size in range(most, fewest - 1, -1):
        fits = any(
            size % each.base == 0 if isinstance(each, MultipleOf) else size == each
            for each in supported
        )
        if fits and block_size % size == 0:
            return size
    return 0


def page_bytes_of(spec: AttentionSpec) -> int:
    """Returns bytes of one head's K and V for a block's tokens, scales beside them included."""
    num_bytes: int = spec.real_page_size_bytes // spec.num_kv_heads
    return num_bytes


def spilled_block_bytes(vllm_config: VllmConfig, spec: AttentionSpec) -> int:
    """Returns bytes of a block over all layers and ranks, where all layers have this spec."""
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    num_bytes: int = page_bytes_of(spec) * spec.num_kv_heads * num_layers * num_ranks
    return num_bytes


def spill_slots(vllm_config: VllmConfig, spec: CompressedAttentionSpec) -> int:
    """Returns how many blocks the engine's host memory holds, on every rank its own part of them.

    Raises:
        ConfigError: it does not even hold one.
    """
    spill, num_bytes = spec.settings.spill or 0.0, spilled_block_bytes(vllm_config, spec)
    num_slots = int(spill * 2**30) // num_bytes
    if num_slots == 0:
        raise ConfigError(
            f"spill (--kv-spill): expected room for a block, {num_bytes / 2**30:.3g} GiB, found "
            f"{spill:g}; give more."
        )
    return num_slots


def compressed_specs(spec: KVCacheSpec) -> list[CompressedAttentionSpec]:
    """Returns the different specs of a cache group's compressed layers: none, or usually one.

    vLLM wraps those of a group's layers where layers of the model have pages of several sizes.
    """
    layers = [spec]
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = list(spec.kv_cache_specs.values())
    compressed = [each for each in layers if isinstance(each, CompressedAttentionSpec)]
    return [each for number, each in enumerate(compressed) if each not in compressed[:number]]


def has_full_attention(spec: KVCacheSpec) -> bool:
    """Whether a cache group has layers that keep every token, compressed or not."""
    layers = [spec]
    if isinstance(spec, UniformTypeKVCacheSpecs):
        layers = list(spec.kv_cache_specs.values())
    return any(isinstance(each, FullAttentionSpec) for each in layers)


def unwrap_equal_specs(groups: list[KVCacheGroupSpec]) -> None:
    """Replaces each cache group's wrapped specs by one of them where all are equal.

    vLLM wraps them where layers of the model have pages of several sizes, and then looks for the
    specs of layers that read other layers' caches, which have none.
    """
    for group in groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            first, *others = group.kv_cache_spec.kv_cache_specs.values()
            if all(each == first for each in others):
                group.kv_cache_spec = first


def is_compressible(spec: AttentionSpec) -> bool:
    """Whether a layer's spec is plain full attention, over latent rows (MLA) or not."""
    return (
        type(spec) in (FullAttentionSpec, MLAAttentionSpec)
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )


@dataclass(frozen=True, kw_only=True)
class DependentSlidingWindowSpec(SlidingWindowSpec):
    """Sliding-window attention in a model with compressed layers."""


@dataclass(frozen=True, kw_only=True)
class DependentChunkedLocalSpec(ChunkedLocalAttentionSpec):
    """Chunked local attention in a model with compressed layers."""


@dataclass(frozen=True, kw_only=True)
class DependentMambaSpec(MambaSpec):
    """States of a Mamba or linear-attention layer in a model with compressed layers."""


_DEPENDENT: dict[type[KVCacheSpec], type[KVCacheSpec]] = {
    SlidingWindowSpec: DependentSlidingWindowSpec,
    ChunkedLocalAttentionSpec: DependentChunkedLocalSpec,
    MambaSpec: DependentMambaSpec,
}


def dependent_on_compressed(spec: KVCacheSpec) -> KVCacheSpec:
    """Returns the spec of an uncompressed layer in a model that has compressed ones.

    It equals vLLM's, but selects a block manager of ours, since hidden states behind compressed
    layers depend on events. Kinds of attention that no model combines with full attention are
    returned unchanged.
    """
    kind = _DEPENDENT.get(type(spec))
    return spec if kind is None else kind(**_fields(spec))


def _fields(spec: KVCacheSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in type(spec).__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class DraftAttentionSpec(FullAttentionSpec):
    """Full attention of a draft model's layer, which is never compressed."""

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Returns the spec of a group of layers, whose specs must be equal."""
        if any(spec != specs[0] for spec in specs[1:]):
            raise AssertionError("all layers of a draft model must have the same spec")
        return copy.deepcopy(specs[0])


def with_draft_layers(
    specs: Mapping[str, KVCacheSpec], drafts: Collection[str], drafts_last: bool = False
) -> dict[str, KVCacheSpec]:
    """Returns the specs of all layers, such that draft layers get blocks that no event frees.

    vLLM makes those that come first the first cache group, whose block table it hands to draft
    models. MTP layers come last, by which it finds the group whose last block no hit takes. All
    groups take blocks of one size, that of all compressed layers, so one block of theirs holds the
    tokens of several: as many as fit, within `MAX_DRAFT_BLOCK`. The model's sliding windows keep
    their specs.

    Args:
        specs: by name of all layers, those of draft layers as if they were compressed.
        drafts: names of the draft layers.
        drafts_last: whether these come last.

    Raises:
        UnsupportedError: layers of full attention of either model do not have one and the same
            cache, the draft model's is larger than the model's, or other layers lie beside them
            than sliding windows.
    """
    if not drafts:
        return dict(specs)
    others = {name: spec for name, spec in specs.items() if name not in drafts}
    full = [spec for spec in others.values() if not isinstance(spec, SlidingWindowSpec)]
    target = _only_spec(full, "the model")
    draft = _only_spec([specs[name] for name in drafts], "the draft model")
    room, needed = len(full) * target.page_size_bytes, len(drafts) * draft.page_size_bytes
    if needed > room:
        raise UnsupportedError(
            f"the draft model's cache takes {needed} bytes per {draft.block_size} tokens: expected "
            f"at most the {room} of the model's; choose a smaller draft model, or ngram."
        )
    factor = 1
    while 2 * factor * needed <= room and 2 * factor * draft.block_size <= MAX_DRAFT_BLOCK:
        factor *= 2
    fields = {name: getattr(draft, name) for name in FullAttentionSpec.__dataclass_fields__}
    fields["block_size"] = factor * draft.block_size
    spec = DraftAttentionSpec(**fields)
    if spec.page_size_bytes == target.page_size_bytes and len(drafts) != len(full):
        # Where all pages have one size, vLLM divides layers into groups of equally many.
        fields["page_size_padded"] = spec.page_size_bytes + PAGE_PADDING
        spec = DraftAttentionSpec(**fields)
    ordered: dict[str, KVCacheSpec] = dict.fromkeys(sorted(drafts), spec)
    return others | ordered if drafts_last else ordered | others


def _only_spec(specs: Collection[KVCacheSpec], owner: str) -> CompressedAttentionSpec:
    """Returns the spec that all of these layers of a model beside or with a draft model have.

    Raises:
        UnsupportedError: they have several, or are not of plain full attention, or are none.
    """
    first = next(iter(specs), None)
    if isinstance(first, CompressedAttentionSpec) and all(each == first for each in specs):
        return first
    kinds = ", ".join(sorted({type(each).__name__ for each in specs}))
    raise UnsupportedError(
        f"drafts of a model: expected layers of full attention with one size of cache in {owner}, "
        f"and sliding windows at most beside those of the model, found {kinds}; use ngram, or "
        "serve without --kv-policy."
    )
