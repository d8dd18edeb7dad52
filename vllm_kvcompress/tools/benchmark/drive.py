"""Drives one repetition of a load through an engine, in the engine's own process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.tools.benchmark.scenarios import Arrival, Load, Size
from vllm_kvcompress.vllm_plugin.startup import compat


@dataclass
class Served:
    """One request, as the driver saw it.

    Attributes:
        prompt: its token ids.
        arrived: seconds.
        token_times: seconds at which each further token was there.
        reply: the tokens.
        cached_tokens: of the prompt, that the prefix cache had.
    """

    prompt: list[int]
    arrived: float
    token_times: list[float] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass
class Timeline:
    """By step: when it ended, how long it took, and what it did.

    Attributes:
        seconds: at the step's end.
        step_seconds: of the step.
        decoded: tokens of a step that read no prompt; 0 for others.
        running: requests.
        usage: of the pool, 0 to 1.
        attention_seconds: of the step, where it was taken.
        scheduler_seconds: in `schedule` and `update_from_output`.
    """

    seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)
    attention_seconds: list[float] = field(default_factory=list)
    scheduler_seconds: list[float] = field(default_factory=list)


def drive(llm: Any, call: tuple[str, Size, int]) -> dict[str, Any]:
    """Serves a load once.

    Args:
        llm: the engine.
        call: scenario, size and seed.

    Returns:
        What `_figures` says, and the timeline's columns.
    """
    from vllm_kvcompress.tools.benchmark.scenarios import SCENARIOS

    scenario, size, seed = call
    load = SCENARIOS[scenario](size)
    driver = Driver(llm.llm_engine)
    with driver.watching(load):
        driver.run(load.arrivals(random.Random(seed)))
    return driver.figures()


class Driver:
    """Feeds requests to an engine as they come, and takes the times."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scheduler, self._worker = compat.engine_parts(engine)
        self._served: dict[str, Served] = {}
        self._timeline = Timeline()
        self._preemptions = 0
        self._events = 0
        self._attention = 0.0
        self._scheduling = 0.0
        self._started = 0.0
        self._requests_in_step = 0
        self._tokens_in_step = 0

    def run(self, arrivals: list[Arrival]) -> None:
        """Until every request has ended."""
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
        """Counts preemptions and takes the scheduler's time, and attention's if asked to."""
        scheduler = self._scheduler
        schedule = scheduler.schedule
        hooks = self._attention_hooks() if load.timed_attention else []

        def looked_at(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._requests_in_step = len(output.num_scheduled_tokens)
            self._tokens_in_step = output.total_num_scheduled_tokens
            self._preemptions += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = self._timed(looked_at)
        scheduler.update_from_output = self._timed(scheduler.update_from_output)
        try:
            yield
        finally:
            del scheduler.schedule, scheduler.update_from_output  # the class's own are behind them
            for hook in hooks:
                hook.remove()

    def figures(self) -> dict[str, Any]:
        """Of the whole run; times in seconds."""
        line, served = self._timeline, list(self._served.values())
        total = line.seconds[-1]
        decoding = [i for i, count in enumerate(line.decoded) if count]
        decode_seconds = sum(line.step_seconds[i] for i in decoding)
        tokens = [len(one.reply) for one in served]
        prompts = sum(len(one.prompt) for one in served)
        between = [
            (one.token_times[-1] - one.token_times[0]) / (len(one.token_times) - 1)
            for one in served
            if len(one.token_times) > 1
        ]
        requests_by_step = sum(line.running)
        return {
            "seconds": total,
            "request_throughput": len(served) / total,
            "output_throughput": sum(tokens) / total,
            "decode_throughput": sum(line.decoded) / decode_seconds if decoding else 0.0,
            "ttft": statistics.median(one.token_times[0] - one.arrived for one in served),
            "tpot": statistics.median(between) if between else 0.0,
            "decode_step": _median([line.step_seconds[i] for i in decoding]),
            "decode_attention": _median([line.attention_seconds[i] for i in decoding]),
            "scheduler_per_request": sum(line.scheduler_seconds) / max(1, requests_by_step),
            "preemptions": self._preemptions,
            "events": self._events,
            "peak_usage": max(line.usage),
            "peak_running": max(line.running),
            "hit_rate": sum(one.cached_tokens for one in served) / prompts,
            "timeline": {"seconds": line.seconds, "running": line.running, "usage": line.usage},
        }

    def _add(self, arrival: Arrival) -> None:
        from vllm import SamplingParams

        before: list[int] = []
        if arrival.follows is not None:
            former = self._served[arrival.follows]
            before = former.prompt + former.reply
        prompt = before + arrival.tokens
        self._served[arrival.name] = Served(prompt, max(arrival.seconds, self._now()))
        params = SamplingParams(
            temperature=0, max_tokens=arrival.max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(arrival.name, {"prompt_token_ids": prompt}, params)

    def _step(self) -> set[str]:
        """One step of the engine; the requests that ended with it."""
        scheduler, line = self._scheduler, self._timeline
        self._attention = self._scheduling = 0.0
        started = self._now()
        outputs = self._engine.step()
        now = self._now()
        line.seconds.append(now)
        line.step_seconds.append(now - started)
        line.running.append(self._requests_in_step)
        line.usage.append(scheduler.kv_cache_manager.usage)
        line.attention_seconds.append(self._attention)
        line.scheduler_seconds.append(self._scheduling)
        self._events += len(getattr(self._worker, "last_event_seconds", ()))
        ended, new = set(), 0
        for output in outputs:
            one, reply = self._served[output.request_id], output.outputs[0].token_ids
            new += len(reply) - len(one.reply)
            one.token_times += [now] * (len(reply) - len(one.reply))
            one.reply = list(reply)
            one.cached_tokens = output.num_cached_tokens or 0
            if output.finished:
                ended.add(output.request_id)
        line.decoded.append(new if self._tokens_in_step == self._requests_in_step else 0)
        return ended

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _timed(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._scheduling += time.perf_counter() - started

        return call

    def _attention_hooks(self) -> list[Any]:
        """Around every attention layer of the model."""
        started = [0.0]

        def before(*_: Any) -> None:
            started[0] = time.perf_counter()

        def after(*_: Any) -> None:
            self._attention += time.perf_counter() - started[0]

        hooks = []
        for module in compat.attention_modules(self._worker):
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after))
        return hooks


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0
