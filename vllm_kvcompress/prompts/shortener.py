"""Shortens the texts of chat requests, and caches what the classifier said of each."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.messages import Slot, slots
from vllm_kvcompress.prompts.settings import MIN_RATE, REQUEST_RATE, PromptSettings
from vllm_kvcompress.prompts.words import ScoredText

MAX_CHARACTERS = 8_000_000  # of cached texts; about 4 bytes each
_CHARACTERS_PER_TEXT = 256  # overhead of each
_XARGS = "vllm_xargs"
_CONTEXT_TOKENS = "kv_context_tokens"


@dataclass
class Work:
    """Work done for one request.

    Attributes:
        source_tokens: classifier tokens of the texts that were to be shortened.
        kept_tokens: how many of those were kept.
        num_scored, num_remembered: texts that the classifier read now, and before.
        salt: the request's cache_salt, which separates cached texts of different users.
        texts: the classifier's scores by text.
    """

    source_tokens: int = 0
    kept_tokens: int = 0
    num_scored: int = 0
    num_remembered: int = 0
    salt: str = ""
    texts: dict[str, ScoredText] = field(default_factory=dict)


class PromptShortener:
    """Shortens requests; may be used by several threads at once.

    Args:
        settings: the operator's settings.
        score: scores the words of a text.
        max_characters: most characters of cached texts.
    """

    def __init__(
        self,
        settings: PromptSettings,
        score: Callable[[str], ScoredText],
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._settings = settings
        self._score = score
        self._max_characters = max_characters
        self._cache: OrderedDict[tuple[str, str], ScoredText] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def rewrite(self, raw: bytes) -> tuple[bytes, Work]:
        """Shortens the texts in a request's body; an invalid body is left for vLLM to refuse.

        Raises:
            ConfigError: the request asks for what the server does not allow.
        """
        work = Work()
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return raw, work
        if not isinstance(body, dict):
            return raw, work
        work.salt = str(body.get("cache_salt") or "")
        rate, changed = self._take_rate(body)
        changed |= self._shorten(body, rate, work)
        return (json.dumps(body).encode() if changed else raw), work

    def _take_rate(self, body: dict[str, Any]) -> tuple[float | None, bool]:
        """Takes the rate that a request asks for out of it; returns it, and whether it asked."""
        given = body.get(_XARGS)
        if not isinstance(given, dict):
            return None, False
        if given.get(_CONTEXT_TOKENS) is not None:
            raise ConfigError(
                f"vllm_xargs {_CONTEXT_TOKENS}: this server shortens the messages of chats, so "
                "the number of tokens of a context is not known before; leave it out, or send a "
                "prompt to /v1/completions, which is not shortened."
            )
        if REQUEST_RATE not in given:
            return None, False
        return self._settings.request_rate(given.pop(REQUEST_RATE)), True

    def _shorten(self, body: dict[str, Any], asked: float | None, work: Work) -> bool:
        """Shortens a request's texts in place; returns whether any has changed."""
        rate = self._settings.rate if asked is None else asked
        texts = list(slots(body))
        if asked is None and self._settings.target_tokens is not None:
            rate = self._rate_for_target(texts, work)
        changed = False
        for slot in texts:
            parts = [
                text if role is None else self._shortened(text, role, rate, work)
                for role, text in slot.parts
            ]
            new = "".join(parts)
            changed |= new != slot.holder[slot.key]
            slot.holder[slot.key] = new
        return changed

    def _rate_for_target(self, texts: list[Slot], work: Work) -> float:
        """The rate that cuts all texts without a rate of their own down to the target."""
        total = 0
        for role, text in (part for slot in texts for part in slot.parts):
            has_own_rate = role is None or self._settings.rate_of(role, 0.0) > 0.0
            if not has_own_rate and self._may_be_shortened(text.strip()):
                total += self._scored(text.strip(), work).num_tokens
        target = self._settings.target_tokens or 0
        return max(MIN_RATE, min(1.0, target / total)) if total else 1.0

    def _shortened(self, text: str, role: str, rate: float, work: Work) -> str:
        """Shortens one text, but not the spaces around it; a rate of 1 skips the classifier."""
        rate = self._settings.rate_of(role, rate)
        core = text.strip()
        if rate >= 1.0 or not self._may_be_shortened(core):
            return text
        scored = self._scored(core, work)
        short, num_kept = scored.shortened(core, rate)
        work.source_tokens += scored.num_tokens
        work.kept_tokens += num_kept
        before = text[: len(text) - len(text.lstrip())]
        return before + short + text[len(before) + len(core) :]

    def _may_be_shortened(self, text: str) -> bool:
        """False for texts below the limit, and for invalid ones (half of a surrogate pair)."""
        if len(text) < max(1, self._settings.min_tokens):
            return False
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
        return True

    def _scored(self, text: str, work: Work) -> ScoredText:
        """Scores of a text, from the cache or from the classifier."""
        if text in work.texts:
            return work.texts[text]
        key = (work.salt, text)
        with self._lock:
            scored = self._cache.get(key)
            if scored is not None:
                self._cache.move_to_end(key)
        if scored is not None:
            work.num_remembered += 1
        else:
            scored = self._score(text)
            work.num_scored += 1
            self._remember(key, scored)
        work.texts[text] = scored
        return scored

    def _remember(self, key: tuple[str, str], scored: ScoredText) -> None:
        """Caches a text's scores, and drops those that were not used for longest."""
        with self._lock:
            if key not in self._cache:
                self._cache[key] = scored
                self._num_characters += _size(key)
            while self._num_characters > self._max_characters:
                oldest, _ = self._cache.popitem(last=False)
                self._num_characters -= _size(oldest)


def _size(key: tuple[str, str]) -> int:
    return sum(map(len, key)) + _CHARACTERS_PER_TEXT
