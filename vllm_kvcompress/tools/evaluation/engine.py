"""Asks questions of a serving engine that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_kvcompress.tools.engine_process import EngineProcess
from vllm_kvcompress.vllm_plugin.compat.config import cache_bytes_per_token
from vllm_kvcompress.vllm_plugin.compat.engine import greedy


@dataclass(frozen=True)
class Question:
    """One prompt for an engine.

    Attributes:
        context, question: token ids of the prompt's two parts.
        max_tokens: length limit of the reply.
        agnostic: compress the context before the question is read.
        predicted: measure how well `question` is predicted, instead of generating.
        num_given: first tokens of `question` whose prediction does not count.
        policy, budget: the request's own; None: the engine's.
        repetition: sent after the context in an earlier request, which prepares the context; empty:
            no preparation.
    """

    context: list[int]
    question: list[int]
    max_tokens: int
    agnostic: bool
    predicted: bool = False
    num_given: int = 1
    policy: str | None = None
    budget: float | None = None
    repetition: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """Token ids of context and question."""
        return [*self.context, *self.question]

    @property
    def extra_args(self) -> dict[str, str | float]:
        """The request's compression options (`vllm_xargs` through a server)."""
        chosen: dict[str, Any] = {"kv_policy": self.policy, "kv_budget": self.budget}
        chosen["kv_context_tokens"] = len(self.context) if self.agnostic else None
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True)
class Reply:
    """What an engine replied, and what it took.

    Attributes:
        text, tokens: the reply.
        prompt_tokens: length of the prompt.
        first_token_seconds: until the first token of the reply.
        token_seconds: mean per further token; 0 for a reply of one token.
        resident_tokens: mean per head of what the prompt holds once it is read, pages of policy
            state included.
        resident_bytes: the same over all layers and heads; 0 if unknown.
        kept_tokens: by compressed layer and KV head, what the prompt's last event kept of the full
            blocks; empty if nothing was compressed, or unknown.
        nats: mean negative log-likelihood per predicted token, without the first, which is
            predicted before the context is compressed; None for questions.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    first_token_seconds: float
    token_seconds: float
    resident_tokens: float
    resident_bytes: int = 0
    kept_tokens: list[list[int]] = field(default_factory=list)
    nats: float | None = None
    cached_tokens: int = 0


class Engine(EngineProcess):
    """An engine that answers questions; see `EngineProcess`. `settings` of None is stock vLLM."""

    def __init__(
        self, model: str, settings: dict[str, Any] | None, options: dict[str, Any], log: Path
    ) -> None:
        super().__init__(model, settings, options, log, _ask)
        self._compresses = settings is not None

    def ask(self, *questions: Question) -> list[Reply]:
        """Replies to the questions, greedy; several are asked at once.

        Raises:
            EngineError: the engine refused a question, or ended.
        """
        replies: list[Reply] = self.call((questions, self._compresses))
        return replies


def _ask(llm: Any, call: tuple[Sequence[Question], bool]) -> list[Reply]:
    """Answers questions in the engine's process."""
    from vllm_kvcompress.tools.evaluation.recorded_events import record_events, recorded_events

    questions, compresses = call
    params = [
        greedy(
            max_tokens=question.max_tokens,
            extra_args=question.extra_args if compresses else None,
            prompt_logprobs=0 if question.predicted else None,
        )
        for question in questions
    ]
    if compresses:
        llm.collective_rpc(record_events)
    prepared_by = _prepare(llm, questions) if compresses else {}
    prompts = [{"prompt_token_ids": question.prompt} for question in questions]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    events = llm.collective_rpc(recorded_events)[0] if compresses else []
    bytes_per_token = cache_bytes_per_token(llm.llm_engine.vllm_config)
    return [
        _reply(question, output, events, bytes_per_token, prepared_by.get(number))
        for number, (question, output) in enumerate(zip(questions, outputs, strict=True))
    ]


def _prepare(llm: Any, questions: Sequence[Question]) -> dict[int, str]:
    """Prepares contexts; returns the preparing request's id by the question's number."""
    prepared = {number: each for number, each in enumerate(questions) if each.repetition}
    if not prepared:
        return {}
    outputs = llm.generate(
        [{"prompt_token_ids": [*each.context, *each.repetition]} for each in prepared.values()],
        [
            greedy(max_tokens=1, extra_args=each.extra_args | {"kv_prepare": 1})
            for each in prepared.values()
        ],
        use_tqdm=False,
    )
    return {number: out.request_id for number, out in zip(prepared, outputs, strict=True)}


def _reply(
    question: Question,
    output: Any,
    events: Sequence[dict[str, Any]],
    bytes_per_token: float,
    prepared_by: str | None = None,
) -> Reply:
    """The reply from vLLM's output and the `recorded_events` of all requests."""
    prompt, choice, times = question.prompt, output.outputs[0], output.metrics
    if choice.finish_reason == "error":
        raise ValueError("a question failed in the engine; its log says why.")
    num_further = len(choice.token_ids) - 1
    resident, kept = float(len(prompt)), []
    for event in events:
        # Inside vLLM an id is the output's, a dash and a random suffix.
        request_id = event["request_id"].partition("-")[0]
        in_prompt = request_id == output.request_id and event["position"] <= len(prompt)
        if in_prompt or request_id == prepared_by:
            kept = event["kept_tokens"]
            mean = fmean(tokens for layer in kept for tokens in layer)
            mean += event["policy_state_tokens"]
            resident = mean + len(prompt) - event["compressed_tokens"]
    return Reply(
        text=choice.text,
        tokens=list(choice.token_ids),
        prompt_tokens=len(prompt),
        first_token_seconds=times.first_token_latency,
        token_seconds=(times.last_token_ts - times.first_token_ts) / max(1, num_further),
        resident_tokens=resident,
        resident_bytes=round(resident * bytes_per_token),
        kept_tokens=kept,
        nats=mean_nats(_plain(output.prompt_logprobs), question) if question.predicted else None,
        cached_tokens=output.num_cached_tokens or 0,
    )


def _plain(logprobs: list[Any]) -> list[dict[int, float]]:
    return [{token: each.logprob for token, each in (place or {}).items()} for place in logprobs]


def mean_nats(logprobs: list[dict[int, float]], question: Question) -> float:
    """Mean negative log-likelihood of `question.question`, without its first `num_given` tokens.

    `logprobs` has, by position of the prompt, those of some tokens, the prompt's own among them.
    """
    first = len(question.context) + question.num_given
    predicted = zip(logprobs[first:], question.question[question.num_given :], strict=True)
    return -fmean(place[token] for place, token in predicted)
