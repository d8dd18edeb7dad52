"""Which budgets and types of caches hold a number of requests, and what they were measured to lose.

Losses are those of docs/results/memory.md, in nats per token of text: of two small models, so they
rank combinations and promise nothing for another model. Those of a tenth are of `spans+headkv`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vllm_kvcompress.config.auto import AUTO
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.tools import capacity
from vllm_kvcompress.tools.capacity import ModelShape

MODELS = ("SmolLM2", "Qwen2.5-Coder 1.5B")
BUDGETS = (1.0, 0.5, 0.25, 0.1)
Losses = tuple[float | None, ...]
LOSSES: dict[str, tuple[Losses, ...]] = {  # of each model, by budget; all of it as in stock vLLM
    "auto": ((0.0, 0.003, 0.012, 0.060), (0.0, 0.004, 0.024, 0.080)),
    "int8_per_token_head": ((0.002, 0.003, 0.016, 0.057), (0.014, 0.006, 0.023, 0.083)),
    "fp8_per_token_head": ((0.016, 0.014, 0.027, 0.079), (0.566, 0.009, 0.025, 0.079)),
    "fp8": ((0.018, 0.017, 0.019, 0.079), (None, 0.002, 0.020, 0.078)),
    "int4_per_token_head": ((0.076, 0.082, 0.094, 0.149), (7.629, 0.032, 0.050, 0.109)),
}
MAX_ROWS = 8  # of the table


@dataclass(frozen=True)
class Combination:
    """A budget and a type of cache.

    Attributes:
        cache_dtype: vLLM's name.
        budget: share of a prompt's tokens; 1.0: nothing is evicted.
        token_bytes: of the cache, per token of a prompt and rank, evicted tokens included.
        requests: that fit at a time.
        losses: measured, by model; None: not measured.
    """

    cache_dtype: str
    budget: float
    token_bytes: float
    requests: float
    losses: Losses

    @property
    def options(self) -> str:
        """Returns the options of `serve` that ask for it."""
        policy = "" if self.budget == 1 else f" --kv-policy {AUTO} --kv-budget {self.budget:g}"
        return f"--kv-cache-dtype {self.cache_dtype}{policy}"

    @property
    def rank(self) -> tuple[bool, float]:
        """Orders by the loss in the worse model; those not measured in all models come last."""
        return None in self.losses, max(loss for loss in self.losses if loss is not None)

    def excels(self, other: Combination) -> bool:
        """Whether it holds at least as many requests and loses less in all models measured."""
        pairs = zip(self.losses, other.losses, strict=True)
        both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        return self.requests >= other.requests and all(ours < theirs for ours, theirs in both)


def combinations(
    shape: ModelShape,
    cache_bytes: int,
    num_tokens: int,
    block_size: int,
    types: Sequence[str] = tuple(LOSSES),
) -> list[Combination]:
    """Returns all that were measured, the least loss in the worse model first.

    Args:
        shape: with a cache in the model's type.
        cache_bytes, num_tokens, block_size: as in `capacity.plan`.
        types: of caches, by vLLM's names, that the device serves.
    """
    measured = []
    for cache_dtype in types:
        stored = replace(shape, row_bytes=shape.row_bytes_in(cache_dtype))
        for budget, *losses in zip(BUDGETS, *LOSSES[cache_dtype], strict=True):
            evicts = Settings.from_dict({"policy": AUTO, "budget": budget})
            settings = evicts if budget < 1 else None
            plan = capacity.plan(stored, settings, cache_bytes, num_tokens, block_size)
            requests = plan.stock if plan.compressed is None else plan.compressed
            row = cache_dtype, budget, budget * stored.token_bytes, requests, tuple(losses)
            measured.append(Combination(*row))
    return sorted(measured, key=lambda each: each.rank)


def report(measured: list[Combination], num_requests: int, num_tokens: int) -> Iterator[str]:
    """Yields lines that name the best combinations under which so many requests fit.

    Left out are those that lose more than another one which holds as many requests.
    """
    fitting = [each for each in measured if each.requests >= num_requests]
    if not fitting:
        most = max(measured, key=lambda each: each.requests)
        yield (
            f"{num_requests} requests of {num_tokens} tokens do not fit at a time: "
            f"{most.requests:.2f} do with {most.options}; take more memory or a shorter --context"
        )
        return
    yield (
        f"{num_requests} requests of {num_tokens} tokens fit at a time with these options, the "
        "least loss first;"
    )
    yield (
        f"loss: nats per token of text, measured on {' and '.join(MODELS)}, not on this model (-: "
        "not measured)"
    )
    yield f"{'loss':>7}  {'':>7}  KiB/token  requests  options of `vllm-kvcompress serve`"
    best = [each for each in fitting if not any(other.excels(each) for other in fitting)]
    for each in best[:MAX_ROWS]:
        losses = "  ".join(f"{'-' if loss is None else f'{loss:.3f}':>7}" for loss in each.losses)
        yield f"{losses}  {each.token_bytes / 2**10:9.1f}  {each.requests:8.2f}  {each.options}"
