"""Drives the engine itself: the schedule's requests arrive at steps that the seed says."""

from __future__ import annotations

import ctypes
import gc
import random
import time
from typing import Any

import psutil
from vllm.exceptions import VLLMValidationError

from soak_parts.asks import Answer, Ask, Batch, Choice, Served

MAX_STEPS = 20_000  # of a batch; more, and the engine does not come to an end


def drive(llm: Any, batch: Batch) -> Served:
    """Serves a batch; called in the engine's process (`EngineProcess`)."""
    from vllm_kvcompress.vllm_plugin.compat.engine import engine_parts

    driver = _Driver(llm.llm_engine, batch)
    scheduler, _ = engine_parts(llm.llm_engine)
    started = time.process_time()
    served = driver.run(scheduler)
    served.counts["CPU milliseconds"] = int(1000 * (time.process_time() - started))
    served.left_over = _left_over(scheduler)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that what is free is not counted
    served.rss = psutil.Process().memory_info().rss
    return served


class _Driver:
    """Feeds a batch to an engine."""

    def __init__(self, engine: Any, batch: Batch) -> None:
        self._engine = engine
        self._batch = batch
        self._rng = random.Random(batch.seed)
        self._steps = 0
        self._live: dict[str, Ask] = {}
        self._ages: dict[str, int] = {}
        self.served = Served()

    def run(self, scheduler: Any) -> Served:
        """Drives the engine until the batch has ended."""
        waiting = list(reversed(self._batch.asks))
        count = _Counts(scheduler)
        while waiting or self._live:
            room = self._batch.concurrency - len(self._live)
            for _ in range(min(room, len(waiting), self._rng.choice((0, 0, 1, 1, 2, 6)))):
                self._add(waiting.pop())
            self._cut()
            self._step()
        while scheduler.table.shadows:  # the canary scores answers once nothing else runs
            self._step()
        self._engine.step()  # so that workers hear of the last ones
        count.stop()
        self.served.counts = {**count.found, "steps": self._steps}
        return self.served

    def _step(self) -> None:
        for output in self._engine.step():
            self._finish(output)
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise RuntimeError(f"{sorted(self._ages)} do not come to an end")

    def _add(self, ask: Ask) -> None:
        name = f"{ask.index}"
        prompt: dict[str, Any] = {"prompt_token_ids": ask.prompt}
        if ask.cache_salt is not None:
            prompt["cache_salt"] = ask.cache_salt
        try:
            self._engine.add_request(name, prompt, sampling_params(ask))
        except (ValueError, VLLMValidationError) as error:
            self.served.answers[ask.index] = Answer("refused", reason=str(error))
            return
        self._live[name], self._ages[name] = ask, 0

    def _cut(self) -> None:
        for name, ask in list(self._live.items()):
            if ask.cut == self._ages[name]:
                self._engine.abort_request([name])
                self.served.answers[ask.index] = Answer("cut")
                del self._live[name]
            self._ages[name] += 1

    def _finish(self, output: Any) -> None:
        ask = self._live.get(output.request_id)
        if ask is None or not output.finished:
            return
        del self._live[output.request_id]
        choices = [
            Choice(
                each.text,
                list(each.token_ids),
                each.finish_reason,
                None
                if each.logprobs is None
                else [{t: p.logprob for t, p in place.items()} for place in each.logprobs],
            )
            for each in output.outputs
        ]
        cached = output.num_cached_tokens or 0
        self.served.answers[ask.index] = Answer("answered", choices, cached=cached)


class _Counts:
    """Counts what a scheduler does, for as long as a batch takes."""

    def __init__(self, scheduler: Any) -> None:
        self.found = {"preemptions": 0, "events": 0}
        self.found |= {"contexts reused": 0, "conversations continued": 0}
        self._scheduler = scheduler
        preempt, make_stats = scheduler._preempt_request, scheduler.make_stats

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.found["preemptions"] += 1
            return preempt(*args, **kwargs)

        def recording(*args: Any, **kwargs: Any) -> Any:
            from vllm_kvcompress.vllm_plugin.compat.messages import detach_stats

            stats = make_stats(*args, **kwargs)
            ours = stats and detach_stats(stats)
            if ours:
                self.found["events"] += len(ours["events"])
                self.found["contexts reused"] += ours["contexts_reused"]
                self.found["conversations continued"] += ours["conversations_continued"]
            return stats

        scheduler._preempt_request, scheduler.make_stats = counting, recording

    def stop(self) -> None:
        """Restores the scheduler's methods."""
        del self._scheduler._preempt_request, self._scheduler.make_stats


def sampling_params(ask: Ask) -> Any:
    """Returns vLLM's sampling parameters of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    guide = None if ask.guide is None else StructuredOutputsParams(**ask.guide)
    return SamplingParams(
        n=ask.n,
        output_kind=RequestOutputKind.FINAL_ONLY,
        temperature=ask.temperature,
        max_tokens=ask.max_tokens,
        stop=ask.stop or None,
        logprobs=2 if ask.alone else ask.logprobs,
        prompt_logprobs=ask.prompt_logprobs,
        structured_outputs=guide,
        extra_args=ask.xargs or None,
    )


def _left_over(scheduler: Any) -> str:
    """Returns which requests or blocks a scheduler still holds after all have ended."""
    pool = scheduler.kv_cache_manager.block_pool
    if scheduler.requests:
        return f"requests left over: {sorted(scheduler.requests)}"
    from vllm_kvcompress.vllm_plugin.scheduler_side.integrity import check_integrity

    check_integrity(scheduler.table, scheduler.states.kept, {})
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        return f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks - 1} blocks are free"
    return ""
