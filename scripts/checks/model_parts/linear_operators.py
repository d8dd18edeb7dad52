"""Plain operators of linear attention, which vLLM has as Triton kernels alone, token by token."""

from __future__ import annotations

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
