"""One question of an evaluation, whatever it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """One question about one context, or a text whose continuation is predicted.

    Attributes:
        context: what may be compressed before the question is known.
        question: text behind the context.
        answers: references that the metric compares with.
        metric: a name in METRICS.
        max_tokens: limit of the reply.
        task: the task's name, for the tables.
        length: nominal tokens of the context, for the tables; 0: its own length.
        answer_prefix: given beginning of the reply.
        depth: relative position of the only needle in the context, from 0 to 1; None: not one.
        separator: text between context and question.
        chat: whether a chat model's template goes around them.
        may_cut: whether the middle of a context that is too long for the model is left out.
        continuation: tokens of `context` behind the first `length` that are predicted instead of
            an answer; 0 for questions.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_tokens: int
    task: str = ""
    length: int = 0
    answer_prefix: str = ""
    depth: float | None = None
    separator: str = "\n"
    chat: bool = True
    may_cut: bool = False
    continuation: int = 0
