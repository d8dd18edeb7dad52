"""Steps in which every request generates a token and none reads its prompt, in a whole engine."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass
from typing import Any

from gpu_parts.served import counter_of
from vllm_kvcompress.rounding import ceil_div

SETTLING_STEPS = 16  # behind the last prompt: its event, and what the host is ahead
_CALLS = itertools.count()


@dataclass(frozen=True)
class DecodeCase:
    """Requests that generate together.

    Attributes:
        length: tokens of each prompt.
        batch: how many requests.
        steps: that are timed.
        tokens_of_step: most tokens that a step reads.
    """

    length: int
    batch: int
    steps: int
    tokens_of_step: int

    @property
    def max_tokens(self) -> int:
        """Tokens that the first request may have generated when the last step was timed."""
        reading = ceil_div(self.batch * self.length, self.tokens_of_step)
        return 2 * reading + 4 * SETTLING_STEPS + self.steps

    @property
    def max_model_len(self) -> int:
        """The smallest `max_model_len` that fits these requests."""
        return self.length + self.max_tokens


def time_decode_steps(llm: Any, case: DecodeCase, deadline: float) -> dict[str, Any]:
    """In the engine's process: reads all prompts, then times steps, then ends the requests.

    Args:
        llm: the engine, with nothing to do.
        case: what is timed.
        deadline: of `time.monotonic`.

    Returns:
        The case; mean and median seconds per step; events before these steps and in them; and how
        many of the steps were `others`: not one token for each of the requests, which must not be.
        Or `left_out`, why.
    """
    row: dict[str, Any] = {"length": case.length, "batch": case.batch}
    config = llm.llm_engine.vllm_config.cache_config
    room = (config.num_gpu_blocks - 1) * config.block_size
    if (needed := case.batch * case.max_model_len) > room:
        return {**row, "left_out": f"{needed} tokens do not fit {room}"}
    if time.monotonic() > deadline:
        return {**row, "left_out": "the time of this call is over"}
    return {**row, "steps": case.steps, **_DecodeSteps(llm, case).figures()}


class _DecodeSteps:
    """Drives an engine step by step."""

    def __init__(self, llm: Any, case: DecodeCase) -> None:
        from vllm_kvcompress.vllm_plugin.compat.engine import engine_parts

        self.engine, self.case, self.counter = llm.llm_engine, case, counter_of(llm)
        self.scheduler = engine_parts(self.engine)[0]
        self.started: set[str] = set()
        self.kinds: list[tuple[int, int]] = []  # requests and tokens of every step

    def figures(self) -> dict[str, Any]:
        """Reads the prompts, times the steps, and ends the requests."""
        schedule = self.scheduler.schedule

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                of_step = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
                self.kinds.append(of_step)
            return output

        self.scheduler.schedule = noting
        names = self._add_requests()
        try:
            return self._time(names)
        finally:
            self.engine.abort_request(names)
            while self.engine.has_unfinished_requests():
                self.engine.step()
            del self.scheduler.schedule  # the class's own is behind it

    def _add_requests(self) -> list[str]:
        from vllm import SamplingParams

        call, case = next(_CALLS), self.case
        draw = random.Random(f"{call} {case}")
        params = SamplingParams(
            temperature=0, max_tokens=case.max_tokens, ignore_eos=True, detokenize=False
        )
        names = [f"decode {call} {number}" for number in range(case.batch)]
        for name in names:
            prompt = [draw.randrange(10, 200) for _ in range(case.length)]
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return names

    def _time(self, names: list[str]) -> dict[str, Any]:
        import statistics

        events = self.counter.events
        while len(self.started) < len(names):
            self._step()
        for _ in range(SETTLING_STEPS):
            self._step()
        before = self.counter.events
        first, seconds, started = len(self.kinds), [], time.perf_counter()
        for _ in range(self.case.steps):
            begun = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - begun)
        total = time.perf_counter() - started
        only_decoding = (self.case.batch, self.case.batch)
        return {
            "seconds": total / self.case.steps,
            "median_seconds": statistics.median(seconds),
            "events_before": before - events,
            "events": self.counter.events - before,
            "others": sum(kind != only_decoding for kind in self.kinds[first:]),
        }

    def _step(self) -> None:
        for output in self.engine.step():
            if output.outputs[0].token_ids:
                self.started.add(output.request_id)
