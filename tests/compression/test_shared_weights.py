"""Weights of a layer whose KV heads serve the query heads of another layer as well."""

from __future__ import annotations

import torch

from vllm_kvcompress.compression.event import LayerWeights

NUM_HEADS, GROUP, SIZE, HIDDEN = 3, 2, 4, 5


def weights(seed: int) -> LayerWeights:
    generator = torch.Generator().manual_seed(seed)
    return LayerWeights(
        output_weight=torch.rand(NUM_HEADS, SIZE, GROUP, HIDDEN, generator=generator),
        output_root=torch.rand(NUM_HEADS * GROUP, SIZE, SIZE, generator=generator),
        sinks=torch.rand(NUM_HEADS, GROUP, generator=generator),
    )


def test_groups_of_kv_heads_become_longer() -> None:
    first, second = weights(1), weights(2)
    joined = first.joined(second, NUM_HEADS)
    assert joined.output_weight is not None
    assert joined.output_root is not None
    assert joined.sinks is not None
    for head in range(NUM_HEADS):
        for place in range(2 * GROUP):
            of_layer, member = (first, second)[place // GROUP], place % GROUP
            assert of_layer.output_weight is not None
            assert of_layer.output_root is not None
            assert of_layer.sinks is not None
            expected = of_layer.output_weight[head, :, member]
            assert torch.equal(joined.output_weight[head, :, place], expected)
            root = joined.output_root[head * 2 * GROUP + place]
            assert torch.equal(root, of_layer.output_root[head * GROUP + member])
            assert joined.sinks[head, place] == of_layer.sinks[head, member]


def test_what_no_policy_asks_for_stays_away() -> None:
    assert LayerWeights().joined(LayerWeights(), NUM_HEADS) == LayerWeights()
