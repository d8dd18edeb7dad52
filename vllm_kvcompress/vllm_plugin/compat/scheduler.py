"""The scheduler: methods of its that we extend, and what we read of it and of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_kvcompress.vllm_plugin.compat.config import NULL_BLOCK

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

else:
    Scheduler = object

_Connector = TypeVar("_Connector")


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


def recomputes_failed_loads(scheduler: Any) -> bool:
    """Whether requests go on whose tokens a connector failed to load."""
    recomputes: bool = scheduler.recompute_kv_load_failures
    return recomputes


def reserve_drafts(scheduler: Any, num_drafts: int) -> None:
    """Has a scheduler allocate blocks for tokens that are drafted behind a step.

    It does so by itself for methods of vLLM's that write to the cache.
    """
    scheduler.num_lookahead_tokens = num_drafts


def num_unverified_drafts(scheduler: Any, request: Request) -> int:
    """Returns an upper bound on a request's draft tokens that are not verified yet.

    With asynchronous scheduling vLLM counts them as computed until they are rejected. A step under
    way yields one token in any case; without asynchronous scheduling there are none.
    """
    num_in_flight: int = request.num_output_placeholders if scheduler.num_spec_tokens else 0
    return max(0, num_in_flight - 1)


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
