"""TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, arXiv 2604.04921.

The authors' code (github.com/WeianMao/triattention, c3744ee) keeps the prompt whole and compresses
the answer, 128 tokens beyond the budget; here policies see the prompt like all other tokens. Its
experiments let a KV head keep the same tokens in all layers, those with the highest mean over
layers (`per_head_pruning`); here each layer decides for itself, its `per_layer_perhead_pruning`.
Scores are scaled over all tokens behind the prompt there, over those that can be evicted here. It
turns keys back to before RoPE and adds up cosines for every distance and key; since positions of
keys cancel out, one product with the mean query, turned by the mean over the distances, says the
same. Files are the authors' own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.common.transfers import upload
from vllm_kvcompress.policies import (
    LayerView,
    ModelHeads,
    Needs,
    Policy,
    Protection,
    Stages,
    parameter,
)
from vllm_kvcompress.policies.parts.profiles import read_bytes, refusal

_FIELDS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


@dataclass(frozen=True)
class TriAttention(Policy):
    """Keeps what a model's mean query, measured once, attends to from distances ahead.

    A query head's queries before RoPE, as D/2 complex numbers of frequencies w_f, have the mean q
    and the mean magnitudes a. A key k, before RoPE, of position p scores, when t tokens have been
    read, sum_f |q_f| |k_f| cos(w_f (t - p + d) + arg(q_f conj(k_f))), in the mean over distances
    d = 1, 2, 4 to max_distance, plus sum_f (a_f - |q_f|) |k_f|. With normalize each query head's
    scores get mean 0 and deviation 1. A token counts as for the query head of the group that scores
    it highest. Positions and queries are not needed.

    Attributes:
        statistics: [layers, query heads, 3, D/2] fp32 real and imaginary part of q, and a; once
            bound to a model those of the rank's heads.
    """

    name = "triattention"
    batches = True
    stages = Stages(
        score="expected logit of the model's mean query, over distances ahead, plus the key's "
        "magnitudes by how far queries vary",
        protect="the last num_recent tokens",
        allocate="the same for every layer and head",
        select="highest score",
    )
    profile = "triattention"

    max_distance: int = parameter(65536, "largest distance ahead; powers of 2 up to it", minimum=1)
    normalize: str = parameter("on", "scale each query head's scores", choices=("on", "off"))
    num_recent: int = parameter(0, "last tokens that are kept", minimum=0)
    statistics: Tensor = field(default_factory=lambda: torch.zeros(0), compare=False)

    def with_profile(self, path: Path) -> Self:
        return replace(self, statistics=read_statistics(path))

    def bind(self, model: ModelHeads) -> Self:
        layers, heads = self.statistics.shape[:2]
        expected = model.num_layers_of_model, model.num_query_heads * model.tp_size
        if (layers, heads) != expected:
            raise refusal(
                "the profile",
                f"expected {expected[0]} layers of {expected[1]} query heads, as the model has, "
                f"found {layers} of {heads}",
            )
        own = self.statistics[model.own_layers].chunk(model.tp_size, dim=1)[model.tp_rank]
        return replace(self, statistics=own)

    @property
    def needs(self) -> Needs:
        return Needs(rotary=True)

    @property
    def protection(self) -> Protection:
        return Protection(num_recent=self.num_recent)

    def score(self, view: LayerView) -> Tensor:
        """[H, n] fp32 scores; with normalize the best of a group is mostly above 0."""
        assert view.rotary is not None
        order = upload(torch.tensor(pairs(view.rotary, view.kv.head_size)), view.device)
        mean, spread = self._of_heads(view, view.rotary)
        scores = torch.empty(view.num_heads, view.num_entries, device=view.device)
        for some in view.kv.head_slices():
            keys = view.kv.clean(0, some).float()[..., order]
            magnitudes = torch.hypot(*keys.chunk(2, dim=2))
            score = keys @ mean[some].mT + magnitudes @ spread[some].mT
            if self.normalize == "on":
                valid = view.valid[some, :, None]
                count = view.lengths[some, None, None].clamp_min(1)
                score = score - (score * valid).sum(dim=1, keepdim=True) / count
                variance = (score * valid).square().sum(dim=1, keepdim=True) / count
                score = score / variance.sqrt().clamp_min(1e-6)
            scores[some] = score.amax(dim=2)
        return scores

    def _of_heads(self, view: LayerView, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[H, G, D] mean queries, turned by the mean over distances, and [H, G, D/2] spreads."""
        own = upload(self.statistics[view.layers.start : view.layers.stop], view.device)
        own = view.for_requests(own)
        real, imaginary, magnitude = own.unflatten(1, (view.heads_per_request, -1)).unbind(dim=3)
        ends = upload(torch.tensor(view.ends, dtype=torch.float32), view.device)
        distances = 2.0 ** torch.arange(math.floor(math.log2(self.max_distance)) + 1)
        frequencies = rotary.frequencies.new_zeros(real.shape[-1])  # pairs that do not turn: 0
        frequencies[: rotary.frequencies.numel()] = rotary.frequencies
        angles = (ends[:, None] + upload(distances, view.device))[..., None] * frequencies
        cos, sin = (turn.mean(dim=1)[:, None, None] for turn in (angles.cos(), angles.sin()))
        turned = torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        spread = magnitude - torch.hypot(real, imaginary)
        return turned.flatten(0, 1), spread.flatten(0, 1)


def pairs(rotary: Rotary, head_size: int) -> list[int]:
    """Real parts' dims, then imaginary parts', by frequency; those that do not turn come last."""
    size, rest = rotary.frequencies.numel(), list(range(2 * rotary.frequencies.numel(), head_size))
    turning = list(range(2 * size))
    real, imaginary = turning[::2], turning[1::2]
    if rotary.halves:
        real, imaginary = turning[:size], turning[size:]
    half = len(rest) // 2
    return [*real, *rest[:half], *imaginary, *rest[half:]]


def write_statistics(path: Path, statistics: Tensor) -> None:
    """Writes [layers, query heads, 3, D/2] statistics as a file of the authors'."""
    layers, heads, _, size = statistics.shape
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    stats = {
        f"layer{layer:02d}_head{head:02d}": dict(
            zip(_FIELDS, statistics[layer, head].clone().unbind(), strict=True)
        )
        for layer, head in places
    }
    metadata = {"sampled_heads": [list(place) for place in places], "head_dim": 2 * size}
    torch.save({"metadata": metadata | {"rope_style": "half"}, "stats": stats}, path)


def read_statistics(path: Path) -> Tensor:
    """Reads [layers, query heads, 3, D/2] fp32 statistics.

    Raises:
        ConfigError: the file cannot be read, has another format, lacks heads or has NaN in it.
    """
    file = io.BytesIO(read_bytes(path))
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        stats = content["stats"]
        heads: Sequence[Sequence[int]] = content["metadata"]["sampled_heads"]
        layers, width = (1 + max(place[axis] for place in heads) for axis in range(2))
        rows = [
            torch.stack([stats[f"layer{layer:02d}_head{head:02d}"][name] for name in _FIELDS])
            for layer in range(layers)
            for head in range(width)
        ]
        table = torch.stack(rows).float().unflatten(0, (layers, width))
    except Exception as error:
        reason = f"expected TriAttention's statistics of every head of every layer ({error!r})"
        raise refusal(path, reason) from None
    if not bool(table.isfinite().all()):
        raise refusal(path, "expected finite numbers")
    return table
