"""MomentKV (arXiv 2606.01563): evicted entries live on as the moments of their keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_kvcompress.kernels import moment_size
from vllm_kvcompress.kernels.selection import top_entries
from vllm_kvcompress.policies.base import LayerView, Merged, Needs
from vllm_kvcompress.policies.measures import moment_residuals, moments_with
from vllm_kvcompress.policies.protect import Protection


@dataclass(frozen=True)
class Moments:
    """Adds evicted entries to the state from which attention outputs are corrected."""

    needs: ClassVar[Needs] = Needs(values=True, plain_logits=True)
    corrects: ClassVar[bool] = True
    weighs_entries: ClassVar[bool] = False

    def state_size(self, head_size: int) -> int:
        """n_e, the mean key and value, and their cross moments."""
        return moment_size(head_size)

    def merge(self, view: LayerView, scores: Tensor, kept: Tensor) -> Merged:
        """The new state; entries stay as they are."""
        evicted = view.valid & ~kept
        return Merged(state=moments_with(view, state_of(view), evicted))


@dataclass(frozen=True)
class MomentResiduals:
    """Keeps entries with mass on what the moments do not predict: alpha |r|, by chunks.

    r_j = v_j - mean v - (scale / n_e) X k_j, or v_j where nothing was evicted yet. Scores are
    averaged over aligned chunks of entries.

    Attributes:
        chunk_size: entries of a chunk.
    """

    needs: ClassVar[Needs] = Needs(values=True, plain_logits=True)

    chunk_size: int = 4

    def select(
        self, view: LayerView, scores: Tensor, kept: Tensor, protection: Protection
    ) -> Tensor:
        """[H, n] bool with `kept[h]` set in row h."""
        valid = view.valid
        state = state_of(view)
        weighted = chunk_means(scores * moment_residuals(view, state), valid, self.chunk_size)
        first = weighted.masked_fill(protection.mask(view, kept), float("inf"))
        return top_entries(first, valid, kept)


def state_of(view: LayerView) -> Tensor:
    """The moments so far; nothing yet at a first event."""
    if view.state is not None:
        return view.state
    size = moment_size(view.head_size)
    return torch.zeros(view.num_heads, size, dtype=torch.float32, device=view.device)


def chunk_means(scores: Tensor, valid: Tensor, chunk_size: int) -> Tensor:
    """[H, n] every valid entry's score replaced by the mean of its aligned chunk's valid ones."""
    num_heads, num_entries = scores.shape
    chunk = torch.arange(num_entries, device=scores.device) // chunk_size
    index = chunk.expand(num_heads, -1)
    num_chunks = (num_entries + chunk_size - 1) // chunk_size
    sums = scores.new_zeros(num_heads, num_chunks)
    sums = sums.scatter_add(1, index, scores.masked_fill(~valid, 0))
    counts = torch.zeros_like(sums).scatter_add(1, index, valid.to(scores.dtype))
    return (sums / counts.clamp_min(1)).gather(1, index)
