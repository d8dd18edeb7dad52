"""Shortens the texts of chat requests, and remembers what it made of a text."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.messages import Slot, slots
from vllm_kvcompress.prompts.settings import LEAST_RATE, REQUEST_RATE, PromptSettings
from vllm_kvcompress.prompts.words import ScoredText

MOST_CHARACTERS = 8_000_000  # of remembered texts; about 4 bytes each
_CHARACTERS_PER_TEXT = 256  # what a short one takes besides
_XARGS = "vllm_xargs"
_CONTEXT_TOKENS = "kv_context_tokens"


@dataclass
class Work:
    """What was done for a request.

    Attributes:
        source_tokens: of the texts that were to be shortened, as the classifier counts them.
        kept_tokens: of those, that stayed.
        num_scored, num_remembered: texts that the classifier read, and that it had read before.
        salt: the request's cache_salt: what is remembered of one is not found by another.
        texts: what the classifier said of each.
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
        settings: what the operator allows.
        score: what becomes of a text, by its words.
        most_characters: of the texts that are remembered.
    """

    def __init__(
        self,
        settings: PromptSettings,
        score: Callable[[str], ScoredText],
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        self._settings = settings
        self._score = score
        self._most = most_characters
        self._known: OrderedDict[tuple[str, str], ScoredText] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def rewrite(self, raw: bytes) -> tuple[bytes, Work]:
        """A request's body with shorter texts; what is no chat request is left for vLLM to refuse.

        Raises:
            ConfigError: it asks for what the server does not allow.
        """
        work = Work()
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return raw, work
        if not isinstance(body, dict):
            return raw, work
        work.salt = str(body.get("cache_salt") or "")
        rate, changed = self._asked(body)
        changed |= self._shorten(body, rate, work)
        return (json.dumps(body).encode() if changed else raw), work

    def _asked(self, body: dict[str, Any]) -> tuple[float | None, bool]:
        """The rate that a request asks for, which is taken out, and whether it did."""
        given = body.get(_XARGS)
        if not isinstance(given, dict):
            return None, False
        if given.get(_CONTEXT_TOKENS) is not None:
            raise ConfigError(
                f"vllm_xargs {_CONTEXT_TOKENS}: this server shortens the messages of chats, so "
                "nobody knows how many tokens a context will have; leave it out, or send a prompt "
                "to /v1/completions, which is not shortened."
            )
        if REQUEST_RATE not in given:
            return None, False
        return self._settings.request_rate(given.pop(REQUEST_RATE)), True

    def _shorten(self, body: dict[str, Any], asked: float | None, work: Work) -> bool:
        """Shortens what a request holds; returns whether anything is another text now."""
        rate = self._settings.rate if asked is None else asked
        found = list(slots(body))
        if asked is None and self._settings.target_tokens is not None:
            rate = self._rate_for_target(found, work)
        changed = False
        for slot in found:
            parts = [
                text if role is None else self._shortened(text, role, rate, work)
                for role, text in slot.parts
            ]
            new = "".join(parts)
            changed |= new != slot.holder[slot.key]
            slot.holder[slot.key] = new
        return changed

    def _rate_for_target(self, found: list[Slot], work: Work) -> float:
        """The rate with which all texts that go by the request's come down to the target."""
        total = 0
        for role, text in (part for slot in found for part in slot.parts):
            has_own_rate = role is None or self._settings.rate_of(role, 0.0) > 0.0
            if not has_own_rate and self._may_be_shortened(text.strip()):
                total += self._scored(text.strip(), work).num_tokens
        target = self._settings.target_tokens or 0
        return max(LEAST_RATE, min(1.0, target / total)) if total else 1.0

    def _shortened(self, text: str, role: str, rate: float, work: Work) -> str:
        """One text, with the spaces around it; at a rate of 1 nothing looks at it."""
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
        """Not what is shorter than the limit anyhow, or no text (half of a surrogate pair)."""
        if len(text) < max(1, self._settings.min_tokens):
            return False
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
        return True

    def _scored(self, text: str, work: Work) -> ScoredText:
        """What the classifier says of a text, now or before."""
        if text in work.texts:
            return work.texts[text]
        key = (work.salt, text)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is not None:
            work.num_remembered += 1
        else:
            known = self._score(text)
            work.num_scored += 1
            self._remember(key, known)
        work.texts[text] = known
        return known

    def _remember(self, key: tuple[str, str], scored: ScoredText) -> None:
        """Keeps what was said of a text, and forgets of what nobody has asked for longest."""
        with self._lock:
            if key not in self._known:
                self._known[key] = scored
                self._held += _size(key)
            while self._held > self._most:
                forgotten, _ = self._known.popitem(last=False)
                self._held -= _size(forgotten)


def _size(key: tuple[str, str]) -> int:
    return sum(map(len, key)) + _CHARACTERS_PER_TEXT
