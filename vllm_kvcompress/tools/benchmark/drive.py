"""Drives one repetition of a load through an engine, in the engine's own process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from vllm_kvcompress.tools.benchmark.scenarios import SCENARIOS, Arrival, Load, Size
from vllm_kvcompress.vllm_plugin.startup import compat


@dataclass
class ServedRequest:
    """One request, as the driver saw it.

    Attributes:
        prompt, reply: token ids.
        arrived: seconds since the start.
        token_times: seconds since the start at which each token was there.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    prompt: list[int]
    arrived: float
    token_times: list[float] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass
class Step:
    """One step of the engine.

    Attributes:
        ended: seconds since the start.
        seconds, attention_seconds, scheduler_seconds: its duration, and that of attention (where
            it is timed) and of `schedule` and `update_from_output`.
        decoded: new tokens of a step that reads no prompt; 0 for others.
        running: requests in the step.
        usage: share of the pool in use.
    """

    ended: float
    seconds: float
    attention_seconds: float
    scheduler_seconds: float
    decoded: int
    running: int
    usage: float


def drive(llm: Any, call: tuple[str, Size, int]) -> dict[str, Any]:
    """Serves a load once; `call` is scenario, size and seed.

    Returns:
        Totals and medians in seconds, tokens and requests, and the `timeline` by step.
    """
    scenario, size, seed = call
    load = SCENARIOS[scenario](size)
    driver = Driver(llm.llm_engine)
    with driver.watching(load):
        driver.run(load.arrivals(random.Random(seed)))
    return driver.figures()


class Driver:
    """Feeds requests to an engine as they arrive, and takes the times."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scheduler, self._worker = compat.engine_parts(engine)
        self._requests: dict[str, ServedRequest] = {}
        self._steps: list[Step] = []
        self._preemptions = 0
        self._events = 0
        self._attention_seconds = 0.0
        self._scheduler_seconds = 0.0
        self._started = 0.0
        self._requests_in_step = 0
        self._tokens_in_step = 0

    def run(self, arrivals: list[Arrival]) -> None:
        """Serves all requests to their ends."""
        waiting, ended = list(arrivals), set()
        self._started = time.perf_counter()
        while waiting or self._engine.has_unfinished_requests():
            now = self._now()
            due = [
                arrival
                for arrival in waiting
                if arrival.seconds <= now and (arrival.follows is None or arrival.follows in ended)
            ]
            for arrival in due:
                waiting.remove(arrival)
                self._add(arrival)
            if self._engine.has_unfinished_requests():
                ended |= self._step()
            elif waiting:
                time.sleep(max(0.0, min(a.seconds for a in waiting) - self._now()))

    @contextmanager
    def watching(self, load: Load) -> Iterator[None]:
        """Counts preemptions and times the scheduler, and attention if the load says so."""
        scheduler = self._scheduler
        schedule = scheduler.schedule
        hooks = self._attention_hooks() if load.timed_attention else []

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._requests_in_step = len(output.num_scheduled_tokens)
            self._tokens_in_step = output.total_num_scheduled_tokens
            self._preemptions += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = self._timed(counted)
        scheduler.update_from_output = self._timed(scheduler.update_from_output)
        try:
            yield
        finally:
            del scheduler.schedule, scheduler.update_from_output  # uncovers the class's own
            for hook in hooks:
                hook.remove()

    def figures(self) -> dict[str, Any]:
        """Figures of the run; times in seconds."""
        steps, requests = self._steps, list(self._requests.values())
        total = steps[-1].ended
        decoding = [step for step in steps if step.decoded]
        decode_seconds = sum(step.seconds for step in decoding)
        between_tokens = [
            (request.token_times[-1] - request.token_times[0]) / (len(request.token_times) - 1)
            for request in requests
            if len(request.token_times) > 1
        ]
        scheduler_seconds = sum(step.scheduler_seconds for step in steps)
        cached_tokens = sum(request.cached_tokens for request in requests)
        return {
            "seconds": total,
            "request_throughput": len(requests) / total,
            "output_throughput": sum(len(request.reply) for request in requests) / total,
            "decode_throughput": sum(step.decoded for step in steps) / (decode_seconds or 1),
            "ttft": median(request.token_times[0] - request.arrived for request in requests),
            "tpot": median(between_tokens or [0.0]),
            "decode_step": median([step.seconds for step in decoding] or [0.0]),
            "decode_attention": median([step.attention_seconds for step in decoding] or [0.0]),
            "scheduler_per_request": scheduler_seconds / max(1, sum(s.running for s in steps)),
            "preemptions": self._preemptions,
            "events": self._events,
            "peak_usage": max(step.usage for step in steps),
            "peak_running": max(step.running for step in steps),
            "hit_rate": cached_tokens / sum(len(request.prompt) for request in requests),
            "timeline": {
                "seconds": [step.ended for step in steps],
                "running": [step.running for step in steps],
                "usage": [step.usage for step in steps],
            },
        }

    def _add(self, arrival: Arrival) -> None:
        from vllm import SamplingParams

        prompt = arrival.tokens
        if arrival.follows is not None:
            former = self._requests[arrival.follows]
            prompt = former.prompt + former.reply + prompt
        self._requests[arrival.name] = ServedRequest(prompt, max(arrival.seconds, self._now()))
        params = SamplingParams(
            temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(arrival.name, {"prompt_token_ids": prompt}, params)

    def _step(self) -> set[str]:
        """Runs one step of the engine; returns the requests that ended with it."""
        self._attention_seconds = self._scheduler_seconds = 0.0
        started = self._now()
        outputs = self._engine.step()
        now = self._now()
        self._events += len(getattr(self._worker, "last_event_seconds", ()))
        ended, num_new = set(), 0
        for output in outputs:
            request = self._requests[output.request_id]
            new = len(output.outputs[0].token_ids) - len(request.reply)
            num_new += new
            request.token_times += [now] * new
            request.reply = list(output.outputs[0].token_ids)
            request.cached_tokens = output.num_cached_tokens or 0
            if output.finished:
                ended.add(output.request_id)
        step = Step(
            ended=now,
            seconds=now - started,
            attention_seconds=self._attention_seconds,
            scheduler_seconds=self._scheduler_seconds,
            decoded=num_new if self._tokens_in_step == self._requests_in_step else 0,
            running=self._requests_in_step,
            usage=self._scheduler.kv_cache_manager.usage,
        )
        self._steps.append(step)
        return ended

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._scheduler_seconds += time.perf_counter() - started

        return call

    def _attention_hooks(self) -> list[Any]:
        """Times every attention layer of the model."""
        started = 0.0

        def before(*_: Any) -> None:
            nonlocal started
            started = time.perf_counter()

        def after(*_: Any) -> None:
            self._attention_seconds += time.perf_counter() - started

        hooks = []
        for module in compat.attention_modules(self._worker):
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after))
        return hooks
