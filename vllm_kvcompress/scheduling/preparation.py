"""Requests that prepare a context for later ones: what comes behind it says what to keep of it.

logical tokens   0 ........... context ................................ prompt
                 [ compressed at the prompt's end ][ what scores it     ]
chunks           [ any ][ any ][ up to there      ][ two or more ][ .. ]

While a context is scored there is a number for each of its tokens in every layer and head. Servers
have room for the longest request's; so some requests wait at the end of their context for others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_kvcompress.scheduling.ledger import Decision, RequestLedger
from vllm_kvcompress.scheduling.rule import TRIGGER_PREPARE, CompressionRule


@dataclass
class PreparationLedger(RequestLedger):
    """Of a request whose one event, at the prompt's end, compresses its beginning alone.

    To the blocks that an ordinary request which names the same context would leave of it.

    Attributes:
        context_tokens: that are compressed; whole blocks.
        is_scored: what follows the context is being read, or was.
    """

    context_tokens: int = 0
    is_scored: bool = False

    @classmethod
    def of(
        cls, rule: CompressionRule, policy: str, context_tokens: int, num_prompt_tokens: int
    ) -> PreparationLedger:
        """For a request whose context would else be compressed by `rule`."""
        own = replace(
            rule,
            at_prompt_end=True,
            chunk_tokens=None,
            decode_tokens=None,
            pressure_mark=None,
            window_size=0,
            window_blocks=0,
        )
        return cls(
            num_prompt_tokens,
            own,
            policy,
            num_prompt_tokens=num_prompt_tokens,
            context_tokens=context_tokens,
        )

    @property
    def max_prefix_hit(self) -> int | None:
        """What ends before it is scored: of what follows no query may be missing."""
        return self.scored_from - 1

    @property
    def scored_from(self) -> int:
        """Where the first chunk begins that scores it: at its end, or two tokens from the prompt's.

        A lone token would look like one that is generated, and nobody would see its query where a
        CUDA graph is replayed.
        """
        return min(self.context_tokens, self.num_prompt_tokens - 2)

    def chunk(self, start: int, num_tokens: int) -> int:
        """How many of the next `num_tokens` are read together, so that none is left over alone."""
        if start < self.scored_from:
            return min(num_tokens, self.scored_from - start)
        leaves_one = start + num_tokens == self.num_prompt_tokens - 1
        return num_tokens - (leaves_one and num_tokens > 2)

    def end_of_event(self, position: int) -> int:
        """The context."""
        return self.context_tokens

    def decide(self, position: int, under_pressure: bool = False) -> Decision | None:
        """At the prompt's end what happens to a context, and nothing anywhere else."""
        if position != self.compress_at:
            return None
        end = self.context_tokens
        decision = RequestLedger(end, self.rule).decide(end)
        return None if decision is None else replace(decision, trigger=TRIGGER_PREPARE)

    def commit(self, position: int, num_kept_blocks: int) -> None:
        """Records the event as one at the context's end, where later requests begin with it."""
        super().commit(self.context_tokens, num_kept_blocks)
