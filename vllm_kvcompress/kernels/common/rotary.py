"""Rotary position embeddings, as far as cached keys go from one position to another."""

from __future__ import annotations

from dataclasses import dataclass

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
        size = self.frequencies.numel()
        angles = steps[..., None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.halves:
            first, second = slice(0, size), slice(size, 2 * size)
        else:
            first, second = slice(0, 2 * size, 2), slice(1, 2 * size, 2)
        a, b = keys[..., first], keys[..., second]
        rotated = keys.clone()
        rotated[..., first] = a * cos - b * sin
        rotated[..., second] = b * cos + a * sin
        return rotated
