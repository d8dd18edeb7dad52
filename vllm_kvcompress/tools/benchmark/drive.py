"""Drives one repetition of a load through an engine, in the engine's own process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from vllm_kvcompress.tools.benchmark.scenarios import SCENARIOS, Arrival, Load, Size
from vllm_kvcompress.vllm_plugin.compat.engine import attention_modules, engine_parts, greedy


@dataclass
class Step:
    """One step of the engine.

    Attributes:
        ended: seconds since the start.
        seconds, attention_seconds, scheduler_seconds: its duration, and that of attention (where
            it is timed) and of `schedule` and `update_from_output`.
        decoded: new tokens of a step that reads no prompt: one for each request, and accepted
            drafts; 0 for others.
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
        self._scheduler, self._worker = engine_parts(engine)
        self._outputs: dict[str, Any] = {}  # vLLM's, the latest of each request
        self._steps: list[Step] = []
        self._preemptions = 0
        self._events = 0
        self._attention_seconds = 0.0
        self._scheduler_seconds = 0.0
        self._started = 0.0
        self._requests_in_step = 0
        self._only_decodes = False
        self._num_replied = 0
        self._num_shadows_before = self._count_shadows()

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
            elif waiting and self._scheduler.has_requests():  # answers that --kv-shadow scores
                self._step()
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
            drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            num_tokens = output.total_num_scheduled_tokens
            self._only_decodes = num_tokens == self._requests_in_step + drafts
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
        steps, outputs = self._steps, list(self._outputs.values())
        total = steps[-1].ended
        decoding = [step for step in steps if step.decoded]
        decode_seconds = sum(step.seconds for step in decoding)
        num_replied = sum(len(output.outputs[0].token_ids) for output in outputs)
        between_tokens = [
            (times.last_token_ts - times.first_token_ts) / (times.num_generation_tokens - 1)
            for times in (output.metrics for output in outputs)
            if times.num_generation_tokens > 1
        ]
        scheduler_seconds = sum(step.scheduler_seconds for step in steps)
        cached_tokens = sum(output.num_cached_tokens or 0 for output in outputs)
        return {
            "seconds": total,
            "request_throughput": len(outputs) / total,
            "output_throughput": num_replied / total,
            "decode_throughput": sum(step.decoded for step in steps) / (decode_seconds or 1),
            "ttft": median(output.metrics.first_token_latency for output in outputs),
            "tpot": median(between_tokens or [0.0]),
            "decode_step": median([step.seconds for step in decoding] or [0.0]),
            "decode_attention": median([step.attention_seconds for step in decoding] or [0.0]),
            "scheduler_per_request": scheduler_seconds / max(1, sum(s.running for s in steps)),
            "preemptions": self._preemptions,
            "events": self._events,
            "shadows": self._count_shadows() - self._num_shadows_before,
            "peak_usage": max(step.usage for step in steps),
            "peak_running": max(step.running for step in steps),
            "hit_rate": cached_tokens / sum(len(output.prompt_token_ids) for output in outputs),
            "timeline": {
                "seconds": [step.ended for step in steps],
                "running": [step.running for step in steps],
                "usage": [step.usage for step in steps],
            },
        }

    def _add(self, arrival: Arrival) -> None:
        prompt = arrival.tokens
        if arrival.follows is not None:
            former = self._outputs[arrival.follows]
            prompt = [*former.prompt_token_ids, *former.outputs[0].token_ids, *prompt]
        params = greedy(max_tokens=arrival.max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(arrival.name, {"prompt_token_ids": prompt}, params)

    def _step(self) -> set[str]:
        """Runs one step of the engine; returns the requests that ended with it."""
        self._attention_seconds = self._scheduler_seconds = 0.0
        started = self._now()
        outputs = self._engine.step()
        now = self._now()
        self._events += len(getattr(self._worker, "last_event_seconds", ()))
        self._outputs |= {output.request_id: output for output in outputs}
        former, self._num_replied = self._num_replied, self._count_replied()
        step = Step(
            ended=now,
            seconds=now - started,
            attention_seconds=self._attention_seconds,
            scheduler_seconds=self._scheduler_seconds,
            decoded=self._num_replied - former if self._only_decodes else 0,
            running=self._requests_in_step,
            usage=self._scheduler.kv_cache_manager.usage,
        )
        self._steps.append(step)
        return {output.request_id for output in outputs if output.finished}

    def _count_replied(self) -> int:
        """Counts the tokens that have been generated so far."""
        return sum(len(output.outputs[0].token_ids) for output in self._outputs.values())

    def _count_shadows(self) -> int:
        """Counts the answers that were sent to be scored with the full cache so far."""
        canary = getattr(self._scheduler, "canary", None)
        return 0 if canary is None else int(canary.num_sent)

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
        for module in attention_modules(self._worker):
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after))
        return hooks
