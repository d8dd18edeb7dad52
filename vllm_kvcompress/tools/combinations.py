"""Which budgets and types of caches hold a number of requests, and what they were measured to lose.

Losses are those of docs/results/memory.md, in nats per token of text: of two small models, so they
rank combinations and promise nothing for another model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_kvcompress.config import AUTO, Settings
from vllm_kvcompress.tools import capacity
from vllm_kvcompress.tools.capacity import ModelShape

MODELS = ("SmolLM2", "Qwen2.5-Coder 1.5B")
BUDGETS = (1.0, 0.5, 0.25, 0.1)
LOSSES = {  # of each model, by budget
    "auto": ((0.0, 0.003, 0.012, 0.060), (0.0, 0.006, 0.024, 0.079)),
    "int8_per_token_head": ((0.002, 0.003, 0.016, 0.057), (0.014, 0.014, 0.033, 0.096)),
    "fp8_per_token_head": ((0.016, 0.014, 0.027, 0.079), (0.566, 0.600, 0.576, 0.391)),
    "int4_per_token_head": ((0.076, 0.082, 0.094, 0.149), (7.629, 7.619, 7.624, 7.078)),
}


@dataclass(frozen=True)
class Combination:
    """A budget and a type of cache.

    Attributes:
        cache_dtype: vLLM's name.
        budget: share of a prompt's tokens; 1.0: nothing is evicted.
        requests: that fit at a time.
        losses: measured, by model.
    """

    cache_dtype: str
    budget: float
    requests: float
    losses: tuple[float, ...]

    @property
    def options(self) -> str:
        """Returns the options of `serve` that ask for it."""
        policy = "" if self.budget == 1 else f" --kv-policy {AUTO} --kv-budget {self.budget:g}"
        return f"--kv-cache-dtype {self.cache_dtype}{policy}"


def combinations(
    shape: ModelShape, cache_bytes: int, num_tokens: int, block_size: int
) -> list[Combination]:
    """Returns all that were measured, the least loss in the worse model first.

    Args:
        shape: with a cache in the model's type.
        cache_bytes, num_tokens, block_size: as in `capacity.plan`.
    """
    found = []
    for cache_dtype, by_model in LOSSES.items():
        stored = replace(shape, row_bytes=shape.row_bytes_in(cache_dtype))
        for budget, *losses in zip(BUDGETS, *by_model, strict=True):
            evicts = Settings.from_dict({"policy": AUTO, "budget": budget})
            settings = evicts if budget < 1 else None
            plan = capacity.plan(stored, settings, cache_bytes, num_tokens, block_size)
            requests = plan.stock if plan.compressed is None else plan.compressed
            found.append(Combination(cache_dtype, budget, requests, tuple(losses)))
    return sorted(found, key=lambda each: max(each.losses))


def report(found: list[Combination], num_requests: int, num_tokens: int) -> Iterator[str]:
    """Yields lines that name the combinations under which so many requests fit."""
    fitting = [each for each in found if each.requests >= num_requests]
    if not fitting:
        most = max(found, key=lambda each: each.requests)
        yield (
            f"{num_requests} requests of {num_tokens} tokens do not fit at a time: "
            f"{most.requests:.2f} do with {most.options}; take more memory or a shorter --context"
        )
        return
    yield (
        f"{num_requests} requests of {num_tokens} tokens fit with these, the least loss first "
        f"(nats per token of text, measured on {' and '.join(MODELS)}; measure yours with "
        "--tasks text of `vllm-kvcompress eval`):"
    )
    for each in fitting:
        losses = "  ".join(f"{loss:.3f}" for loss in each.losses)
        yield f"    {losses}  {each.requests:8.2f} requests  {each.options}"
    if any(each.cache_dtype != "auto" for each in fitting):
        yield "Types other than auto are those of vLLM's Triton attention, for GPUs."
