"""Keys with a bias are stored less its mean only where attention stays that of whole keys."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_kvcompress.cache.quantization import MEAN_POSITIONS
from vllm_kvcompress.vllm_plugin.startup.quantized import set_mean_keys

QUERY_HEADS, KV_HEADS, SIZE, BASE = 4, 2, 8, 100.0


class RotaryEmbedding(nn.Module):
    """Stands in for vLLM's class of this name, by which rotations are known."""

    is_neox_style = True

    def _compute_cos_sin_cache(self) -> Tensor:
        angles = torch.arange(2)[:, None] / BASE ** (torch.arange(0, SIZE, 2) / SIZE)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


class OtherRotation(RotaryEmbedding):
    """A rotation that is not known."""


def stored_less(cap: float = 0.0, connector: Any = None, **parts: nn.Module) -> Tensor | None:
    """Returns what a layer's keys are stored less of; `parts` are set in its attention module."""
    rows = (QUERY_HEADS + 2 * KV_HEADS) * SIZE
    projection = nn.Linear(1, rows)
    projection.bias.data = torch.arange(rows, dtype=torch.float32)
    attention = nn.ModuleDict({"qkv_proj": projection, "rotary_emb": RotaryEmbedding(), **parts})
    impl = SimpleNamespace(
        **{"num_heads": QUERY_HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE},
        **{"logits_soft_cap": cap, "mean_key": None},
    )
    layer = SimpleNamespace(layer_name="self_attn.attn", impl=impl)
    config: Any = SimpleNamespace(kv_transfer_config=connector)
    set_mean_keys([layer], nn.ModuleDict({"self_attn": attention}), config)
    mean: Tensor | None = impl.mean_key
    return mean


def test_the_mean_is_that_of_the_rotated_bias() -> None:
    mean = stored_less()
    assert mean is not None
    for head in range(KV_HEADS):
        bias = [float((QUERY_HEADS + head) * SIZE + at) for at in range(SIZE)]
        sums = [0.0] * SIZE
        for position in range(MEAN_POSITIONS):
            for pair in range(SIZE // 2):
                angle = position / BASE ** (2 * pair / SIZE)
                first, second = bias[pair], bias[pair + SIZE // 2]
                sums[pair] += first * math.cos(angle) - second * math.sin(angle)
                sums[pair + SIZE // 2] += second * math.cos(angle) + first * math.sin(angle)
        expected = [each / MEAN_POSITIONS for each in sums]
        assert mean[head].tolist() == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize(
    "given",
    [
        {"cap": 30.0},
        {"connector": SimpleNamespace()},
        {"k_norm": nn.Identity()},
        {"rotary_emb": OtherRotation()},
        {"qkv_proj": nn.Linear(1, 1, bias=False)},
    ],
    ids=["capped-logits", "connector", "normalised-keys", "unknown-rotation", "no-bias"],
)
def test_other_keys_are_stored_whole(given: dict[str, Any]) -> None:
    assert stored_less(**given) is None
