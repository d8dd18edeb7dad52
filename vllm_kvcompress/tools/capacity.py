"""Computes how many requests a KV cache serves at a time, from a model's config alone.

The arithmetic is the engine's: blocks from bytes, and requests from the rule that plans events
(`scheduling/rule.py`). It cannot know the memory that vLLM measures on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from vllm_kvcompress.cache.quantization import FP8_TYPES, TOKEN_SCALED_TYPES, row_bytes
from vllm_kvcompress.cache.query_windows import window_blocks
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.policies.base import PageShape
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.rule import CompressionRule

GPU_MEMORY_UTILIZATION = 0.92  # vLLM's default
BLOCK_SIZE = 16  # vLLM's default on GPUs
CPU_BLOCK_SIZE = 32  # finer than vLLM's 128 and as fast: budgets are kept more exactly
_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_GIB = 2**30


@dataclass(frozen=True)
class ModelShape:
    """What the size of a model's KV cache depends on, on one rank.

    Attributes:
        num_layers: all have full attention.
        num_query_heads, num_kv_heads: of this rank, per layer.
        head_size: elements of a key.
        dtype_bytes: of one element in weights and queries.
        row_bytes: of a key in the cache, and of a value, a scale beside it included.
        weight_bytes: of this rank.
        longest: tokens of the longest request that the model supports.
        num_ranks: of tensor and pipeline parallelism.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    row_bytes: int
    weight_bytes: int
    longest: int
    num_ranks: int = 1

    @property
    def token_bytes(self) -> int:
        """KV cache bytes per token and rank: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.row_bytes

    def row_bytes_in(self, cache_dtype: str) -> int:
        """Bytes of a key in a cache of vLLM's type; auto is that of the weights.

        Raises:
            ConfigError: no such type is compressed.
        """
        known = {"auto": self.dtype_bytes, **_BYTES}
        stored = row_bytes(cache_dtype, self.head_size)
        if stored is not None:
            return stored
        if cache_dtype not in known:
            names = ", ".join([*known, *FP8_TYPES, *TOKEN_SCALED_TYPES])
            raise ConfigError(f"--kv-cache-dtype {cache_dtype}: expected one of {names}.")
        return self.head_size * known[cache_dtype]

    def largest_stage(self, num_stages: int) -> Self:
        """The largest of so many pipeline stages, whose cache decides how many blocks all have.

        Raises:
            ConfigError: there are more stages than layers.
        """
        if num_stages > self.num_layers:
            raise ConfigError(
                f"--pipeline-parallel-size {num_stages}: expected at most one stage for each of "
                f"the model's {self.num_layers} layers; give a smaller number."
            )
        return replace(
            self,
            num_layers=ceil_div(self.num_layers, num_stages),
            weight_bytes=self.weight_bytes // num_stages,
            num_ranks=self.num_ranks * num_stages,
        )

    def with_weights(self, total_bytes: int) -> Self:
        """The same model with weights of that many bytes, over all ranks."""
        return replace(self, weight_bytes=total_bytes // self.num_ranks)


@dataclass(frozen=True)
class CapacityPlan:
    """What fits into a cache.

    Attributes:
        num_tokens: of every request.
        block_size: tokens per block.
        cache_bytes: of the KV cache, per rank.
        num_blocks: blocks in that cache.
        stock: uncompressed requests at a time.
        compressed: compressed requests at a time; None where nothing is compressed.
        held_blocks: blocks of a compressed request between events.
        admission_blocks: free blocks that it needs to be read.
    """

    num_tokens: int
    block_size: int
    cache_bytes: int
    num_blocks: int
    stock: float
    compressed: float | None
    held_blocks: int
    admission_blocks: int


def read_shape(
    model: str, dtype: str | None, num_ranks: int, cache_dtype: str = "auto"
) -> ModelShape:
    """Reads a model's shape from its config.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        dtype: vLLM's option; None or auto takes the model's own, but half of float32, as vLLM does.
        num_ranks: of tensor parallelism.
        cache_dtype: vLLM's option for the cache; auto takes that of the weights.

    Raises:
        ConfigError: no such model, or layers other than plain full attention.
    """
    from transformers import AutoConfig

    try:
        full_config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model}: its config cannot be read ({error}).") from error
    config = full_config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "kv_lora_rank", None):
        raise ConfigError(
            f"{model}: expected full attention in all layers, found {', '.join(sorted(kinds))}; "
            "for other layers, see the number of tokens that vLLM logs when it starts."
        )
    query_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    # All types that vLLM serves models in by default have two bytes: it halves float32.
    number_bytes = {"auto": 2, **_BYTES}.get(dtype or "auto")
    if number_bytes is None:
        raise ConfigError(f"--dtype {dtype}: expected one of auto, {', '.join(_BYTES)}.")
    shape = ModelShape(
        num_layers=config.num_hidden_layers,
        num_query_heads=query_heads // num_ranks,
        num_kv_heads=max(1, kv_heads // num_ranks),
        head_size=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
        dtype_bytes=number_bytes,
        row_bytes=0,
        weight_bytes=_num_weights(full_config) * number_bytes // num_ranks,
        longest=config.max_position_embeddings,
        num_ranks=num_ranks,
    )
    return replace(shape, row_bytes=shape.row_bytes_in(cache_dtype))


def _num_weights(config: Any) -> int:
    """Counts parameters on the meta device, which allocates no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters())


def plan(
    shape: ModelShape, settings: Settings | None, cache_bytes: int, num_tokens: int, block_size: int
) -> CapacityPlan:
    """Computes what fits into a cache.

    Raises:
        ConfigError: not even one block fits, or the budget is too small.
    """
    num_blocks = cache_bytes // (shape.token_bytes * block_size)
    if num_blocks < 1:
        raise ConfigError(
            f"expected memory for a KV cache beside {shape.weight_bytes / _GIB:.1f} GiB of "
            f"weights, found {cache_bytes / _GIB:.1f} GiB; take more "
            "ranks, larger GPUs or a smaller model."
        )
    rule = CompressionRule(block_size, fraction=1.0, at_prompt_end=False)
    compresses = settings is not None and settings.compresses
    if settings is not None and compresses:
        rule = _rule(shape, settings, block_size)
    return CapacityPlan(
        num_tokens=num_tokens,
        block_size=block_size,
        cache_bytes=cache_bytes,
        num_blocks=num_blocks,
        stock=num_blocks / ceil_div(num_tokens, block_size),
        compressed=rule.concurrency(num_tokens, num_blocks) if compresses else None,
        held_blocks=rule.held_blocks(num_tokens),
        admission_blocks=rule.admission_blocks(num_tokens),
    )


def _rule(shape: ModelShape, settings: Settings, block_size: int) -> CompressionRule:
    """The rule that a worker makes of a layer's spec."""
    pipeline = resolve_settings(settings)[settings.policy]
    page_bytes = 2 * block_size * shape.row_bytes
    pages = PageShape(shape.num_kv_heads, shape.head_size, block_size, page_bytes)
    if isinstance(settings.budget, int):
        pipeline.check_room(settings.budget, pages)
    for ceiling in settings.ceilings:
        pipeline.check_ceiling(ceiling, pages)
    demand = pipeline.demand(pages)
    if settings.pressure_mark is not None and demand.window_size:
        in_page = page_bytes // (shape.head_size * shape.dtype_bytes)
        heads = shape.num_query_heads, shape.num_kv_heads
        ring = window_blocks(demand.window_size, *heads, in_page)
        demand = replace(demand, window_blocks=ring)
    return settings.rule(block_size, demand)


def report(model: str, shape: ModelShape, plan: CapacityPlan) -> str:
    """Describes the plan in words, per rank."""
    blocks = ceil_div(plan.num_tokens, plan.block_size)
    lines = [
        f"{model}, {plan.num_tokens} tokens per request, blocks of {plan.block_size} tokens",
        f"weights     {shape.weight_bytes / _GIB:.1f} GiB per rank",
        f"KV cache    {plan.cache_bytes / _GIB:.1f} GiB per rank: {plan.num_blocks} blocks, "
        f"{shape.token_bytes / 2**10:.1f} KiB per token",
        f"stock       {plan.stock:.2f} such requests at a time, {blocks} blocks each",
    ]
    if plan.compressed is not None:
        lines.append(
            f"compressed  {plan.compressed:.2f} such requests at a time, {plan.held_blocks} blocks "
            f"each, and up to {plan.admission_blocks} while one is read"
        )
    return "\n".join(lines)
