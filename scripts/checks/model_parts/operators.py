"""Plain operators in place of those that vLLM's CPU build lacks, the same for every engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import pairwise, product, takewhile
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.nn.functional import silu, softplus

from model_parts import linear_operators, relative_operators


def install(architecture: str) -> None:
    """Gives this process the operators that a class needs and vLLM's CPU build lacks."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    multiply = _custom_ops.onednn_mm
    _custom_ops.onednn_mm = lambda weight, x, bias: multiply(weight, x.contiguous(), bias)
    _custom_ops.selective_scan_fwd = selective_scan
    update = _of_either_mamba(_custom_ops.selective_state_update_cpu)
    _custom_ops.selective_state_update_cpu = update
    _custom_ops.topk_softmax = top_k(lambda logits: logits.softmax(-1))
    _custom_ops.topk_sigmoid = top_k(torch.sigmoid)
    CPURouter._compute_routing = routing_with_sigmoid(CPURouter._compute_routing)
    if architecture in SINGLE:
        SINGLE[architecture]()


def top_k(score: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Returns the operator that routes tokens to the experts of the highest scores."""

    def route(
        weights: torch.Tensor,
        ids: torch.Tensor,
        _: Any,
        logits: torch.Tensor,
        renormalize: bool = False,
        bias: torch.Tensor | None = None,
        routed_scaling_factor: float = 1.0,
        is_padding: torch.Tensor | None = None,
    ) -> None:
        scores = score(logits.float())
        chosen = (scores if bias is None else scores + bias).topk(weights.shape[1]).indices
        ids.copy_(chosen)
        weights.copy_(scores.gather(1, chosen))
        if renormalize:
            weights /= weights.sum(-1, keepdim=True)
        weights *= routed_scaling_factor

    return route


def routing_with_sigmoid(compute_routing: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the router of CPUs that also scores ungrouped experts by sigmoid."""

    def routing(
        self: Any, hidden_states: torch.Tensor, logits: torch.Tensor, *more: Any, **kw: Any
    ) -> Any:
        others = self.use_grouped_topk or self.custom_routing_function is not None
        if others or self.scoring_func != "sigmoid":
            return compute_routing(self, hidden_states, logits, *more, **kw)
        weights = torch.empty(len(logits), self.top_k)
        ids = torch.empty(len(logits), self.top_k, dtype=torch.int32)
        bias, scale = self.e_score_correction_bias, float(self.routed_scaling_factor)
        top_k(torch.sigmoid)(weights, ids, None, logits, self.renormalize, bias, scale)
        return weights, ids

    return routing


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    states: torch.Tensor,
    *_: Any,
) -> None:
    """Scans requests token by token (Mamba 1), in place of z or delta, and keeps last states."""
    starts = query_start_loc.tolist()
    out = delta if z is None else z
    for request, (first, last) in enumerate(pairwise(starts)):
        block = cache_indices[request : request + 1]
        states[block] *= has_initial_state[request]
        for token in range(first, last):
            row = u[None, :, token], delta[None, :, token], a, b[:, :, token], c[:, :, token], d
            gate = None if z is None else z[None, :, token]
            more = gate, delta_bias, delta_softplus, block, block, None, out[None, :, token]
            state_update(states, *row, *more)


def state_update(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    sources: torch.Tensor,
    targets: torch.Tensor,
    _: Any,
    out: torch.Tensor,
    *__: Any,
) -> None:
    """Takes a token per request into [block, channel, state] states (Mamba 1), with one group."""
    steps = dt.float() + (0 if dt_bias is None else dt_bias)
    steps = (softplus(steps) if dt_softplus else steps)[:, :, None]
    state = (
        states[sources.flatten()].float() * (steps * a).exp() + steps * b[:, None] * x[:, :, None]
    )
    states[targets.flatten()] = state.to(states.dtype)
    result = (state * c[:, None]).sum(-1) + d * x
    out.copy_(result if z is None else result * silu(z.float()))


def _of_either_mamba(update: Callable[..., None]) -> Callable[..., None]:
    """Returns the operator for Mamba 2, whose states have heads, that takes Mamba 1 as well."""
    return lambda states, *args: (update if states.dim() == 4 else state_update)(states, *args)


def _longcat() -> None:
    """Has LongCat's router ask its experts that return their input, and no Triton kernel."""
    from vllm.model_executor.layers.fused_moe.router import zero_expert_router

    def compute(
        expert_indices: torch.Tensor,
        expert_scales: torch.Tensor,
        num_experts: int,
        zero_expert_type: str,
        hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        weights = expert_scales.masked_fill(expert_indices < num_experts, 0).sum(1, keepdim=True)
        return (weights * hidden_states).to(hidden_states.dtype)

    zero_expert_router.zero_experts_compute_triton = compute


def n_gram_ids(
    n: int,
    k: int,
    weights: torch.Tensor,
    mods: torch.Tensor,
    offsets: torch.Tensor,
    starts: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Hashes each token and those before it, up to a negative one, in n - 1 lengths k times."""
    for request, (first, last) in enumerate(pairwise(starts.tolist())):
        row, column = tokens[int(rows[request])].tolist(), int(columns[request])
        for at, length, by in product(range(first, last), range(n - 1), range(k)):
            ends, number = column + at - first, length * k + by
            before = takewhile(lambda token: token >= 0, row[ends::-1][: length + 2])
            terms = zip(before, weights[length, by].tolist(), strict=False)
            hashed = sum(token * weight for token, weight in terms) % int(mods[length, by])
            out[at, number] = hashed + int(offsets[number])


def _longcat_ngram() -> None:
    """Has LongCat Flash Lite hash n-grams of tokens in Python."""
    from vllm import _custom_ops

    _longcat()
    _custom_ops.ngram_compute_n_gram_ids = n_gram_ids


def _k2_horizon() -> None:
    """Has K2 Horizon ask its experts of values one by one."""
    from vllm.model_executor.models import k2_horizon

    def compute_mova_v_sparse(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        logits, _ = self.v_router(hidden_states)
        weights, chosen = k2_horizon.calc_router_weights(
            router_logits=logits,
            e_score_correction_bias=self.v_router.bias,
            score_func=self.router_score_func,
            top_k=self.num_experts_per_tok,
            scaling_factor=self.router_scaling_factor,
        )
        values = torch.stack([silu(expert(hidden_states)[0]) for expert in self.v_experts], 1)
        picked = values.gather(1, chosen[:, :, None].expand(-1, -1, values.shape[-1]))
        return (picked * weights[:, :, None]).sum(1)

    k2_horizon.K2HorizonMoVAAttention.compute_mova_v_sparse = compute_mova_v_sparse


def _no_gpu() -> None:
    """Lets layers be built that want streams and events of a GPU, which they never run."""
    torch.cuda.Stream = torch.cuda.Event = MagicMock


class _NoCompilers(MetaPathFinder, Loader):
    """Finds compilers of kernels for GPUs that do nothing, where code only wants to import them."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        is_one = name.partition(".")[0] in ("cutlass", "cuda")
        return ModuleSpec(name, self, is_package=True) if is_one else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__spec__=spec, __path__=[])

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as it is."""


def _kimi_linear() -> None:
    """Gives Kimi Linear plain operators, without the compilers of its kernels."""
    from vllm.model_executor.models import registry

    sys.meta_path.append(_NoCompilers())
    registry._run_in_subprocess = lambda look: look()  # where the compilers are not found
    linear_operators.kimi_linear()


def _inkling() -> None:
    """Gives Inkling plain operators, without the compilers of its kernels."""
    from vllm.model_executor.models import registry

    sys.meta_path.append(_NoCompilers())
    registry._run_in_subprocess = lambda look: look()  # where the compilers are not found
    relative_operators.inkling()


def _qwen4() -> None:
    """Lets Qwen 4's layers be built without FlashAttention."""
    from vllm.models.qwen4_exp.nvidia import model

    qsa = sys.modules[model.Qwen4ExpQSAAttention.__module__]
    qsa.is_flash_attn_varlen_func_available = lambda: True


SINGLE: dict[str, Callable[[], None]] = {
    "BailingMoeV2_5ForCausalLM": linear_operators.bailing_v2_5,
    "BailingMoeV3ForCausalLM": linear_operators.bailing_v3,
    "InklingForCausalLM": _inkling,
    "InklingForConditionalGeneration": _inkling,
    "K2HorizonForCausalLM": _k2_horizon,
    "KimiLinearForCausalLM": _kimi_linear,
    "LongcatFlashForCausalLM": _longcat,
    "LongcatFlashNgramForCausalLM": _longcat_ngram,
    "OlmoHybridForCausalLM": linear_operators.olmo_hybrid,
    "Qwen4ExpForCausalLM": _qwen4,
}
