"""FlashAttention's calling conventions, versions 2 and 3: what its C++ checks before it launches.

The checks are those of `mha_fwd` and `mha_fwd_get_scheduler_metadata` in vLLM's flash-attention
(hopper/flash_api_stable.cpp), and of `mha_varlen_fwd` for version 2. What its kernels compute is
`torch_kernels.paged_attention`. Violations raise AssertionError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.gpu_path.torch_kernels import paged_attention, write_cache

MOST_SPLITS = 256
MOST_BATCHES_TO_SPLIT = 992
ROW_ALIGNMENT_BYTES = 16  # of what is copied to shared memory as a tensor
MAX_HEAD_SIZE = 256
PAGE_SIZE_MULTIPLE = {2: 16, 3: 1}
calls: list[dict[str, Any]] = []  # what was asked for, for tests
schedules: list[int] = []  # that were made ahead: most queries of a request


def replace_flash_kernels(version: int) -> None:
    """In vLLM's FlashAttention backend."""
    from vllm.v1.attention.backends import fa_utils, flash_attn

    fa_utils.is_flash_attn_varlen_func_available = lambda: True
    flash_attn.get_flash_attn_version = lambda *args, **kwargs: version
    flash_attn.FlashAttentionMetadataBuilder._cudagraph_support = _cudagraph_support(version)
    flash_attn._FA4_DENSE_ATTENTION_KERNEL = varlen_attention
    flash_attn.get_scheduler_metadata = scheduler_metadata
    flash_attn.reshape_and_cache_flash = write_cache
    flash_attn.flash_attn_supports_quant_query_input = lambda: version == 3


def _cudagraph_support(version: int) -> Any:
    from vllm.v1.attention.backend import AttentionCGSupport

    return AttentionCGSupport.ALWAYS if version == 3 else AttentionCGSupport.UNIFORM_BATCH


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    block_table: Tensor,
    fa_version: int,
    num_splits: int,
    scheduler_metadata: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    **options: Any,
) -> None:
    """Checks, then computes."""
    batch = cu_seqlens_q.numel() - 1
    check_tensors(q, k, v, out, cu_seqlens_q, seqused_k, block_table)
    assert k.shape[1] % PAGE_SIZE_MULTIPLE[fa_version] == 0, f"pages of {k.shape[1]} tokens"
    assert type(max_seqlen_q) is int
    assert type(max_seqlen_k) is int
    assert max_seqlen_k <= block_table.shape[1] * k.shape[1], "lengths beyond the block table"
    splits = most_splits(batch, num_splits)
    if fa_version == 3:
        for scale in (q_descale, k_descale, v_descale):
            assert scale is None or scale.shape == (batch, k.shape[2])
        assert options.get("alibi_slopes") is None
        if scheduler_metadata is not None:
            size = metadata_size(batch, num_splits, bool(options["causal"]))
            check_numbers("scheduler_metadata", scheduler_metadata, (size,))
    else:
        assert num_splits <= 1, "version 2 splits as it likes, or not"
        assert scheduler_metadata is None
    for name in ("s_aux", "mask_mod", "aux_tensors", "dynamic_causal"):
        assert options.pop(name, None) is None, name
    calls.append({"batch": batch, "rows": q.shape[0], "heads": q.shape[1], "splits": splits})
    named = {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k, "block_table": block_table}
    bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    paged_attention(q=q, k=k, v=v, out=out, **named, **bounds, **options)


def scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype,
    cu_seqlens_q: Tensor,
    page_size: int,
    causal: bool,
    window_size: tuple[int, int],
    num_splits: int,
) -> Tensor:
    """The schedule of version 3, made ahead; its numbers are not read here."""
    assert qkv_dtype in (torch.float16, torch.bfloat16)
    assert num_heads_q % num_heads_kv == 0
    assert len(window_size) == 2
    check_numbers("cache_seqlens", cache_seqlens, (batch_size,))
    check_numbers("cu_seqlens_q", cu_seqlens_q, (batch_size + 1,))
    size = metadata_size(batch_size, num_splits, causal)
    schedules.append(max_seqlen_q)
    return torch.zeros(size, dtype=torch.int32)


def metadata_size(batch: int, num_splits: int, causal: bool) -> int:
    """A semaphore, and numbers per sequence: queries, splits, heads in the second-level cache."""
    vectors = 1 + (most_splits(batch, num_splits) > 1) + causal
    return 1 + -(-batch // 4) * 4 * vectors


def most_splits(batch: int, num_splits: int) -> int:
    """Most splits of one sequence; 0 leaves it to the heuristics, which may take 128."""
    assert 0 <= num_splits <= MOST_SPLITS
    return 1 if batch > MOST_BATCHES_TO_SPLIT else num_splits or 128


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor,
) -> None:
    """Types, shapes, strides."""
    batch, dtype, head_size = cu_seqlens_q.numel() - 1, q.dtype, q.shape[-1]
    assert dtype in (torch.float16, torch.bfloat16)
    assert k.dtype == v.dtype == out.dtype == dtype
    assert q.dim() == 3
    assert out.shape == q.shape
    assert k.dim() == v.dim() == 4
    assert k.shape == v.shape
    assert k.shape[-1] == head_size
    assert head_size % 8 == 0
    assert head_size <= MAX_HEAD_SIZE
    assert q.shape[1] % k.shape[2] == 0
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        assert tensor.stride(-1) == 1, f"{name}: strides {tensor.stride()}"
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        aligned = all(stride % ROW_ALIGNMENT_BYTES == 0 for stride in strides)
        assert aligned, f"{name}: strides of {strides} bytes"
        assert tensor.data_ptr() % ROW_ALIGNMENT_BYTES == 0, name
    check_numbers("cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    check_numbers("seqused_k", seqused_k, (batch,))
    assert block_table.dtype == torch.int32
    assert block_table.dim() == 2
    assert block_table.shape[0] == batch, f"{block_table.shape[0]} rows, {batch} sequences"
    assert block_table.stride(-1) == 1, f"block_table: strides {block_table.stride()}"


def check_numbers(name: str, numbers: Tensor, shape: tuple[int, ...]) -> None:
    """int32, contiguous, and of this shape."""
    assert numbers.dtype == torch.int32, f"{name}: {numbers.dtype}"
    assert numbers.is_contiguous(), f"{name}: strides {numbers.stride()}"
    assert numbers.shape == shape, f"{name}: {tuple(numbers.shape)}, expected {shape}"
