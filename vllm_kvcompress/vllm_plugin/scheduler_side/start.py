"""What a compressing scheduler refuses at its start, and what it says of the engine's capacity."""

from __future__ import annotations

from vllm.logger import init_logger

from vllm_kvcompress.config.auto import PROFILED_POLICY
from vllm_kvcompress.config.texts import budget_text
from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.draft_pace import MAX_DRAFTS
from vllm_kvcompress.scheduling.rule import CompressionRule
from vllm_kvcompress.vllm_plugin.scheduler_side.other_managers import DraftBlockManager
from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable
from vllm_kvcompress.vllm_plugin.scheduler_side.state_reuse import SAFE_HISTORY, StateReuse
from vllm_kvcompress.vllm_plugin.startup import versions

logger = init_logger(f"vllm.plugins.{__name__}")  # vLLM shows only loggers below its own

_CAPACITY = (
    "KV cache compressed with %s, budget %s, trigger %s: a prompt of %d tokens holds %d of its %d "
    "blocks, and up to %d while it is read; %d blocks serve %.2f such requests at a time "
    "(uncompressed: %.2f)."
)
_CONVERSATIONS = (
    "What requests leave is kept for the next turn of their conversation, as long as there is no "
    "other use for its blocks (--kv-reuse-conversations %s%s%s)."
)
_SPILL = (
    "Kept states whose blocks are needed are copied to %g GiB of host memory: %d blocks of %d "
    "tokens per KV head (--kv-spill)."
)
_DRAFT = (
    "The model drafts up to %d tokens, which read %s of the cache, and verifies them reading all "
    "of it, as long as measured times say that this is faster (--kv-draft)."
)
_WINDOW = "; events look at new queries, so a turn of fewer than %d tokens reads old ones again"


def check_reuse(table: RequestTable) -> None:
    """Refuses options that share states or chunks, if other layers of the model cannot.

    Raises:
        UnsupportedError: names the option.
    """
    settings = table.spec.settings
    chunks = table.spec.chunks is not None and table.managers[0].enable_caching
    beside = ", beside Mamba or linear-attention layers at most, and no drafts with these"
    for option, given, works, layers in (
        ("--kv-reuse-contexts", settings.reuse_contexts, table.keeps_states, beside),
        ("--kv-reuse-conversations", settings.conversations, table.keeps_states, beside),
        ("prefill in --kv-read, with prefix caching,", chunks, not table.others, " only"),
    ):
        if given and not works:
            raise UnsupportedError(
                f"{option} needs a model of full-attention layers{layers}: the others of this "
                "one would have to read the tokens again; leave it out."
            )
    if settings.spill is not None:
        _check_spill(table)


def _check_spill(table: RequestTable) -> None:
    """Refuses host memory for states that are not kept, or that it could not hold."""
    settings = table.spec.settings
    if not settings.reuse_contexts and table.conversations(settings) is None:
        raise UnsupportedError(
            "--kv-spill: expected kept conversations, which need prefix caching and a model of "
            "full-attention layers only, found neither these nor --kv-reuse-contexts; leave it "
            "out."
        )
    if table.others:
        raise UnsupportedError(
            "--kv-spill copies what full-attention layers keep to host memory, and this model "
            "has Mamba or linear-attention layers, whose states are not copied; leave it out."
        )


def announce(table: RequestTable, states: StateReuse, max_model_len: int) -> None:
    """Logs what is compressed, and what that means for capacity."""
    settings, rule, length = table.spec.settings, table.spec.rule, max_model_len
    num_blocks = ceil_div(length, rule.allocated_size)
    pool_blocks = states.kept.block_pool.num_gpu_blocks
    drafts = [each for each in table.all_managers if isinstance(each, DraftBlockManager)]
    num_beside = sum(ceil_div(length, each.block_size) for each in drafts)
    if settings.read is not None:
        logger.info("Decode steps read a part of what is held (--kv-read %s).", settings.read)
    if settings.draft is not None:
        logger.info(_DRAFT, MAX_DRAFTS, settings.draft)
    if settings.may_compress:
        logger.info(
            _CAPACITY,
            settings.policy,
            budget_text(settings),
            settings.trigger,
            length,
            rule.held_blocks(length),
            num_blocks,
            rule.admission_blocks(length),
            pool_blocks,
            pool_blocks / (pool_blocks / rule.concurrency(length, pool_blocks) + num_beside),
            pool_blocks / (num_blocks + num_beside),
        )
    how = table.conversations(settings)
    if settings.may_compress and how is not None:
        logger.info(
            _CONVERSATIONS,
            how,
            _meaning_of_auto(settings.policy, rule) if how == "auto" else "",
            _WINDOW % rule.needed_queries if rule.window_size else "",
        )
    host = states.kept.host
    if host is not None:
        logger.info(_SPILL, settings.spill, host.num_slots, rule.block_size)
    versions.warn_of_version(logger)


def _meaning_of_auto(policy: str, rule: CompressionRule) -> str:
    """Says what `--kv-reuse-conversations auto` does with a policy; see `compresses_anew`."""
    if not rule.window_size:
        return " = reuse, since the policy does not look at queries"
    anew = " = anew while the whole history is cached"
    if policy == PROFILED_POLICY:
        return f"{anew} and shorter than {SAFE_HISTORY} tokens, else reuse"
    return f"{anew}, since the policy looks at the last queries"
