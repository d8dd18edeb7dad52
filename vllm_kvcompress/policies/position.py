"""Scores from positions alone: StreamingLLM (arXiv 2309.17453), DuoAttention (2410.10819)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Needs


@dataclass(frozen=True)
class Recency:
    """The later the better; with protected sinks this is StreamingLLM."""

    needs: ClassVar[Needs] = Needs()

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 place in the sequence (exact below 2**24 entries)."""
        nth = torch.arange(view.num_entries, device=view.device, dtype=torch.float32)
        return nth.expand(view.num_heads, -1)
