"""Random numbers that are the same whenever the same event is run again."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_kvcompress.policies.base import LayerView


def uniform_draws(view: LayerView) -> Tensor:
    """[H, n] numbers in [0, 1) that depend on layer, head and place alone (splitmix64's mixing)."""
    head = torch.arange(view.num_heads, device=view.device)[:, None] % view.heads_per_request
    place = torch.arange(view.num_entries, device=view.device)
    bits = (view.layer * 1_000_003 + head) * 4_294_967_311 + place + 1
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    bits = (bits ^ ((bits >> 31) & ((1 << 33) - 1))) & ((1 << 52) - 1)
    return bits.double() / (1 << 52)
