"""Plain operators of linear attention, which vLLM has as Triton kernels alone, token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import normalize, silu, softplus


def olmo_hybrid() -> None:
    """Gives OLMo Hybrid its gates and its gated delta rule."""
    from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn as module

    def gating(
        a_log: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        dt_bias: torch.Tensor,
        allow_neg_eigval: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gates = -a_log.float().exp() * softplus(a.float() + dt_bias)
        return gates[None], b.float().sigmoid()[None] * (2 if allow_neg_eigval else 1)

    module.set_triton_allocator = lambda device: None
    module.fused_olmo_hybrid_gdn_gating = gating
    module.chunk_gated_delta_rule = module.fused_recurrent_gated_delta_rule = delta_rule


def bailing_v3() -> None:
    """Gives Bailing V3 its gates and its delta rule with a gate per channel."""
    from vllm.model_executor.models import bailing_moe_v3 as module

    def gate(
        logits: torch.Tensor,
        a_log: torch.Tensor,
        head_size: int,
        g_bias: torch.Tensor,
        lower_bound: float | None,
    ) -> torch.Tensor:
        rates = a_log.float().exp().view(-1, 1)
        biased = (logits.float() + g_bias.flatten()).unflatten(-1, (-1, head_size))
        if lower_bound is not None:
            return lower_bound * (rates * biased).sigmoid()
        return -rates * softplus(biased)

    divide_mla_blocks()
    module.fused_kda_gate = gate
    module.chunk_kda = module.fused_recurrent_kda = delta_rule


def bailing_v2_5() -> None:
    """Gives Bailing V2.5 linear attention with a constant decay, and its norms."""
    from vllm.model_executor.layers.mamba.linear import minimax_linear_attn as module
    from vllm.third_party.flash_linear_attention.ops import layernorm_guard

    def prefill(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: torch.Tensor,
        slopes: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        tokens = zip(*(heads.transpose(0, 1) for heads in (q, k, v)), strict=True)
        outputs = [decayed(state, *rows, slopes) for rows in tokens]
        return torch.stack(outputs).flatten(1)

    def decode(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        states: torch.Tensor,
        slopes: torch.Tensor,
        blocks: torch.Tensor,
        *_: Any,
    ) -> torch.Tensor:
        rows = zip(blocks.flatten().tolist(), q[:, :, 0], k[:, :, 0], v[:, :, 0], strict=True)
        return torch.stack([decayed(states[at], *row, slopes) for at, *row in rows]).flatten(1)

    divide_mla_blocks()
    module.MiniMaxText01LinearKernel.jit_linear_forward_prefix = staticmethod(prefill)
    module.linear_decode_forward_triton = decode
    layernorm_guard._layer_norm_fn_impl = gated_norm


def kimi_linear() -> None:
    """Gives Kimi Linear its delta rule with a gate per channel, and what its MLA layers call."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as module
    from vllm.models.kimi_k3.nvidia import mla
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.v1.attention.backends.mla.prefill import cpu_sdpa

    def gates(raw_g: torch.Tensor, a_log: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        biased = raw_g.float() + bias.view(raw_g.shape[-2:])
        return -a_log.float().exp().view(-1, 1) * softplus(biased)

    def prefill(raw_g: Any, raw_beta: Any, A_log: Any, g_bias: Any, **more: Any) -> Any:
        return delta_rule(g=gates(raw_g, A_log, g_bias), beta=raw_beta.float().sigmoid(), **more)

    def decode(
        mixed_qkv: torch.Tensor,
        raw_g: torch.Tensor,
        raw_beta: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        initial_state: torch.Tensor,
        state_indices: torch.Tensor,
        **_: Any,
    ) -> Any:
        q, k, v = mixed_qkv.unflatten(1, (3, *raw_g.shape[-2:])).transpose(0, 1)[:, None]
        starts = torch.arange(len(mixed_qkv) + 1)
        some = gates(raw_g, A_log, dt_bias), raw_beta.float().sigmoid()
        return delta_rule(q, k, v, *some, initial_state, starts, state_indices)

    module.FusedRMSNormGated.forward_cuda = module.FusedRMSNormGated.forward_native
    module.causal_conv1d_fn, module.causal_conv1d_update = convolved, convolved_once
    module.gather_initial_states = lambda state, blocks, has_state: (
        state[blocks] * has_state.view(-1, *[1] * (state.dim() - 1))
    )
    kda.chunk_kda_with_fused_gate, kda.fused_recurrent_kda_packed_decode = prefill, decode
    pack = utils.dispatch_cpu_unquantized_gemm
    # Packing on CPUs may drop a layer's plain weights, which these MLA layers read.
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, False)
    cpu_sdpa.CPUSDPAMLAPrefillBackend.supports_out = lambda self: False  # chunks ignore it
    _custom_ops.gather_and_maybe_dequant_cache = gather_rows
    mla.fused_mla_key_concat_kv_cache_insert = insert_keys
    mla.fused_mla_decode_q_concat_kv_cache_insert = insert_decoded
    mla.fused_mla_kv_concat = lambda k_nope, k_pe: full_keys(k_nope, k_pe)


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Returns SiLU of the causal convolution of [channels, tokens], and keeps the last tokens."""
    out = torch.empty_like(x)
    for request, (first, last) in enumerate(pairwise(query_start_loc.tolist())):
        state = conv_states[cache_indices[request]]
        before = state * has_initial_state[request]
        rows = torch.cat((before, x[:, first:last]), dim=1)
        windows = rows.float().unfold(1, weight.shape[1], 1)
        out[:, first:last] = silu((windows * weight[:, None].float()).sum(-1)).to(x.dtype)
        state.copy_(rows[:, -state.shape[1] :])
    return out


def convolved_once(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Does the same for [requests, channels], a token of each."""
    starts, has_state = torch.arange(len(x) + 1), torch.ones(len(x), dtype=torch.bool)
    return convolved(x.T, weight, None, conv_states, has_state, conv_state_indices, starts).T


def full_keys(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Returns the keys of heads, [tokens, heads, nope + rope], of which heads share the rest."""
    shared = k_pe.reshape(len(k_pe), 1, -1).expand(-1, k_nope.shape[1], -1)
    return torch.cat((k_nope, shared), dim=-1)


def insert_keys(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    """Writes latent rows of prompts to slots, and returns the keys of heads."""
    insert_rows(kv_c, k_pe, cache, slots)
    return full_keys(k_nope, k_pe)


def insert_decoded(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Writes latent rows of new tokens to slots, and returns their absorbed queries."""
    insert_rows(kv_c, k_pe, cache, slots)
    return torch.cat((q_latent, q_pe), dim=-1)


def insert_rows(
    kv_c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes [tokens, any] latent vectors and keys to slots of [blocks, size, row size]."""
    rows = torch.cat((kv_c, k_pe.reshape(len(k_pe), -1)), dim=-1)
    slots, rows = slots[slots >= 0], rows[: len(slots)][slots >= 0]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows.to(cache.dtype)


def gather_rows(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    seq_starts: torch.Tensor,
    **_: Any,
) -> None:
    """Copies latent rows of contexts, from where each starts, one request behind the other."""
    starts = zip(seq_starts.tolist(), block_table, strict=True)
    for (start, blocks), (first, last) in zip(starts, pairwise(cu_seq_lens.tolist()), strict=False):
        places = torch.arange(start, start + last - first)
        at = blocks[places // src_cache.shape[1]].long()
        dst[first:last] = src_cache[at, places % src_cache.shape[1]]


def divide_mla_blocks() -> None:
    """Lets MLA on CPUs take blocks that are as long as linear attention wants them.

    vLLM's kernel for CPUs takes 16 tokens, and those for GPUs any multiple.
    """
    from vllm import _custom_ops
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    CPUMLABackend.supports_block_size = classmethod(lambda cls, size: not size or size % 16 == 0)
    sizes = staticmethod(lambda spec=None: [MultipleOf(16)])
    CPUMLABackend.get_supported_kernel_block_sizes = sizes
    _custom_ops.mla_decode_kvcache_cpu = mla_decode


def mla_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Writes the attention of each request's query over its latent rows to `out`."""
    for request, length in enumerate(seq_lens.tolist()):
        blocks = block_tables[request, : -(-length // cache.shape[1])]
        rows = cache[blocks].flatten(0, 1)[:length].float()
        weights = (query[request].float() @ rows.T * scale).softmax(-1)
        out[request] = weights @ rows[:, : out.shape[-1]]


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ssm_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the gated delta rule on [1, tokens, heads, ...] and returns outputs and states.

    Gates are of heads or of their channels. States are of requests; with indices they are of
    blocks, and are changed in place.
    """
    starts = cu_seqlens.tolist()
    states = initial_state if ssm_state_indices is not None else initial_state.clone()
    blocks = (
        range(len(starts)) if ssm_state_indices is None else ssm_state_indices.flatten().tolist()
    )
    queries, keys = (normalize(rows[0].float(), dim=-1) for rows in (q, k))
    queries *= q.shape[-1] ** -0.5
    decays = g[0].float().exp()
    decays = decays[..., None] if decays.dim() == 2 else decays
    out = torch.empty_like(v)
    for block, first, last in zip(blocks, starts, starts[1:], strict=False):
        state = states[block].float()  # [heads, values, keys]
        for token in range(first, last):
            state = state * decays[token, :, None]
            key = keys[token, :, :, None]
            error = v[0, token].float()[:, :, None] - state @ key
            state = state + beta[0, token, :, None, None].float() * error * key.transpose(1, 2)
            out[0, token] = (state @ queries[token, :, :, None])[..., 0].to(out.dtype)
        states[block] = state.to(states.dtype)
    return out, states


def decayed(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    """Takes a token into a [heads, keys, values] state in place, and returns the state's answer."""
    kept = state.float() * (-slopes.float().view(-1, 1, 1)).exp()
    state.copy_(kept + k[:, :, None].float() * v[:, None].float())
    return (q[:, None].float() @ state.float())[:, 0].to(q.dtype)


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> torch.Tensor:
    """Returns the RMS norm of groups of elements, gated before or behind."""
    assert is_rms_norm
    assert bias is None
    gate = None if z is None else (torch.sigmoid if activation == "sigmoid" else silu)(z.float())
    values = x.float() if gate is None or norm_before_gate else x.float() * gate
    groups = values.unflatten(-1, (-1, group_size or x.shape[-1]))
    groups = groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()
    values = groups.flatten(-2) * weight.float()
    return (values if gate is None or not norm_before_gate else values * gate).to(x.dtype)
