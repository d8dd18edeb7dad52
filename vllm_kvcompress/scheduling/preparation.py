"""Requests that prepare a context for later ones: what comes behind it says what to keep of it.

logical tokens   0 ........... context ................................ prompt
                 [ compressed at the prompt's end ][ what scores it     ]
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
    """

    context_tokens: int = 0

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
        """The context: the queries of what follows are what it is scored by."""
        return self.context_tokens

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
