"""Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores,
arXiv 2507.08143."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.tiles import finite, multiplies_bf16
from vllm_kvcompress.policies import LayerView, Needs, Policy, Stages, parameter

RIDGE = 1e-3  # added to all eigenvalues, as a fraction of their mean
UNROTATED = "unrotated"


KEY_SPACE = parameter(
    UNROTATED,
    "keys before RoPE (unrotated), or as they are cached (rotated)",
    choices=(UNROTATED, "rotated"),
)


@dataclass(frozen=True)
class Leverage(Policy):
    """Keeps keys that other keys cannot replace; needs no queries.

    With keys before RoPE, less their mean, as rows of X: the score of row x is
    x (X^T X + RIDGE I)^-1 x^T, its statistical leverage (Compactor's outlier score, which the paper
    estimates from random projections; D by D numbers per head need no estimate). Compactor's
    other half, attention without a mask, would need the queries of the full prompt.
    """

    name = "leverage"
    batches = True
    stages = Stages(score="the key's statistical leverage, before RoPE", select="highest score")

    keys: str = KEY_SPACE

    @property
    def needs(self) -> Needs:
        return Needs(positions=self.keys == UNROTATED)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 leverage, from 0 to 1."""
        return leverage(view, self.keys)


def leverage(view: LayerView, keys_as: str) -> Tensor:
    """[H, n] fp32 statistical leverage of each key, unrotated or rotated; 0 behind the lengths."""
    scores = torch.empty(view.num_heads, view.num_entries, device=view.device)
    unit = torch.eye(view.kv.head_size, device=view.device)
    rotations = _rotations_back(view) if keys_as == UNROTATED else None
    for some in view.kv.head_slices():
        cached = view.kv.clean(0, some)
        keys = cached.float()
        if rotations is not None:
            assert view.rotary is not None
            keys = view.rotary.turned(keys, rotations(some))
        count = view.lengths[some, None, None].clamp_min(1)
        centred = finite(keys - keys.sum(dim=1, keepdim=True) / count, view.valid[some])
        scatter = _lower_scatter(centred)
        diagonal = scatter.diagonal(dim1=1, dim2=2)
        # The constant gives equal keys, which have no scatter, a root too.
        diagonal += RIDGE * diagonal.mean(dim=1, keepdim=True) + 1e-20
        root = torch.linalg.cholesky_ex(scatter).L
        inverse = torch.linalg.solve_triangular(root.mT, unit, upper=True, left=False)
        if cached.dtype == torch.bfloat16 and multiplies_bf16(view.device):
            # As exact as cached keys, which were rounded to the same type.
            centred, inverse = centred.bfloat16(), inverse.bfloat16()
        products = centred @ inverse
        scores[some] = torch.linalg.vector_norm(products, dim=2, dtype=torch.float32)
    return scores.square_()


def _lower_scatter(rows: Tensor) -> Tensor:
    """Returns rows^T rows of [h, n, D] as [h, D, D], of which only the lower half is filled."""
    half, size = rows.shape[2] // 2, rows.shape[2]
    scatter = rows.new_empty(len(rows), size, size)
    scatter[:, :half, :half] = rows[..., :half].mT @ rows[..., :half]
    scatter[:, half:] = rows[..., half:].mT @ rows
    return scatter


def _rotations_back(view: LayerView) -> Callable[[slice], tuple[Tensor, Tensor]]:
    """Rotations that undo RoPE for a slice of heads; computed once where positions are shared."""
    positions, rotary = view.entries.positions, view.rotary
    assert positions is not None
    assert rotary is not None
    if positions.stride(0) == 0:
        rotation = rotary.turn(-positions[:1])
        return lambda some: rotation
    return lambda some: rotary.turn(-positions[some])
