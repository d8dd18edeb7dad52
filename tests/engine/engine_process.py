"""Runs the real engine in a process of its own and reports what it did, step by step.

The engine core runs inside this process, so that the bookkeeping of scheduler and worker can be
compared after every step. A scenario is a dictionary:

    model: directory            engine: keyword arguments of vllm.LLM
    settings: our settings, or null for stock vLLM
    asynchronous: schedule the next step while one runs
    phases: list of lists of requests {id, prompt, max_tokens, at_step?, abort_at_step?, xargs?,
        n? (choices, drawn at random; the second one is "ID/1"), lora? (an adapter's directory),
        logprobs? (of every token; 5), prompt_logprobs?, salt? (of the prefix cache), follows?
        (a request of a former phase whose prompt and reply come before the prompt), taking?
        (so many tokens of that reply), images? (files, for which the prompt has placeholders)}
    record_kept: report the kept indices of every event
    probes: names (module:function) of what is called with the report before the engine starts
    calls: lists [phase, method of the workers, keyword arguments] of what is called before a phase;
        "reset_prefix_cache" is the engine's
    afterwards: names (module:function) of what is called with the engine, its bookkeeping and the
        report when the phases have ended
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pkgutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

PLUGIN = "vllm_kvcompress.vllm_plugin"
SPILLED = ("states_spilled", "states_restored")
SHORT_PROMPTS = {"min_tokens": 64}  # are compressed, unless a scenario says otherwise


def build_engine(scenario: dict[str, Any]) -> Any:
    """Builds a vLLM engine in this process, stock or with compression."""
    from vllm import LLM, EngineArgs
    from vllm.config.reasoning import ReasoningConfig
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import multiproc_executor

    # Spawned, the workers of several ranks would import everything again.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    # Nor do ranks that wait for each other keep the cores busy.
    shm_broadcast.sched_yield = lambda: time.sleep(2e-4)
    arguments = {
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 2048,
        "dtype": "float32",
        "disable_log_stats": False,
        **scenario["engine"],
    }
    if "reasoning_end" in arguments:  # tokens, which vLLM else takes from texts
        end = arguments.pop("reasoning_end")
        arguments["reasoning_config"] = reasoning = ReasoningConfig()
        reasoning._reasoning_start_token_ids = reasoning._reasoning_end_token_ids = end
        reasoning._natural_reasoning_end_token_ids = end
    if scenario.get("settings"):
        arguments = {
            "additional_config": {"kvcompress": {**SHORT_PROMPTS, **scenario["settings"]}},
            "scheduler_cls": f"{PLUGIN}.scheduler_side.scheduler.CompressionScheduler",
            "worker_cls": f"{PLUGIN}.worker_side.cpu_worker.CompressionCPUWorker",
            **arguments,
        }
    if (scenario.get("settings") or {}).get("draft"):
        from vllm_kvcompress.config.settings import Settings
        from vllm_kvcompress.vllm_plugin.compat.options import plugin_options

        given = plugin_options(Settings.from_dict(scenario["settings"]))
        arguments.setdefault("speculative_config", json.loads(given["speculative_config"]))
    if not scenario.get("asynchronous"):
        return LLM(scenario["model"], **arguments).llm_engine
    config = EngineArgs(scenario["model"], **arguments).create_engine_config()
    config.scheduler_config.async_scheduling = True  # which vLLM switches off on CPUs
    return LLMEngine.from_vllm_config(config)


class Bookkeeping:
    """Compares the bookkeeping of scheduler, block pool and worker."""

    def __init__(self, engine: Any) -> None:
        core = engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.table = getattr(core.scheduler, "table", None)  # none where nothing is compressed
        self.compressed = () if self.table is None else self.table.managers
        self.pool = core.scheduler.kv_cache_manager.block_pool
        self.connector = core.scheduler.connector
        self.managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        # With several ranks the workers are processes of their own.
        driver = getattr(core.model_executor, "driver_worker", None)
        self.worker = getattr(driver, "worker", None)

    def check(self) -> None:
        """Checks: free + owned = pool, fresh blocks have one owner, pages lie in owned blocks."""
        if self.table is not None:
            from vllm_kvcompress.vllm_plugin.scheduler_side.integrity import check_integrity

            kept = self.scheduler.states.kept
            check_integrity(self.table, kept, self.scheduler.requests)
        owners: Counter[int] = Counter()
        for manager in self.managers:
            for request_id in set(manager.req_to_blocks) | set(self.scheduler.requests):
                owners.update(self.owned(manager, request_id))
        if self.table is not None:
            owners.update(block.block_id for block in self.table.recurrent.values())
        for block_id, count in owners.items():
            # A connector may hold blocks, too, while it copies them.
            actual = self.pool.blocks[block_id].ref_cnt
            assert actual == count or (self.connector and actual > count), (block_id, count)
        in_use = sum(block.ref_cnt > 0 and not block.is_null for block in self.pool.blocks)
        assert self.connector or in_use == len(owners), (in_use, len(owners))
        total = self.pool.get_num_free_blocks() + in_use + 1
        assert total == self.pool.num_gpu_blocks, (total, self.pool.num_gpu_blocks)
        for manager in self.compressed:
            if self.worker is not None:
                self.check_pages(manager, owners)

    def check_states(self) -> int:
        """Checks that workers hold exactly the kept states, apart from unsent changes."""
        kept, (group,) = self.scheduler.states.kept, self.worker.compression.groups.values()
        numbers = {state.number for states in kept._by_hash.values() for state in states}
        unsent = set(self.scheduler.states._saves.values())
        assert not self.scheduler.states.kept.expected, "no request waits at the end"
        assert numbers - unsent <= set(group.tables.saved) <= numbers | set(kept._dropped)
        return len(numbers)

    def owned(self, manager: Any, request_id: str) -> list[int]:
        blocks = [b for b in manager.req_to_blocks.get(request_id, ()) if not b.is_null]
        if manager in self.compressed and request_id in self.scheduler.requests:
            held = self.table[request_id].groups[manager.kv_cache_group_id]
            blocks += [*held.kept, *held.fresh, *held.window]
        return [block.block_id for block in blocks]

    def check_pages(self, manager: Any, owners: Counter[int]) -> None:
        import torch

        tables = self.worker.compression.groups[manager.kv_cache_group_id].tables
        for request_id in manager.req_to_blocks:
            owned = len(self.owned(manager, request_id))
            assert manager.num_blocks_held(request_id) == owned, request_id
        for request_id, slot in tables.slots.items():
            if request_id not in manager.req_to_blocks:
                continue  # finished in this step; the worker hears of it with the next
            owned_blocks = set(self.owned(manager, request_id))
            seen: set[int] = set()
            num_tail = int(tables.tails.num_pages[slot])
            table = tables.rows.read(
                torch.tensor([slot]), int(tables.counts[:, slot].max()) + num_tail
            )
            for layer in range(tables.pool.num_layers):
                for head in range(tables.pool.num_heads):
                    count = int(tables.counts[layer, slot, head])
                    pages = table[layer, 0, head, : count + num_tail].tolist()
                    assert len(set(pages)) == len(pages)
                    assert not seen & set(pages), "a page belongs to two heads"
                    seen |= set(pages)
            pages_per_block = tables.pool.pages_per_block * manager.kv_cache_spec.split
            blocks = {page // pages_per_block for page in seen}
            assert blocks <= owned_blocks, (request_id, blocks - owned_blocks)
            record = self.table[request_id]
            held = record.groups[manager.kv_cache_group_id]
            for block in held.kept + held.fresh:
                assert owners[block.block_id] == 1 or record.reuse.state is not None
                assert block.block_hash is None, "a compressed block is in the prefix cache"


def record_kept(report: dict[str, Any]) -> None:
    """Reports every layer's selection in the order of the events, and how many ran at once."""
    from vllm_kvcompress.compression import runner as events

    compress = events.compress_batch

    def recording(pipeline: Any, view: Any, totals: Any) -> Any:
        selection = compress(pipeline, view, totals)
        state = selection.merged.state
        rows = {
            "counts": selection.page_counts.tolist(),
            "source": view.lengths.tolist(),
            "state": None if state is None else state[:, 0].tolist(),
            "tokens": tokens(view, selection),
            "accumulated": by_head(view, selection, selection.merged.accumulated),
        }
        kept, keys = selection.kept_indices.tolist(), unrotated(view, selection)
        size, first = view.heads_per_request, 0
        for start in range(0, view.num_heads, size):  # a request's heads in a layer
            layer = view.layers[start // size if len(view.layers) > 1 else 0]
            report["at_once"] = max(report["at_once"], len(view.layers))
            record = {name: row and row[start : start + size] for name, row in rows.items()}
            end = first + sum(record["counts"]) * view.block_size
            record |= {
                "layer": layer,
                "kept": kept[first:end],
                "num_queries": view.queries.shape[0],
                "tail": int(view.kv.tails[start]),
                "unrotated": keys and keys[first:end],
            }
            first = end
            report["kept"].append(record)
        return selection

    def tokens(view: Any, selection: Any) -> list[list[float]] | None:
        """Returns by head the tokens each kept entry stands for, if the policy state has them."""
        bias = selection.merged.bias
        return by_head(view, selection, None if bias is None else bias.exp())

    def by_head(view: Any, selection: Any, entries: Any) -> list[list[float]] | None:
        """Splits numbers of the kept entries by head."""
        if entries is None:
            return None
        parts = selection.kept_indices.split((selection.page_counts * view.block_size).tolist())
        return [entries[h, part].tolist() for h, part in enumerate(parts)]

    def unrotated(view: Any, selection: Any) -> list[list[float]] | None:
        """Returns the merged keys rotated back to position 0, where a policy merges unrotated."""
        merged = selection.merged
        if merged.positions is None or merged.keys is None:
            return None
        heads = (selection.page_counts * view.block_size).tolist()
        head = [h for h, count in enumerate(heads) for _ in range(count)]
        keys = merged.keys[head, selection.kept_indices].float()
        return view.rotary.rerotate(keys, -merged.positions[head, selection.kept_indices]).tolist()

    events.compress_batch = recording


def before(request: dict[str, Any], report: dict[str, Any]) -> list[int]:
    """Returns the tokens of the conversation that a request continues."""
    former = request.get("follows")
    if former is None:
        return []
    reply = report["outputs"][former]["tokens"][: request.get("taking")]
    return [*report["prompts"][former], *reply]


def run_phase(
    engine: Any, books: Bookkeeping, requests: list[dict], report: dict[str, Any]
) -> None:
    """Feeds a phase's requests at their steps, and runs until all have ended."""
    waiting = sorted(requests, key=lambda r: r.get("at_step", 0))
    aborts = {r["id"]: r["abort_at_step"] for r in requests if "abort_at_step" in r}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].get("at_step", 0) <= step:
            add_request(engine, waiting.pop(0), report)
        for request_id in [r for r, at in aborts.items() if at == step]:
            engine.abort_request([request_id])
        for output in engine.step():
            if output.finished:
                record_output(output, report)
        books.check()
        report["usage"].append(books.pool.get_usage())
        held = {}
        for manager in books.compressed:
            for request_id in manager.req_to_blocks:
                name = request_id.rpartition("-")[0]  # vLLM appends a random suffix
                held[name] = manager.num_blocks_held(request_id)
        report["held"].append(held)
        step += 1
        assert step < 5000, "the engine does not come to an end"
        if not books.scheduler.running:
            time.sleep(0.01)  # for a connector, on which everybody waits
    while books.scheduler.has_unfinished_requests():  # those that score answers
        assert not engine.step()
        books.check()


def await_copies(engine: Any, books: Bookkeeping) -> None:
    """Runs until the connector has copied what it is copying."""
    while books.connector is not None and books.connector.has_pending_push_work():
        assert not engine.step()
        books.check()


def add_request(engine: Any, request: dict[str, Any], report: dict[str, Any]) -> None:
    """Gives a scenario's request to the engine."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    several = {"n": request["n"], "temperature": 1} if "n" in request else {}
    params = SamplingParams(
        max_tokens=request["max_tokens"],
        detokenize=False,
        ignore_eos=True,
        logprobs=request.get("logprobs", 5),
        extra_args=request.get("xargs"),
        prompt_logprobs=request.get("prompt_logprobs"),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **{"temperature": 0, **several},
    )
    tokens = before(request, report) + request["prompt"]
    report["prompts"][request["id"]] = tokens
    prompt, adapter = {"prompt_token_ids": tokens}, request.get("lora")
    if "salt" in request:
        prompt["cache_salt"] = request["salt"]
    if "images" in request:
        from PIL import Image

        images = [Image.open(path) for path in request["images"]]
        prompt["multi_modal_data"] = {"image": images}
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    engine.add_request(request["id"], prompt, params, lora_request=lora)


def record_output(output: Any, report: dict[str, Any]) -> None:
    """Reports the tokens and logprobs of every choice of an ended request."""
    for choice in output.outputs:
        name = f"{output.request_id}/{choice.index}" if choice.index else output.request_id
        report["prompts"][name] = report["prompts"][output.request_id]
        report["outputs"][name] = {
            "tokens": list(choice.token_ids),
            "logprobs": [
                {str(t): lp.logprob for t, lp in position.items()}
                for position in choice.logprobs or ()
            ],
            "cached": output.num_cached_tokens,
            "finish_reason": choice.finish_reason,
            "transfer": output.kv_transfer_params,
            "prompt_logprobs": [
                {str(t): lp.logprob for t, lp in (position or {}).items()}
                for position in output.prompt_logprobs or ()
            ],
        }


def count_preemptions(books: Bookkeeping, report: dict[str, Any]) -> None:
    """Reports how many requests are preempted, and how many of them keep a state to continue."""
    report["preemptions"], report["preempted_going_on"] = 0, 0
    preempt = books.scheduler._preempt_request

    def counting(request: Any, *args: Any, **kwargs: Any) -> Any:
        report["preemptions"] += 1
        if books.table is not None:
            state = books.table[request.request_id].reuse.state
            report["preempted_going_on"] += state is not None
        return preempt(request, *args, **kwargs)

    books.scheduler._preempt_request = counting


def record_stats(books: Bookkeeping, report: dict[str, Any]) -> None:
    """Reports this package's part of the statistics that the scheduler makes every step."""
    from vllm_kvcompress.vllm_plugin.compat.messages import detach_stats

    make_stats = books.scheduler.make_stats

    def recording(*args: Any, **kwargs: Any) -> Any:
        stats = make_stats(*args, **kwargs)
        if stats and stats.connector_prefix_cache_stats:
            report["loaded_tokens"] += stats.connector_prefix_cache_stats.hits
        ours = stats and detach_stats(stats)
        if ours:
            report["events"] += ours["events"]
            report["contexts_reused"] += ours["contexts_reused"]
            report["most_held_tokens"] = ours["most_held_tokens"]
            report["pages"].append([ours["read_pages"], ours["held_pages"]])
            for skipped in ours["skipped"]:
                name = f"{skipped['policy']} {skipped['reason']}"
                report["skipped"][name] = report["skipped"].get(name, 0) + skipped["count"]
            report["conversations_continued"] += ours["conversations_continued"]
            report["forgotten"].update(ours["forgotten"])
            for name in SPILLED:
                report[name] += ours[name]
            report["spilled_bytes"] = max(report["spilled_bytes"], ours["spilled_bytes"])
            report["prompt_events"].update(ours["prompt_events"])
            report["shadows"] += ours["shadows"]
            report["shadow_outcomes"].update(ours["shadow_outcomes"])
            gains = [event["blocks_freed"] - event["blocks_written"] for event in ours["events"]]
            report["reclaimable"].append([ours["reclaimable_blocks"], sum(gains)])
        return stats

    books.scheduler.make_stats = recording


def run(scenario_path: str, report_path: str, log_path: str, environment: dict[str, str]) -> None:
    """Runs a scenario in this process; writes its report and a log."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    gc.freeze()  # vLLM collects garbage again and again, and all that it has imported is none
    import torch._dynamo

    scenario = json.loads(Path(scenario_path).read_text())
    if scenario["engine"].get("enforce_eager", True):
        # vLLM compiles the ranks of logprobs even in eager mode, in every process anew.
        torch._dynamo.config.disable = True
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # in the processes of several ranks, too
    report: dict[str, Any] = {"outputs": {}, "usage": [], "held": [], "kept": [], "events": []}
    report["contexts_reused"], report["reclaimable"], report["skipped"] = 0, [], {}
    report["pages"], report["prompt_events"] = [], Counter()
    report["at_once"], report["loaded_tokens"] = 0, 0
    report["shadows"], report["shadow_outcomes"] = [], Counter()
    report |= dict.fromkeys((*SPILLED, "spilled_bytes"), 0)
    report["conversations_continued"], report["forgotten"], report["prompts"] = 0, Counter(), {}
    if scenario.get("record_kept"):
        record_kept(report)
    for name in scenario.get("probes", ()):
        pkgutil.resolve_name(name)(report)
    engine = build_engine(scenario)
    report["kept"].clear()  # of the event that warms a GPU up
    books = Bookkeeping(engine)
    count_preemptions(books, report)
    record_stats(books, report)
    for number, phase in enumerate(scenario["phases"]):
        for at, method, arguments in scenario.get("calls", ()):
            if at == number and method == "reset_prefix_cache":
                assert engine.reset_prefix_cache()
            elif at == number:
                engine.collective_rpc(method, kwargs=arguments)
        run_phase(engine, books, phase, report)
        if "afterwards" not in scenario:  # which may be what another engine waits for
            await_copies(engine, books)
    for name in scenario.get("afterwards", ()):
        pkgutil.resolve_name(name)(engine, books, report)
    cache_config = engine.vllm_config.cache_config
    report["max_concurrency"] = cache_config.kv_cache_max_concurrency
    report["num_blocks"] = books.pool.num_gpu_blocks
    report["free_at_end"] = books.pool.get_num_free_blocks()
    if books.worker is not None and len(books.compressed) == 1:
        report["states"] = books.check_states()
    Path(report_path).write_text(json.dumps(report))
    if books.worker is not None:  # no process of vLLM's to end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # vLLM's orderly end takes as long as a small scenario
