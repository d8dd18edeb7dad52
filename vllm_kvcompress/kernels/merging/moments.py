"""MomentKV's state and its correction of attention (arXiv 2606.01563), in plain torch.

The state of a KV head is one fp32 row: n_e, the mean key, the mean value, and
X = sum over evicted entries of (v - mean v)(k - mean k)^T, row after row. In pages it is packed:

    [ n_e ][ u ][ mean key ][ mean value ][ X / (u n_e) in 16 bits, two in the place of one ]

where u is the largest number of X / n_e, so that nothing overflows; a state of order 0 ends before
the last part, and X counts as zero.
H = KV heads, S = sequences (one KV head of one request each), G = query heads of each, D = head
size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kvcompress.kernels.common.kv_view import KVView
from vllm_kvcompress.kernels.common.paged_numbers import AddressedNumbers, PagedNumbers
from vllm_kvcompress.kernels.dispatch import by_device


def moment_size(head_size: int) -> int:
    """Number of fp32 numbers of a head's state."""
    return 1 + 2 * head_size + head_size * head_size


def packed_size(head_size: int, order: int = 1) -> int:
    """Number of fp32 numbers of a packed state, with cross moments (order 1) or without (0)."""
    return 2 + 2 * head_size + (order * head_size * head_size + 1) // 2


def pack_moments(state: Tensor, head_size: int, order: int = 1) -> Tensor:
    """Packs [..., moment_size] states as [..., packed_size], both fp32."""
    count, mean_key, mean_value, cross = split_moments(state, head_size)
    covariance = cross / count.clamp_min(1)[..., None, None]
    unit = covariance.abs().amax(dim=(-2, -1))
    parts = [count[..., None], unit[..., None], mean_key, mean_value]
    if order:
        halves = (covariance / unit.clamp_min(1e-30)[..., None, None]).half().flatten(-2)
        parts.append(functional.pad(halves, (0, head_size % 2)).view(torch.float32))
    return torch.cat(parts, dim=-1)


def unpack_moments(packed: Tensor, head_size: int) -> Tensor:
    """Unpacks [..., packed_size] states as [..., moment_size], both fp32."""
    count, unit, means, rest = packed.split(
        [1, 1, 2 * head_size, packed.shape[-1] - 2 - 2 * head_size], dim=-1
    )
    size = head_size * head_size
    if not rest.shape[-1]:
        return torch.cat((count, means, means.new_zeros((*means.shape[:-1], size))), dim=-1)
    cross = rest.contiguous().view(torch.float16)[..., :size].float()
    return torch.cat((count, means, cross * (unit * count)), dim=-1)


def split_moments(state: Tensor, head_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views [..., moment_size] as counts [...], mean keys and values [..., D], X [..., D, D]."""
    count, mean_key, mean_value, cross = state.split(
        [1, head_size, head_size, head_size * head_size], dim=-1
    )
    return count[..., 0], mean_key, mean_value, cross.unflatten(-1, (head_size, head_size))


def add_to_moments(view: KVView, state: Tensor, evicted: Tensor) -> Tensor:
    """The state after a set of entries was evicted, in one batch.

    X <- X_a + X_b + (n_a n_b / (n_a + n_b)) (mean v_b - mean v_a)(mean k_b - mean k_a)^T, then the
    means: the same as one entry after the other, without cancellation.

    Args:
        state: [H, moment_size] fp32.
        evicted: [H, n] bool; entries behind the lengths do not count.

    Returns:
        [H, moment_size] fp32.
    """
    evicted = evicted & view.valid
    keys, values = view.keys(), view.values()
    heads = view.head_slices()
    return torch.cat([_joined(state[h], keys[h], values[h], evicted[h]) for h in heads])


def _joined(state: Tensor, keys: Tensor, values: Tensor, evicted: Tensor) -> Tensor:
    """Joins the states of some heads with their evicted entries."""
    added = evicted.sum(dim=1, dtype=torch.float32)
    divisor = added.clamp_min(1)[:, None]
    hidden = ~evicted[..., None]
    keys = keys.float().masked_fill(hidden, 0)
    values = values.float().masked_fill(hidden, 0)
    new_key, new_value = keys.sum(dim=1) / divisor, values.sum(dim=1) / divisor
    centred_keys = (keys - new_key[:, None]).masked_fill(hidden, 0)
    centred_values = (values - new_value[:, None]).masked_fill(hidden, 0)
    new_cross = centred_values.transpose(1, 2) @ centred_keys
    count, mean_key, mean_value, cross = split_moments(state, keys.shape[2])
    total = count + added
    share = (added / total.clamp_min(1))[:, None]
    key_step, value_step = new_key - mean_key, new_value - mean_value
    between = (count[:, None] * share)[..., None] * value_step[..., None] * key_step[:, None]
    cross = cross + new_cross + between
    mean_key, mean_value = mean_key + share * key_step, mean_value + share * value_step
    return torch.cat((total[:, None], mean_key, mean_value, cross.flatten(1)), dim=1)


def moment_residuals(view: KVView, state: Tensor, scale: float) -> Tensor:
    """[H, n] norms of v - mean v - (scale / n_e) X k: the error of a value's prediction.

    Where nothing was evicted, the norms of the values; 0 behind the lengths.

    Args:
        state: [H, moment_size] fp32.
        scale: softmax scale.
    """
    keys, values, heads = view.keys(), view.values(), view.head_slices()
    residuals = torch.cat([_residuals(state[h], keys[h], values[h], scale) for h in heads])
    return residuals.masked_fill_(~view.valid, 0)


def _residuals(state: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Residual norms of some heads, before masking."""
    count, _, mean_value, cross = split_moments(state, keys.shape[2])
    predicted = keys.float() @ cross.transpose(1, 2)
    predicted = predicted * (scale / count.clamp_min(1))[:, None, None] + mean_value[:, None]
    return torch.linalg.vector_norm(values.float() - predicted, dim=2)


@by_device("merging.moments_triton")
def correct_with_moments(
    state: PagedNumbers | AddressedNumbers,
    outputs: Tensor,
    lse: Tensor,
    queries: Tensor,
    scale: float,
) -> None:
    """Corrects attention outputs for evicted entries, in place: `corrected` from paged states.

    Args:
        state: packed_size numbers, of either order, of each of S sequences; none where nothing was
            evicted.
        outputs, lse, queries, scale: those of `corrected`.
    """
    head_size = queries.shape[3]
    numbers = state.paged() if isinstance(state, AddressedNumbers) else state
    rows = unpack_moments(numbers.gathered(packed_size(head_size)), head_size)
    outputs.copy_(corrected(outputs, lse, queries, rows, scale))


def corrected(outputs: Tensor, lse: Tensor, queries: Tensor, state: Tensor, scale: float) -> Tensor:
    """Adds the estimated contribution of evicted entries to attention outputs.

    w = sigmoid(lse - ln n_e - scale q.mean k), f = mean v + (scale / n_e) X q, and the output is
    w * output + (1 - w) * f; unchanged where nothing was evicted.

    Args:
        outputs: [S, G, m, D] attention over the resident entries.
        lse: [S, G, m] natural log-sum-exp of their logits.
        queries: [S, G, m, D].
        state: [S, moment_size] fp32.
        scale: softmax scale.

    Returns:
        [S, G, m, D] in the outputs' type.
    """
    count, mean_key, mean_value, cross = split_moments(state, queries.shape[3])
    queries = queries.float()
    logit = scale * (queries @ mean_key[:, None, :, None])[..., 0]
    weight = torch.sigmoid(lse - count.log()[:, None, None] - logit)
    weight = weight.masked_fill((count == 0)[:, None, None], 1)[..., None]
    step = scale / count.clamp_min(1)
    estimate = (queries @ cross[:, None].transpose(2, 3)) * step[:, None, None, None]
    estimate = estimate + mean_value[:, None, None]
    return (weight * outputs + (1 - weight) * estimate).to(outputs.dtype)
