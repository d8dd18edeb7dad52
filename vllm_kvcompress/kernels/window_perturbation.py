"""Change of attention outputs when an entry is pruned (OBCache), in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.tiles import exact_bf16_products
from vllm_kvcompress.kernels.window_mass import WindowColumns, by_head


def window_perturbation(
    view: KVView, queries: Tensor, scale: float, variant: str, stride: int = 1
) -> Tensor:
    """Squared change of the outputs of the last queries, to second order, per entry.

    With the logit e, the weight A and the output o of a query: `value` A^2 |v|^2, `key`
    (A e)^2 |v - o|^2, `joint` A^2 |v + e (v - o)|^2; summed over the window and the group, whose
    outputs add up. What a query sees, and the tiles, are those of `window_mass`.

    Args:
        queries: [w, H * G, D] last queries, oldest first, in the cache's type.
        scale: softmax scale.
        variant: value, key or joint.
        stride: every `stride`-th query counts, from the last one back.

    Returns:
        [H, n] fp32, not negative; 0 behind the lengths. Zeros if w is 0.
    """
    queries = queries[(len(queries) - 1) % stride :: stride]
    num_heads, num_entries, num_queries = view.num_heads, view.capacity, len(queries)
    result = torch.zeros(num_heads, num_entries, dtype=torch.float32, device=view.device)
    if num_queries == 0 or num_entries == 0:
        return result
    grouped, group = by_head(queries, num_heads), queries.shape[1] // num_heads
    columns = WindowColumns.of(view, range((num_queries - 1) * stride, -1, -stride))
    slices, at_once = columns.tiling(num_heads, num_queries, group)
    keys, values = view.keys(), view.values()
    exact = keys.dtype if keys.dtype == queries.dtype else torch.float32
    tail_keys, tail_values = view.tail_keys(), view.tail_values()
    room = result.new_empty(slices[0].stop * at_once * group * columns.num_columns)
    for heads in slices:
        seen_keys = columns.seen(heads, keys[heads], tail_keys[heads])
        seen_values = columns.seen(heads, values[heads], tail_values[heads])
        sums = _Sums.zeros(seen_values)
        for start in range(0, num_queries, at_once):
            rows = slice(start, min(start + at_once, num_queries))
            with exact_bf16_products(exact):
                logits = columns.logits(heads, rows, grouped[heads], seen_keys, scale, room)
            seeing = columns.seeing[heads, rows].repeat_interleave(group, dim=1)
            weights = torch.softmax(logits, dim=2).mul_(seeing[:, :, None])
            sums.add(logits, weights, seen_values, variant)
        result[heads] = columns.fold(heads, sums.total(seen_values)[:, None])[:, 0]
    return result


@dataclass(frozen=True)
class _Sums:
    """Terms of |p v - q o|^2, added up over queries.

    With `value` p is A and q is 0, with `key` both are A e, with `joint` p is A (1 + e), q is A e.

    Attributes:
        of_values: [heads, 1, C] p^2, the factor of |v|^2.
        of_outputs: [heads, 1, C] q^2 |o|^2.
        between: [heads, C, D] p q o.
    """

    of_values: Tensor
    of_outputs: Tensor
    between: Tensor

    @classmethod
    def zeros(cls, values: Tensor) -> _Sums:
        shape = (len(values), 1, values.shape[1])
        return cls(values.new_zeros(shape), values.new_zeros(shape), torch.zeros_like(values))

    def add(self, logits: Tensor, weights: Tensor, values: Tensor, variant: str) -> None:
        """Adds some queries; overwrites both [heads, rows, C] logits and weights."""
        ones = weights.new_ones(1, 1, 1).expand(*weights.shape[:2], 1).mT
        if variant == "value":
            self.of_values.baddbmm_(ones, weights.square_())
            return
        outputs = weights @ values
        lengths = outputs.square().sum(dim=2)[:, None]
        by_logit = logits.mul_(weights)  # 0 where a logit is hidden
        of_value = weights.add_(by_logit) if variant == "joint" else by_logit
        both = of_value * by_logit
        self.between.baddbmm_(both.mT, outputs)
        self.of_values.baddbmm_(ones, torch.mul(of_value, of_value, out=weights))
        self.of_outputs.baddbmm_(lengths, by_logit.square_())

    def total(self, values: Tensor) -> Tensor:
        """[heads, C] sums over all queries."""
        own = self.of_values[:, 0] * values.square().sum(dim=2) + self.of_outputs[:, 0]
        return (own - 2 * (self.between * values).sum(dim=2)).clamp_min_(0)
