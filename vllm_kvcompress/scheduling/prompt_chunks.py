"""Prompt chunks: where prompts are cut if the queries of a chunk choose together what they read.

tokens    0 ........... num_read_fully ....... + chunk ....... + chunk ... end
          [ reads all before  ][ one step      ][ one step      ][ one   ]
            it, any step sizes

So a token's key and value follow from the tokens before it alone, whatever else is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.read_rule import ReadRule


@dataclass(frozen=True)
class PromptChunks:
    """Chunks of all prompts of a server whose prefill reads a part.

    Attributes:
        size: tokens of a chunk, in full blocks; a prompt's last chunk may be shorter.
        num_read_fully: leading tokens of a prompt, whose chunks all read everything before them.
    """

    size: int
    num_read_fully: int

    @classmethod
    def of(cls, rule: ReadRule | None, block_size: int) -> Self | None:
        """Derives the chunks from a read rule; None: prefill reads everything."""
        if rule is None or not rule.prefill_tokens:
            return None
        size = ceil_div(rule.prefill_tokens, block_size) * block_size
        first_partial = rule.of_chunk(size).reads_less_from(block_size)
        return cls(size, (first_partial - 1) // size * size)

    def next_step(self, start: int, end: int, max_tokens: int) -> int:
        """Counts the prompt tokens that a step reads; 0: a chunk does not fit into this step.

        Args:
            start: tokens that have been read.
            end: tokens of the prompt.
            max_tokens: tokens that the step has room for.
        """
        if start < self.num_read_fully:
            return min(max_tokens, min(end, self.num_read_fully) - start)
        wanted = min(end, (start // self.size + 1) * self.size) - start
        return wanted if wanted <= max_tokens else 0

    def num_shared(self, num_tokens: int) -> int:
        """Counts leading tokens whose KV every prompt with the same `num_tokens` can share."""
        if num_tokens <= self.num_read_fully:
            return num_tokens
        return num_tokens // self.size * self.size
