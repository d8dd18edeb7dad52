"""A serving engine in a process of its own, which answers questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_kvcompress.tools.engine_process import EngineProcess


@dataclass(frozen=True)
class Question:
    """One prompt for an engine.

    Attributes:
        context: token ids that come first.
        question: those that follow.
        max_tokens: of the reply.
        agnostic: compress the context before the question is read.
        measured: also measure what attention loses, unless others are asked at the same time; the
            times then include that.
        predicted: say how well `question` is predicted, instead of what follows it.
        num_given: first tokens of `question` whose prediction does not count.
        policy, budget: instead of the engine's own; None: those.
        repetition: behind the context in a request of its own, which prepares it first; empty:
            nobody prepares it.
    """

    context: list[int]
    question: list[int]
    max_tokens: int
    agnostic: bool
    measured: bool = False
    predicted: bool = False
    num_given: int = 1
    policy: str | None = None
    budget: float | None = None
    repetition: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """Its token ids."""
        return [*self.context, *self.question]

    @property
    def extra_args(self) -> dict[str, str | float]:
        """What the request says of its compression (`vllm_xargs` through a server)."""
        chosen: dict[str, Any] = {"kv_policy": self.policy, "kv_budget": self.budget}
        chosen["kv_context_tokens"] = len(self.context) if self.agnostic else None
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
        attention_heads: the other figures of `AttentionLoss`, by name, likewise.
        nats: per token, the mean negative log-likelihood of what was to be predicted; without its
            first token, which is predicted before the context is compressed. None for questions.
        cached_tokens: of the prompt, that the engine did not read.
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
    attention_heads: dict[str, list[list[float]]] = field(default_factory=dict)
    nats: float | None = None
    cached_tokens: int = 0


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

    def ask(self, *questions: Question) -> list[Reply]:
        """A reply to each question, greedy; several are asked at once.

        Raises:
            EngineError: the engine refused a question, or ended.
        """
        call = [vars(question) for question in questions], self._compresses
        return [Reply(**reply) for reply in self.call(call)]


def _answer(llm: Any, call: tuple[list[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """In the engine's process."""
    questions, compresses = call
    return [vars(reply) for reply in _ask(llm, [Question(**q) for q in questions], compresses)]


def _cache_bytes_per_token(vllm_config: Any) -> int:
    """Of all ranks together, as if no layer had a window."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    numbers = 2 * model.get_total_num_kv_heads() * model.get_head_size()
    found: int = model.get_total_num_hidden_layers() * numbers * dtype.itemsize
    return found


def _ask(llm: Any, questions: Sequence[Question], compresses: bool) -> list[Reply]:
    from vllm_kvcompress.tools.evaluation.observer import watch, watched

    params = [
        _sampling(
            max_tokens=question.max_tokens,
            extra_args=question.extra_args if compresses else None,
            prompt_logprobs=0 if question.predicted else None,
        )
        for question in questions
    ]
    if compresses:
        measured = len(questions) == 1 and questions[0].measured
        llm.collective_rpc(watch, args=(measured,))
    prepared_by = _prepare(llm, questions) if compresses else {}
    prompts = [{"prompt_token_ids": question.prompt} for question in questions]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seen = llm.collective_rpc(watched)[0] if compresses else {}
    bytes_per_token = _cache_bytes_per_token(llm.llm_engine.vllm_config)
    return [
        _reply(question, output, seen, bytes_per_token, prepared_by.get(number))
        for number, (question, output) in enumerate(zip(questions, outputs, strict=True))
    ]


def _sampling(**options: Any) -> Any:
    """vLLM's `SamplingParams`, greedy."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, **options)


def _prepare(llm: Any, questions: Sequence[Question]) -> dict[int, str]:
    """Has contexts prepared that are to be; by number of the question who has done it."""
    asking = [number for number, question in enumerate(questions) if question.repetition]
    if not asking:
        return {}
    mine = [questions[number] for number in asking]
    outputs = llm.generate(
        [{"prompt_token_ids": [*each.context, *each.repetition]} for each in mine],
        [_sampling(max_tokens=1, extra_args=each.extra_args | {"kv_prepare": 1}) for each in mine],
        use_tqdm=False,
    )
    done = [output.request_id for output in outputs]
    return dict(zip(asking, done, strict=True))


def _reply(
    question: Question,
    output: Any,
    seen: dict[str, Any],
    bytes_per_token: float,
    prepared_by: str | None = None,
) -> Reply:
    """Of vLLM's output, and of what was seen of all that were asked with it."""
    prompt, choice, times = question.prompt, output.outputs[0], output.metrics
    if choice.finish_reason == "error":
        raise ValueError("a question failed in the engine; its log says why.")
    further = len(choice.token_ids) - 1
    resident, kept = float(len(prompt)), []
    for event in seen.get("events", ()):
        # vLLM's own id of a request is the outputs' one, a dash and a random word.
        whose = event["request_id"].partition("-")[0]
        of_prompt = whose == output.request_id and event["position"] <= len(prompt)
        if of_prompt or whose == prepared_by:
            kept = event["kept_tokens"]
            mean = fmean(tokens for layer in kept for tokens in layer)
            mean += event["policy_state_tokens"]
            resident = mean + len(prompt) - event["compressed_tokens"]
    heads = {name: _rounded(layers) for name, layers in seen.get("heads", {}).items()}
    return Reply(
        text=choice.text,
        tokens=list(choice.token_ids),
        prompt_tokens=len(prompt),
        first_token_seconds=times.first_token_latency,
        token_seconds=(times.last_token_ts - times.first_token_ts) / further if further else 0.0,
        resident_tokens=resident,
        resident_bytes=round(resident * bytes_per_token),
        kept_tokens=kept,
        attention_error=heads.pop("error", []),
        attention_mass=heads.pop("mass", []),
        attention_heads=heads,
        nats=_nats(output.prompt_logprobs, question) if question.predicted else None,
        cached_tokens=output.num_cached_tokens or 0,
    )


def _nats(logprobs: list[Any], question: Question) -> float:
    """Of vLLM's log-probabilities of a prompt."""
    plain = [{token: said.logprob for token, said in (each or {}).items()} for each in logprobs]
    return mean_nats(plain, question)


def mean_nats(logprobs: list[dict[int, float]], question: Question) -> float:
    """Mean negative log-likelihood of what follows the context, without its first tokens.

    Args:
        logprobs: by position of the prompt, of some tokens and the prompt's own one.
        question: its `question` is what is predicted.
    """
    first = len(question.context) + question.num_given
    found = zip(logprobs[first:], question.question[question.num_given :], strict=True)
    return -fmean(said[token] for said, token in found)


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(value, 5) for value in row] for row in rows]
