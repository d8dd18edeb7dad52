"""Judges whether an answer is one that its request may get."""

from __future__ import annotations

import json
import math
import re

from soak_parts.asks import Answer, Ask, Choice

CLOSE = 1e-3  # log-probabilities of two tokens that may change places


def problem(ask: Ask, answer: Answer) -> str:
    """Returns what is wrong with an answer; empty: nothing."""
    if answer.outcome == "cut":
        return "" if ask.cut is not None else "was cut, though its client stayed"
    if ask.refused:
        reason = f"{answer.outcome} {answer.reason}".strip()
        return "" if answer.outcome == "refused" else f"expected a refusal, got {reason}"
    if answer.outcome != "answered":
        return f"{answer.outcome}: {answer.reason}"
    if len(answer.choices) != ask.n:
        return f"expected {ask.n} answers, got {len(answer.choices)}"
    for choice in answer.choices:
        if reason := _problem_of(ask, choice):
            return reason
    return ""


def _problem_of(ask: Ask, choice: Choice) -> str:
    if choice.reason not in ("stop", "length"):
        return f"ended by {choice.reason}"
    if len(choice.tokens) > ask.max_tokens:
        return f"expected at most {ask.max_tokens} tokens, got {len(choice.tokens)}"
    if choice.reason == "length" and choice.tokens and len(choice.tokens) != ask.max_tokens:
        return f"ended by its length with {len(choice.tokens)} of {ask.max_tokens} tokens"
    if any(stop in choice.text for stop in ask.stop):
        return f"{choice.text!r} has a text that ends answers, of {ask.stop}"
    for place in choice.logprobs or ():
        if any(math.isnan(logprob) or logprob > 1e-4 for logprob in place.values()):
            return f"log-probabilities {place}"
    if ask.guide is not None and choice.reason == "stop" and not ask.stop:
        return _unguided(ask.guide, choice.text)
    return ""


def _unguided(guide: dict[str, object], text: str) -> str:
    """Returns how a finished answer breaks its guide; empty: it fits."""
    if "choice" in guide:
        is_right = text in guide["choice"]  # type: ignore[operator]
    elif "regex" in guide:
        is_right = re.fullmatch(str(guide["regex"]), text) is not None
    else:
        try:
            is_right = set(json.loads(text)) == {"a", "b"}
        except ValueError:
            is_right = False
    return "" if is_right else f"{text!r} is nothing that {guide} allows"


def difference(together: Choice, alone: Choice) -> tuple[int, float] | None:
    """Returns the first token that differs, and how close both are in the answer without load.

    None: they are the same.
    """
    pairs = zip(together.tokens, alone.tokens, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        if len(together.tokens) == len(alone.tokens):
            return None
        return min(len(together.tokens), len(alone.tokens)), math.inf
    assert alone.logprobs is not None
    best = sorted(alone.logprobs[place].values(), reverse=True)
    said = alone.logprobs[place].get(together.tokens[place], -math.inf)
    return place, best[0] - said
