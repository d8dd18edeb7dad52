"""Where a request's reasoning ends: the first `</think>`, or whatever the model writes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.vllm_plugin.compat.config import reasoning_end_ids

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class ReasoningEnd:
    """Finds the end of reasoning among generated tokens.

    Attributes:
        token_ids: tokens that end it.
        most_new: tokens that a step generates at most.
    """

    token_ids: tuple[int, ...]
    most_new: int = 1

    @classmethod
    def of(cls, config: VllmConfig, settings: Settings) -> Self | None:
        """Returns what the settings need; None: no event depends on it."""
        if settings.after_reasoning is None:
            return None
        drafts = config.speculative_config
        most_new = 1 if drafts is None else 1 + drafts.num_speculative_tokens
        return cls(reasoning_end_ids(config), most_new)

    def find(self, request: Request) -> int | None:
        """Returns the request's logical tokens up to the end, inclusive; None: not generated."""
        return self._find_from(request, request.num_prompt_tokens)

    def find_new(self, request: Request) -> int | None:
        """Returns the same, if the end is among the tokens of the request's last step."""
        first = request.num_tokens - self.most_new - len(self.token_ids) + 1
        return self._find_from(request, max(request.num_prompt_tokens, first))

    def _find_from(self, request: Request, start: int) -> int | None:
        tokens, width = tuple(request.all_token_ids[start:]), len(self.token_ids)
        for first in range(len(tokens) - width + 1):
            if tokens[first : first + width] == self.token_ids:
                return start + first + width
        return None
