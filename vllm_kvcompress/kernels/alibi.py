"""Attention with biases by distance (ALiBi), of entries that may be at any positions.

S = sequences (one KV head of one request each), H = KV heads, G = query heads of each, m = queries,
n = entries, D = head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASK_BYTES = 1 << 26  # of the logits of one call


@dataclass(frozen=True)
class Alibi:
    """Bias of attention logits by distance (Press et al., arXiv 2108.12409).

        logits[i, j] = scale * q[i] . k[j] - slope * (i - j)     for positions i >= j
        logits[i, j] = scale * q[i] . k[j] - slope * sqrt(i - j)        with roots (Step 1)

    Attributes:
        slopes: [H, G] fp32 slope of each query head.
        with_roots: whether square roots of distances count.
    """

    slopes: Tensor
    with_roots: bool = False

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns the [S, G, m, n] fp32 bias of logits, the H heads of a request side by side.

        Args:
            queries: [S, m] positions of the queries.
            keys: [S, n] positions of the keys; behind a query's they count as at its place.
        """
        distances = (queries[:, :, None] - keys[:, None]).clamp_min(0).float()
        if self.with_roots:
            distances = distances.sqrt()
        slopes = self.slopes.repeat(len(keys) // len(self.slopes), 1)
        return -slopes[..., None, None] * distances[:, None]


def attention_by_distance(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    ends: Tensor,
    scale: float,
    alibi: Alibi,
) -> Tensor:
    """Attention of each sequence's last m tokens to the entries that are not behind them.

    Args:
        queries: [S, G, m, D] of tokens at the positions ends - m to ends - 1.
        keys, values: [S, n, D] finite numbers.
        positions: [S, n] of the entries; at least `ends` where there is none.
        ends: [S] tokens of each sequence.
        scale: softmax scale.
        alibi: the model's biases.

    Returns:
        [S, G, m, D] in the queries' type.
    """
    num_sequences, group, num_queries, _ = queries.shape
    outputs = torch.empty_like(queries)
    own = ends[:, None] - torch.arange(num_queries, 0, -1, device=ends.device)
    keys, values = keys[:, None].float(), values[:, None].float()
    tile = max(1, MASK_BYTES // (4 * num_sequences * group * positions.shape[1]))
    for start in range(0, num_queries, tile):
        part = slice(start, start + tile)
        logits = scale * queries[:, :, part].float() @ keys.mT + alibi.bias(own[:, part], positions)
        hidden = positions[:, None] > own[:, part, None]
        weights = logits.masked_fill_(hidden[:, None], -torch.inf).softmax(dim=-1)
        outputs[:, :, part] = weights @ values
    return outputs
