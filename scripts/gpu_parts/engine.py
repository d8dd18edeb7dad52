"""Whole engines, compressed and stock, over the same requests: what only a real start shows."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_parts.decode_only import DecodeCase, time_decode_steps
from gpu_parts.goals import COMPRESSED, OFF, PIECEWISE, STOCK
from gpu_parts.measure import progress
from gpu_parts.profiled import profile
from gpu_parts.report import file_name
from gpu_parts.served import allocated, counter_of, path_of, serve_options
from vllm_kvcompress.errors import EngineError
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.tools.engine_process import EngineProcess

Figures = dict[str, Any]
SHORT_TOKENS = 48  # shorter than what is compressed
COMPILED = "during inference:"  # vLLM's warning of a kernel compiled while requests wait
NOTHING_KEPT_OFF = {"policy": "none", "budget": 1.0}  # our classes, which compress nobody
CHECKED = {"jit_monitor_mode": "error"}  # ends an engine that compiles while it serves
SECONDS_TO_START = 90  # an engine that has less is not started; ours took 83 to 98 on an H100


@dataclass(frozen=True)
class EnginePlan:
    """What is served.

    Attributes:
        model: name or directory.
        settings: of `serve`, by its options without `--kv-`.
        engine: further keyword arguments of `vllm.LLM`.
        names: which engines, in this order.
        requests: served at once; 0: none. Half of them long, half too short to be compressed;
            all long where the pool is full.
        prompt: tokens of the long ones.
        output: tokens that each generates.
        pool: memory for so many uncompressed requests; None: all that there is.
        batches, lengths: requests, and their tokens, of steps in which all generate; either may
            be empty.
        steps: that are timed of each.
        checked: engines end where a step waits for the GPU or compiles; then times are others'.
        profiled: one more round of the requests is served under torch's profiler.
    """

    model: str
    settings: dict[str, Any] = field(
        default_factory=lambda: {"policy": "adakv+criticalkv", "budget": 0.25, "trigger": "prompt"}
    )
    engine: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = (COMPRESSED, STOCK, OFF, PIECEWISE)
    requests: int = 20
    prompt: int = 4096
    output: int = 64
    pool: int | None = None
    batches: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    steps: int = 128
    checked: bool = False
    profiled: bool = False

    @property
    def label(self) -> str:
        """The run's name in the report."""
        parts = [str(self.settings["trigger"])]
        parts += [f"pool of {self.pool}"] if self.pool else []
        return ", ".join(parts + (["checked"] if self.checked else []))

    @property
    def num_long(self) -> int:
        """Requests that are compressed."""
        return self.requests if self.pool else (self.requests + 1) // 2

    def prompts(self, seed: int) -> list[list[int]]:
        """Returns token ids of prompts, long and short in turns; each seed has its own."""
        draw = random.Random(seed)
        long = [True] * self.requests if self.pool else [n % 2 == 0 for n in range(self.requests)]
        return [
            [draw.randrange(10, 200) for _ in range(self.prompt if is_long else SHORT_TOKENS)]
            for is_long in long
        ]

    def cases(self, tokens_of_step: int) -> list[DecodeCase]:
        """Steps in which all requests generate, of a server that reads so many tokens in one."""
        return [
            DecodeCase(length, batch, self.steps, tokens_of_step)
            for length in self.lengths
            for batch in self.batches
        ]

    def engine_settings(self, name: str) -> dict[str, Any] | None:
        """Returns the settings of the engine of that name."""
        return {STOCK: None, OFF: NOTHING_KEPT_OFF}.get(name, self.settings)

    def options(self, name: str) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM` for the engine of that name: those of `serve`."""
        own: dict[str, Any] = dict(self.engine)
        if name == PIECEWISE:
            own["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
        if self.checked:
            own |= CHECKED
        own = {"max_model_len": self.prompt + self.output, **own}
        options = serve_options(self.model, self.engine_settings(name), own)
        lengths = [options["max_model_len"] if "max_model_len" in self.engine else 0]
        lengths += [self.prompt + self.output] * bool(self.requests)
        lengths += [case.max_model_len for case in self.cases(options["max_num_batched_tokens"])]
        options["max_model_len"] = max(lengths)
        if self.pool:
            size = options["block_size"] or 16
            blocks = self.pool * ceil_div(self.prompt + self.output, size)
            options["num_gpu_blocks_override"] = (
                blocks + 1
            )  # one of every pool is vLLM's null block
        # Prompts are token ids, and some models here are no more than a configuration.
        return options | {"skip_tokenizer_init": True}

    def facts(self) -> Figures:
        """What must be the same for engines to be compared."""
        return {
            "model": Path(self.model).name if Path(self.model).is_dir() else self.model,
            "settings": self.settings,
            "requests": self.requests,
            "prompt": self.prompt,
            "output": self.output,
            "pool": self.pool,
            "checked": self.checked,
            "long": self.num_long,
            "short": self.requests - self.num_long,
        }


def measure_engines(
    plan: EnginePlan,
    folder: Path,
    save: Callable[[Figures], None],
    deadline: float = float("inf"),
    handle: Callable[[Any, Any], Any] | None = None,
) -> Figures:
    """Starts one engine after the other, and serves the plan's requests twice in each.

    Nothing looks on while they serve: events run together, several layers at once, and steps are
    replayed as graphs, as in a server.

    Args:
        plan: what is served.
        folder: takes what the engines print.
        save: called with the figures so far, after every engine and every case in it.
        deadline: of `time.monotonic`; no engine is started that could not end before.
        handle: what serves in the engine's process, as `serve_call`; for tests.

    Returns:
        `facts` of the plan, and by name of the engine what it did: how long its start took,
        kernels compiled while serving, the `path` of its steps, what `serve` says of the second
        round, `decode_only` rows, and the `profile` of a third round; or `refused` with its last
        words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    engines: Figures = {}
    results = {**plan.facts(), "engines": engines}
    for name in progress(plan.names, "engines"):
        engines[name] = figures = {}
        if time.monotonic() + SECONDS_TO_START > deadline:
            figures["refused"] = "not started: the time of this call is over"
        else:
            _measure_engine(plan, name, folder, figures, lambda: save(results), deadline, handle)
        save(results)
    return results


def _measure_engine(
    plan: EnginePlan,
    name: str,
    folder: Path,
    figures: Figures,
    save: Callable[[], None],
    deadline: float,
    handle: Callable[[Any, Any], Any] | None,
) -> None:
    log = folder / file_name("engine", plan.label, name, suffix=".log")
    log.unlink(missing_ok=True)
    started = time.perf_counter()
    try:
        options = plan.options(name)
        with EngineProcess(plan.model, None, options, log, handle or serve_call) as engine:
            figures["start_seconds"] = time.perf_counter() - started
            for seed in (1, 2) if plan.requests else ():
                asked = ("load", plan.prompts(seed), plan.output)
                figures["load"] = engine.call(asked)
                save()
            rows = figures["decode_only"] = []
            for case in plan.cases(options["max_num_batched_tokens"]):
                rows.append(engine.call(("decode", case, deadline)))
                save()
            if plan.profiled and plan.requests:
                trace = log.with_suffix(".trace.json.gz")
                figures["profile"] = engine.call(("profile", plan.prompts(3), plan.output, trace))
            figures["path"] = engine.call(("path",))
    except (EngineError, ValueError) as error:  # of vLLM, where it takes no such options
        figures["refused"] = str(error).splitlines()[-1]
    printed = log.read_text(errors="replace") if log.exists() else ""
    figures["compiled"] = printed.count(COMPILED)


def serve_call(llm: Any, call: tuple[Any, ...]) -> Any:
    """In the engine's process: carries out a call.

    Args:
        llm: the engine.
        call: `load` with prompts and tokens to generate; `profile` with these and a file for the
            timeline; `decode` with a case; or `path`.
    """
    kind, *given = call
    if kind == "path":
        return llm.collective_rpc(path_of)[0]
    if kind == "profile":
        prompts, max_tokens, trace = given
        return profile(lambda: serve_load(llm, prompts, max_tokens), trace)
    return {"load": serve_load, "decode": time_decode_steps}[kind](llm, *given)


def serve_load(llm: Any, prompts: list[list[int]], max_tokens: int) -> Figures:
    """All requests at once; what they took, and what was left behind."""
    import statistics

    from vllm import SamplingParams

    from vllm_kvcompress.vllm_plugin.compat.engine import engine_parts

    counter = counter_of(llm)
    pool = engine_parts(llm.llm_engine)[0].kv_cache_manager.block_pool
    free, events = pool.get_num_free_blocks(), counter.triggers.copy()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    before = llm.collective_rpc(allocated)[0]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = llm.collective_rpc(allocated)[0]

    def seconds_per_token(output: Any) -> float:
        metrics = output.metrics
        return (metrics.last_token_ts - metrics.first_token_ts) / max(1, max_tokens - 1)

    return {
        "taken_bytes": after["most"] - before["now"],
        "left_bytes": after["left"],
        "seconds": seconds,
        "requests_per_second": len(prompts) / seconds,
        "tokens_per_second": len(prompts) * max_tokens / seconds,
        "token_seconds": statistics.median(map(seconds_per_token, outputs)),
        "first_token_seconds": statistics.median(o.metrics.first_token_latency for o in outputs),
        "events": dict(counter.triggers - events),
        "lost_blocks": free - pool.get_num_free_blocks(),
        # Of the short ones: those that are not compressed are answered as by stock vLLM.
        "replies": [
            zlib.crc32(bytes(str(list(output.outputs[0].token_ids)), "ascii"))
            for output, prompt in zip(outputs, prompts, strict=True)
            if len(prompt) == SHORT_TOKENS
        ],
    }
