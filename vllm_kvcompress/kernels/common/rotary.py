"""Rotary position embeddings, as far as cached keys go from one position to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Frequencies that do not depend on the length of a sequence.

    A cached key is re-rotated by the difference of two positions, so that a magnitude that some
    variants (YaRN) multiply keys with stays what it is.

    Attributes:
        frequencies: [r / 2] fp32 radians per position; dims from r on are not rotary.
        halves: pairs are dims i and i + r / 2 (else 2 i and 2 i + 1).
    """

    frequencies: Tensor
    halves: bool = True

    def rerotate(self, keys: Tensor, steps: Tensor) -> Tensor:
        """Keys [..., D] fp32 as they would be `steps` [...] positions later."""
        angles = steps[..., None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = self._pairs()
        a, b = keys[..., first], keys[..., second]
        rotated = keys.clone()
        rotated[..., first] = a * cos - b * sin
        rotated[..., second] = b * cos + a * sin
        return rotated

    def averaged(self, num_positions: int, head_size: int) -> Tensor:
        """[D, D] fp32: rows times it are their mean over the next positions, the present first."""
        steps = torch.arange(num_positions, device=self.frequencies.device)
        rows = torch.eye(head_size, device=self.frequencies.device)
        angles = steps[:, None] * self.frequencies
        cos, sin = angles.cos().mean(dim=0), angles.sin().mean(dim=0)
        first, second = self._pairs()
        a, b = rows[:, first], rows[:, second]
        turned = rows.clone()
        turned[:, first] = a * cos - b * sin
        turned[:, second] = b * cos + a * sin
        return turned

    def _pairs(self) -> tuple[slice, slice]:
        """Dims of pairs' first and second coordinates."""
        size = self.frequencies.numel()
        if self.halves:
            return slice(0, size), slice(size, 2 * size)
        return slice(0, 2 * size, 2), slice(1, 2 * size, 2)
