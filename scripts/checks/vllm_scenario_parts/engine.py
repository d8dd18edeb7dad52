"""An engine that runs step by step, and what it schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK, POOL, STEP, TOGETHER = 32, 25, 128, 4  # blocks of the pool, one of which is never used
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK,
    "max_model_len": 512,
    "num_gpu_blocks_override": POOL,
    "max_num_batched_tokens": STEP,
    "max_num_seqs": TOGETHER,
    "scheduling_policy": "priority",  # of those that have the same, the first is first
    "enable_prefix_caching": True,
}
MAX_STEPS = 1000


@dataclass
class Ended:
    """How a request ended."""

    tokens: list[int]
    reason: str
    stop_reason: Any
    cached: int


@dataclass
class Run:
    """Record of a run: what was scheduled, and how requests ended.

    Attributes:
        steps: tokens that every request was given, step by step.
        preempted: requests that lost their blocks.
        ended: by name; aborted ones are missing.
    """

    steps: list[dict[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended: dict[str, Ended] = field(default_factory=dict)

    @property
    def started(self) -> list[str]:
        """Requests in the order in which they were first scheduled."""
        return list(dict.fromkeys(name for step in self.steps for name in step))

    def facts(self) -> list[Any]:
        """Returns everything that runs are compared by."""
        said = {name: [e.tokens, e.reason, e.cached] for name, e in self.ended.items()}
        return [self.steps, self.preempted, said]


@dataclass
class Ask:
    """A request to the engine.

    Attributes:
        name: of it.
        prompt: tokens.
        at_step, abort_at: when it comes, and when its client leaves.
        priority: a smaller one is more urgent.
        salt: of the prefix cache.
        more: further sampling parameters.
    """

    name: str
    prompt: list[int]
    max_tokens: int = 4
    at_step: int = 0
    abort_at: int | None = None
    priority: int = 0
    salt: str | None = None
    more: dict[str, Any] = field(default_factory=dict)


class Engine:
    """Drives vLLM's engine, stock or not.

    Args:
        llm: a `vllm.LLM` without processes of its own.
    """

    def __init__(self, llm: Any) -> None:
        from vllm_kvcompress.vllm_plugin.compat.engine import engine_parts

        self._engine = llm.llm_engine
        self.scheduler, _ = engine_parts(self._engine)

    @property
    def pool(self) -> Any:
        """vLLM's block pool of the engine."""
        return self.scheduler.kv_cache_manager.block_pool

    def run(self, *asks: Ask) -> Run:
        """Serves requests until all have ended, and checks that all blocks are free."""
        run, undo = Run(), self._record()
        waiting = sorted(asks, key=lambda ask: ask.at_step)
        step, live = 0, set()
        while waiting or live:
            while waiting and waiting[0].at_step <= step:
                live.add(self.add(waiting.pop(0)))
            for ask in asks:
                if ask.abort_at == step and ask.name in live:
                    self._engine.abort_request([ask.name])
                    live.remove(ask.name)
            for output in self._engine.step():
                if output.finished and output.request_id in live:
                    live.remove(output.request_id)
                    run.ended[output.request_id] = _ended(output)
            step += 1
            assert step < MAX_STEPS, f"{live} do not come to an end"
        run.steps, run.preempted = undo()
        self.check_empty()
        return run

    def add(self, ask: Ask) -> str:
        """Adds a request; returns its name."""
        from vllm import SamplingParams

        settings = {"temperature": 0, "max_tokens": ask.max_tokens, "ignore_eos": True}
        prompt: dict[str, Any] = {"prompt_token_ids": ask.prompt}
        if ask.salt is not None:
            prompt["cache_salt"] = ask.salt
        parameters = SamplingParams(**{**settings, **ask.more})
        self._engine.add_request(ask.name, prompt, parameters, priority=ask.priority)
        return ask.name

    def check_empty(self) -> None:
        """Checks that no request is left, and that every block is free."""
        self._engine.step()  # workers hear of the last ones
        assert not self.scheduler.requests
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(b.ref_cnt == 0 for b in self.pool.blocks if not b.is_null)

    def forget(self) -> bool:
        """Empties the prefix cache."""
        return bool(self._engine.reset_prefix_cache())

    def _record(self) -> Callable[[], tuple[list[dict[str, int]], list[str]]]:
        """Records what is scheduled until the returned function is called."""
        scheduler, steps, preempted = self.scheduler, [], []
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def scheduling(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            given = output.num_scheduled_tokens
            steps.append({_named(name): count for name, count in given.items()})
            return output

        def preempting(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(_named(request.request_id))
            return preempt(request, *args, **kwargs)

        def undo() -> tuple[list[dict[str, int]], list[str]]:
            del scheduler.schedule, scheduler._preempt_request
            return [step for step in steps if step], preempted

        scheduler.schedule, scheduler._preempt_request = scheduling, preempting
        return undo


def _named(request_id: str) -> str:
    return request_id.rpartition("-")[0] or request_id  # vLLM appends a random suffix


def _ended(output: Any) -> Ended:
    choice = output.outputs[0]
    cached = output.num_cached_tokens or 0
    return Ended(list(choice.token_ids), choice.finish_reason, choice.stop_reason, cached)


def tokens(count: int, seed: int) -> list[int]:
    """Returns the token ids of a prompt; each seed has its own."""
    return [4 + (seed * 7919 + i * i * (seed + 3) + 11 * i) % 250 for i in range(count)]


def each_alone(engine: Engine, asks: Sequence[Ask]) -> dict[str, list[int]]:
    """Returns what each request says when it runs without others."""
    said = {}
    for ask in asks:
        quiet = Ask(ask.name, ask.prompt, ask.max_tokens, more=ask.more)
        said[ask.name] = engine.run(quiet).ended[ask.name].tokens
        engine.forget()
    return said
