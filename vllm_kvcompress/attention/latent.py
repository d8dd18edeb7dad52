"""Absorbed queries and outputs of MLA layers, whose cache holds one latent row per token.

row     [ c: latent vector ][ k: rotated key ]           all query heads read it
query   [ q_nope W_UK      ][ q_rope         ]           of one head, absorbed
logit   q_nope (W_UK c) + q_rope k = absorbed query * row
output  (sum of weights * c) W_UV
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def absorb(queries: Tensor, up_keys: Tensor) -> Tensor:
    """Returns [T, heads, row_size] queries that are multiplied with latent rows.

    Args:
        queries: [T, heads, nope + rope], the part without rotation first.
        up_keys: [heads, nope, value_size] projection of the latent vector to keys, transposed.
    """
    num_nope = up_keys.shape[1]
    nope, rope = queries[..., :num_nope], queries[..., num_nope:]
    latent = torch.bmm(nope.transpose(0, 1), up_keys).transpose(0, 1)
    return torch.cat((latent, rope), dim=-1)


@dataclass(frozen=True)
class AbsorbedQueries:
    """Queries of a step, of which those are absorbed that policies ask for.

        |<-- num_decoded rows: absorbed already -->|<-- rows of prompts and chunks -->|

    Attributes:
        decoded: [num_decoded, heads, row_size]; None: there are none.
        others: [T, heads, nope + rope]; None: there are none.
        up_keys: as `absorb` takes it.
    """

    decoded: Tensor | None
    others: Tensor | None
    up_keys: Tensor

    def __getitem__(self, rows: Tensor | slice, /) -> Tensor:
        """Returns the absorbed queries of [T] int64 or consecutive rows."""
        decoded, others = self.decoded, self.others
        num_decoded = 0 if decoded is None else len(decoded)
        if isinstance(rows, slice):
            end = num_decoded + (0 if others is None else len(others))
            rows = torch.arange(*rows.indices(end), device=self.up_keys.device)
        if others is None:
            assert decoded is not None
            return decoded[rows]
        absorbed = absorb(others[(rows - num_decoded).clamp_min(0)], self.up_keys)
        if decoded is None:
            return absorbed
        is_decoded = (rows < num_decoded)[:, None, None]
        return torch.where(is_decoded, decoded[rows.clamp_max(num_decoded - 1)], absorbed)
