"""Where prompts are cut into the chunks whose queries choose together what they read.

tokens    0 ................ num_whole ....... + chunk ....... + chunk ... end
          [ read whole, in    ][ one step      ][ one step      ][ one   ]
            steps of any size

So a token's key and value follow from those before it alone, whatever else is served and cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.read_rule import ReadRule


@dataclass(frozen=True)
class PromptChunks:
    """The chunks of all prompts of a server whose prefill reads a part.

    Attributes:
        size: tokens of a chunk but for a prompt's last one; whole blocks.
        num_whole: first tokens of a prompt, none of whose chunks reads less than there is.
    """

    size: int
    num_whole: int

    @classmethod
    def of(cls, rule: ReadRule | None, block_size: int) -> Self | None:
        """None: prompts are read whole."""
        if rule is None or not rule.prefill_tokens:
            return None
        size = ceil_div(rule.prefill_tokens, block_size) * block_size
        least = rule.of_chunk(size).reads_less_from(block_size)
        return cls(size, (least - 1) // size * size)

    def next_step(self, start: int, end: int, most: int) -> int:
        """Tokens of a prompt that a step reads; 0: a chunk does not fit into this one.

        Args:
            start: tokens that have been read.
            end: of the prompt.
            most: tokens that the step has room for.
        """
        if start < self.num_whole:
            return min(most, min(end, self.num_whole) - start)
        wanted = min(end, (start // self.size + 1) * self.size) - start
        return wanted if wanted <= most else 0

    def num_shared(self, num_tokens: int) -> int:
        """Of so many tokens those that are the same for every prompt that begins with them."""
        return num_tokens if num_tokens <= self.num_whole else num_tokens // self.size * self.size
