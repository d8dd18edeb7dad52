"""What a policy sees of a layer, as lists of numbers, and vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_kvcompress.policies.base import LayerView

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def norm(a: Vector) -> float:
    return math.sqrt(dot(a, a))


@dataclass
class Head:
    """One KV head of one layer.

    Attributes:
        keys, values: entries of the full blocks.
        tail_keys, tail_values: entries of the partial block.
        queries: by position of the window, the group's query vectors, oldest first.
        weights: by member of the group, W_O rows [D][M].
        scale: softmax scale.
        frequencies: of RoPE, radians per position; dims i and i + r / 2 turn together.
    """

    keys: list[Vector]
    values: list[Vector]
    tail_keys: list[Vector]
    tail_values: list[Vector]
    queries: list[list[Vector]]
    weights: list[list[Vector]]
    scale: float
    frequencies: Vector

    @property
    def size(self) -> int:
        return len(self.keys)

    @property
    def num_tail(self) -> int:
        return len(self.tail_keys)


def heads_of(view: LayerView) -> list[Head]:
    num_heads = view.num_heads
    group = view.queries.shape[1] // num_heads
    heads = []
    for h in range(num_heads):
        size = int(view.lengths[h])
        own = range(h * group, (h + 1) * group)
        assert view.output_weight is not None
        assert view.rotary is not None
        heads.append(
            Head(
                keys=view.kv.keys()[h, :size].double().tolist(),
                values=view.kv.values()[h, :size].double().tolist(),
                tail_keys=view.kv.tail_keys()[h].double().tolist(),
                tail_values=view.kv.tail_values()[h].double().tolist(),
                queries=[[row[q].double().tolist() for q in own] for row in view.queries],
                weights=[view.output_weight[h, :, g].double().tolist() for g in range(group)],
                scale=view.scale,
                frequencies=view.rotary.frequencies.double().tolist(),
            )
        )
    return heads
