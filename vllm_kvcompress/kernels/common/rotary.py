"""Rotary position embeddings: cached keys moved from one position to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotary frequencies, which do not depend on the length of a sequence.

    A cached key is re-rotated by the difference of two positions, so a magnitude that some
    variants (YaRN) multiply keys with stays as it is.

    Attributes:
        frequencies: [r / 2] fp32 radians per position; dims from r on are not rotary.
        halves: pairs are dims i and i + r / 2 (else 2 i and 2 i + 1).
    """

    frequencies: Tensor
    halves: bool = True

    def rerotate(self, keys: Tensor, steps: Tensor) -> Tensor:
        """Moves keys [..., D] fp32 by `steps` [...] positions (a copy)."""
        return self.turned(keys, self.turn(steps))

    def turn(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """[..., r / 2] fp32 cosines and sines of `steps` positions."""
        angles = steps[..., None].float() * self.frequencies
        return angles.cos(), angles.sin_()

    def turned(self, keys: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates keys [..., D] fp32 by the cosines and sines of `turn` (a copy)."""
        cos, sin = turn
        first, second = self._pairs()
        turned = keys.clone()
        turned[..., first].mul_(cos).addcmul_(keys[..., second], sin, value=-1)
        turned[..., second].mul_(cos).addcmul_(keys[..., first], sin)
        return turned

    def averaged(self, num_positions: int, head_size: int) -> Tensor:
        """[D, D] fp32 matrix that averages a row over `num_positions`, its own first."""
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
        """Dims of the first and the second coordinates of pairs."""
        size = self.frequencies.numel()
        if self.halves:
            return slice(0, size), slice(size, 2 * size)
        return slice(0, 2 * size, 2), slice(1, 2 * size, 2)
