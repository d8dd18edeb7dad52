"""Scores from the keys alone: KeyDiff (arXiv 2504.15364) and key norms (arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_kvcompress.policies.base import LayerView, Needs
from vllm_kvcompress.policies.measures import key_differences


@dataclass(frozen=True)
class KeyDiff:
    """Minus the cosine to an anchor of all keys: unusual keys are kept.

    Attributes:
        anchor: mean_normalized, mean_raw, median or pairwise.
    """

    needs: ClassVar[Needs] = Needs()

    anchor: str = "mean_normalized"

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 in [-1, 1] (times the entries for pairwise)."""
        return key_differences(view, self.anchor)


@dataclass(frozen=True)
class KeyNorm:
    """Minus the Euclidean norm of the key: keys of low norm draw the attention."""

    needs: ClassVar[Needs] = Needs()

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32; in fp32 because most norms tie in 16 bits."""
        return -torch.linalg.vector_norm(view.keys, dim=2, dtype=torch.float32)
