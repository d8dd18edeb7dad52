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
        frequencies: [r / 2] fp32 radians per position of the r rotary dims.
        halves: pairs are rotary dims i and i + r / 2 (else 2 i and 2 i + 1).
        first: the first rotary dim; those before and behind them are not rotary.
    """

    frequencies: Tensor
    halves: bool = True
    first: int = 0

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
        start, size = self.first, self.frequencies.numel()
        end = start + 2 * size
        first, second = slice(start, end, 2), slice(start + 1, end, 2)
        if self.halves:
            first, second = slice(start, start + size), slice(start + size, end)
        turned = keys.clone()
        turned[..., first].mul_(cos).addcmul_(keys[..., second], sin, value=-1)
        turned[..., second].mul_(cos).addcmul_(keys[..., first], sin)
        return turned

    def averaged(self, num_positions: int, head_size: int) -> Tensor:
        """[D, D] fp32 matrix that averages a row over `num_positions`, its own first."""
        device = self.frequencies.device
        cos, sin = self.turn(torch.arange(num_positions, device=device))
        rows = torch.eye(head_size, device=device)
        return self.turned(rows, (cos.mean(dim=0), sin.mean(dim=0)))
