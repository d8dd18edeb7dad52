"""Workers and their model runners: the batch of a step, and steps without a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_kvcompress.errors import InvariantError
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.vllm_plugin.compat.config import NULL_BLOCK
from vllm_kvcompress.vllm_plugin.startup.versions import vllm_version

if TYPE_CHECKING:
    import torch


MAX_NEW_TOKENS = 2**31  # of requests that set no limit


def allow_amx() -> None:
    """Asks Linux to let this process use AMX tiles, where the CPU has them.

    vLLM's bf16 attention for CPUs uses them without asking. A process whose first prompt is so
    short that no matrix product of torch's has asked before is then ended by SIGILL.
    """
    import torch

    torch.cpu._init_amx()


def checks_gpu_syncs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has VLLM_GPU_SYNC_CHECK report where a worker's method waits for the GPU."""
    from vllm.utils.gpu_sync_debug import with_gpu_sync_check

    checked: Callable[..., Any] = with_gpu_sync_check(method)
    return checked


def gone_request_ids(scheduler_output: Any) -> set[str]:
    """Returns requests whose state workers must drop before this step."""
    output, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    return {*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids}


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


def host_lengths(common: Any) -> Any:
    """Returns [requests] logical tokens of each request, this step's included, as numpy.

    An upper bound if drafts may be rejected, else exact. Reading the device's would make it wait.
    """
    return common.seq_lens_cpu_upper_bound[: common.num_reqs].numpy()


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


def draft_layers(model_runner: Any) -> set[str]:
    """Returns names of the attention layers that a draft model has of its own."""
    if hasattr(model_runner, "req_states"):  # model runner V2
        return set(getattr(model_runner.speculator, "draft_attn_layer_names", ()))
    drafter = getattr(model_runner, "drafter", None)
    return set(getattr(drafter, "_draft_attn_layer_names", ()))


def metadata_builder(model_runner: Any, group: int, layer_name: str) -> Any:
    """Returns the metadata builder of a layer of one cache group."""
    (attn_group,) = [
        each for each in model_runner.attn_groups[group] if layer_name in each.layer_names
    ]
    return attn_group.get_metadata_builder()
