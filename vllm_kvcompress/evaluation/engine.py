"""A serving engine in a process of its own, which answers questions one at a time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from vllm_kvcompress.config import CONTEXT_TOKENS, SETTINGS_KEY
from vllm_kvcompress.errors import EngineError
from vllm_kvcompress.vllm_plugin.compat import ENGINE_MODULES


@dataclass(frozen=True)
class Question:
    """One prompt for an engine.

    Attributes:
        context: token ids that come first.
        question: those that follow.
        max_tokens: of the reply.
        agnostic: compress the context before the question is read.
        measured: also measure what attention loses; the times then include that.
    """

    context: list[int]
    question: list[int]
    max_tokens: int
    agnostic: bool
    measured: bool = False


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


class Engine:
    """Starts a vLLM engine in a child process; a context manager.

    The child is a process of its own because a model's memory comes back only with its end. It
    is forked from a process that has imported vLLM, which halves the start of every engine.

    Args:
        model: name or directory.
        settings: ours, or None for stock vLLM.
        options: further keyword arguments of `vllm.LLM`.
        log: takes what the engine prints.
    """

    def __init__(
        self, model: str, settings: dict[str, Any] | None, options: dict[str, Any], log: Path
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(ENGINE_MODULES))
        self._log = log
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_answer_questions,
            args=(theirs, model, settings, options, str(log)),
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Engine:
        self._receive()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def ask(self, question: Question) -> Reply:
        """One reply, greedy.

        Raises:
            EngineError: the engine refused the question, or ended.
        """
        return Reply(**self._receive(question))

    def _receive(self, question: Question | None = None) -> Any:
        """The child's next word, after a question if there is one."""
        try:
            if question is not None:
                self._pipe.send(vars(question))
            kind, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(timeout=30)  # its last words are written while it ends
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise EngineError(f"the engine ended; the end of {self._log}:\n{tail}") from None
        if kind == "error":
            raise EngineError(value)
        return value


def _answer_questions(
    pipe: Connection,
    model: str,
    settings: dict[str, Any] | None,
    options: dict[str, Any],
    log: str,
) -> None:
    """The child's life: builds the engine, then answers until the pipe is closed."""
    _redirect_output(log)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this is a process of its own already
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    llm = _build(model, settings, options)
    pipe.send(("ready", None))
    while True:
        try:
            question = Question(**pipe.recv())
        except EOFError:
            return
        try:
            pipe.send(("reply", vars(_ask(llm, question, settings is not None))))
        except ValueError as error:  # a question that this model cannot take
            pipe.send(("error", str(error)))


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())


def _build(model: str, settings: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    from vllm import LLM

    from vllm_kvcompress.cli.distribution import answer_for_vllm
    from vllm_kvcompress.vllm_plugin.compat import allow_amx, plugin_class_paths

    answer_for_vllm()
    allow_amx()  # our worker sees to it, stock vLLM's does not
    arguments: dict[str, Any] = {"disable_log_stats": False, "block_size": 32, **options}
    if settings is not None:
        paths: dict[str, Any] = dict(plugin_class_paths())
        paths["logits_processors"] = [paths["logits_processors"]]
        arguments |= {**paths, "additional_config": {SETTINGS_KEY: settings}}
    return LLM(model, **arguments)


def _ask(llm: Any, question: Question, compresses: bool) -> Reply:
    from vllm import SamplingParams

    from vllm_kvcompress.vllm_plugin.compat import cache_bytes_per_token

    prompt = [*question.context, *question.question]
    extra = {CONTEXT_TOKENS: len(question.context)} if question.agnostic else None
    params = SamplingParams(temperature=0, max_tokens=question.max_tokens, extra_args=extra)
    if compresses:
        llm.collective_rpc("watch", args=(question.measured,))
    output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    choice, times = output.outputs[0], output.metrics
    further = len(choice.token_ids) - 1
    watched = llm.collective_rpc("watched")[0] if compresses else {}
    resident, kept = float(len(prompt)), []
    for event in watched.get("events", ()):
        if event["position"] <= len(prompt):
            kept = event["kept_tokens"]
            mean = fmean(tokens for layer in kept for tokens in layer)
            mean += event["carried_tokens"]
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
        attention_error=_rounded(watched.get("errors", [])),
        attention_mass=_rounded(watched.get("masses", [])),
    )


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(value, 5) for value in row] for row in rows]
