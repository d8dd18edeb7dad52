"""Rotary position embeddings, as far as policies turn cached keys from one position to another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_kvcompress.kernels.common.rotary import Turns, turn


@dataclass(frozen=True)
class Rotary:
    """Frequencies that do not depend on the length of a sequence.

    A cached key is turned by the difference of two positions, so that a magnitude that some
    variants (YaRN) multiply keys with stays what it is.

    Attributes:
        frequencies: [r / 2] fp32 radians per position; the other dims are not rotary.
        halves: pairs are dims i and i + r / 2 (else 2 i and 2 i + 1).
    """

    frequencies: Tensor
    halves: bool = True

    def turn(self, keys: Tensor, steps: Tensor) -> Tensor:
        """Keys [..., D] fp32 as they would be `steps` [...] positions later."""
        return turn(keys, self.turns(steps))

    def turns(self, steps: Tensor) -> Turns:
        """Turns by so many positions, for kernels."""
        return Turns(steps, self.frequencies, self.halves)
