"""A serving engine in a process of its own, which answers questions one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_kvcompress.config import CONTEXT_TOKENS, REQUEST_BUDGET, REQUEST_POLICY
from vllm_kvcompress.tools.engine_process import EngineProcess


@dataclass(frozen=True)
class Question:
    """One prompt for an engine.

    Attributes:
        context: token ids that come first.
        question: those that follow.
        max_tokens: of the reply.
        agnostic: compress the context before the question is read.
        measured: also measure what attention loses; the times then include that.
        predicted: say how well `question` is predicted, instead of what follows it.
        policy, budget: instead of the engine's own; None: those.
    """

    context: list[int]
    question: list[int]
    max_tokens: int
    agnostic: bool
    measured: bool = False
    predicted: bool = False
    policy: str | None = None
    budget: float | None = None

    @property
    def extra_args(self) -> dict[str, str | float]:
        """What the request says of its compression (`vllm_xargs` through a server)."""
        chosen = {REQUEST_POLICY: self.policy, REQUEST_BUDGET: self.budget}
        chosen[CONTEXT_TOKENS] = len(self.context) if self.agnostic else None
        return {name: value for name, value in chosen.items() if value is not None}


@dataclass(frozen=True)
class Reply:
    """What an engine said, and what it took.

    Attributes:
        text: the reply.
        tokens: its ids.
        prompt_tokens: of the whole prompt.
        first_token_seconds: until the first token of the reply.
        token_seconds: per further token, in the mean; 0 for a reply of one token.
        resident_tokens: per head, in the mean, what the prompt holds once it has been read; what a
            policy carries counts, by the pages that it takes.
        resident_bytes: the same of all layers and heads; 0 where nobody can tell.
        kept_tokens: by compressed layer and KV head, what the last event of the prompt kept of
            the full blocks; empty where nothing was compressed, or nobody can tell.
        attention_error, attention_mass: by layer and query head, what `AttentionLoss` says of
            the queries after the first event; empty likewise, and where it was not measured.
        nats: per token, the mean negative log-likelihood of what was to be predicted; without its
            first token, which is predicted before the context is compressed. None for questions.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    first_token_seconds: float
    token_seconds: float
    resident_tokens: float
    resident_bytes: int = 0
    kept_tokens: list[list[int]] = field(default_factory=list)
    attention_error: list[list[float]] = field(default_factory=list)
    attention_mass: list[list[float]] = field(default_factory=list)
    nats: float | None = None


class Engine(EngineProcess):
    """An engine that answers questions; as `EngineProcess`.

    Args:
        model: name or directory.
        settings: ours, or None for stock vLLM.
        options: further keyword arguments of `vllm.LLM`.
        log: takes what the engine prints.
    """

    def __init__(
        self, model: str, settings: dict[str, Any] | None, options: dict[str, Any], log: Path
    ) -> None:
        super().__init__(model, settings, options, log, _answer)
        self._compresses = settings is not None

    def ask(self, question: Question) -> Reply:
        """One reply, greedy.

        Raises:
            EngineError: the engine refused the question, or ended.
        """
        return Reply(**self.call((vars(question), self._compresses)))


def _answer(llm: Any, call: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    """In the engine's process."""
    question, compresses = call
    return vars(_ask(llm, Question(**question), compresses))


def _ask(llm: Any, question: Question, compresses: bool) -> Reply:
    from vllm import SamplingParams

    from vllm_kvcompress.tools.evaluation.observer import watch, watched
    from vllm_kvcompress.vllm_plugin.compat import cache_bytes_per_token

    prompt = [*question.context, *question.question]
    params = SamplingParams(
        temperature=0,
        max_tokens=question.max_tokens,
        extra_args=question.extra_args if compresses else None,
        prompt_logprobs=0 if question.predicted else None,
    )
    if compresses:
        llm.collective_rpc(watch, args=(question.measured,))
    output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    choice, times = output.outputs[0], output.metrics
    further = len(choice.token_ids) - 1
    seen = llm.collective_rpc(watched)[0] if compresses else {}
    resident, kept = float(len(prompt)), []
    for event in seen.get("events", ()):
        if event["position"] <= len(prompt):
            kept = event["kept_tokens"]
            mean = fmean(tokens for layer in kept for tokens in layer)
            mean += event["policy_state_tokens"]
            resident = mean + len(prompt) - event["compressed_tokens"]
    return Reply(
        text=choice.text,
        tokens=list(choice.token_ids),
        prompt_tokens=len(prompt),
        first_token_seconds=times.first_token_latency,
        token_seconds=(times.last_token_ts - times.first_token_ts) / further if further else 0.0,
        resident_tokens=resident,
        resident_bytes=round(resident * cache_bytes_per_token(llm.llm_engine.vllm_config)),
        kept_tokens=kept,
        attention_error=_rounded(seen.get("errors", [])),
        attention_mass=_rounded(seen.get("masses", [])),
        nats=_nats(output.prompt_logprobs, question) if question.predicted else None,
    )


def _nats(logprobs: list[Any], question: Question) -> float:
    """Of vLLM's log-probabilities of a prompt."""
    plain = [{token: said.logprob for token, said in (each or {}).items()} for each in logprobs]
    return mean_nats(plain, question)


def mean_nats(logprobs: list[dict[int, float]], question: Question) -> float:
    """Mean negative log-likelihood of what follows the context, without its first token.

    Args:
        logprobs: by position of the prompt, of some tokens and the prompt's own one.
        question: its `question` is what is predicted.
    """
    first = len(question.context) + 1
    found = zip(logprobs[first:], question.question[1:], strict=True)
    return -fmean(said[token] for said, token in found)


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(value, 5) for value in row] for row in rows]
