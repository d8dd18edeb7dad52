"""AsymKV with the gradients of its paper (arXiv 2506.05410), which no serving engine computes.

A loss has gradients by every cached key: that of the next tokens within the context's last chunk,
whose queries attend to all keys before it. Squared, element by element, they weight the keys of
each pair, before rotation; merged entries add up their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offline.dense import DenseLayer, Kept, compress
from offline.masked import MaskedModel
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.merging.asymkv import AsymKV

_EXACT = "donot_use_mm_for_euclid_dist"


class GradientModel(MaskedModel):
    """A model whose loss can be derived by cached keys and attention outputs."""

    def __init__(self, folder: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(folder, dtype)
        self._outputs: list[Tensor] = []

    def gradients(
        self, context: list[DenseLayer], tokens: list[int], chunk: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Derives the summed loss of the last `chunk` tokens.

        The cache before the chunk is what it is, as in the paper: its keys are variables, and not
        functions of each other.

        Args:
            context: every layer of the tokens.
            tokens: n of them.
            chunk: at least 2.

        Returns:
            [H, n, D] fp32 for each layer, by every cached key; and [m, H * G, D] fp32, by the
            attention output of every query of the chunk.
        """
        self.model.requires_grad_(False)
        begin, dtype = len(tokens) - chunk, self.model.dtype
        keys = [each.keys[:, :begin].to(dtype).requires_grad_() for each in context]
        bias = keys[0].new_zeros(keys[0].shape[:2])
        self._seen, self._outputs = [], []
        self._context = [
            (key, each.values[:, :begin].to(dtype), bias)
            for key, each in zip(keys, context, strict=True)
        ]
        positions = torch.arange(begin, len(tokens), device=bias.device)[None]
        some = torch.tensor([tokens[begin:]], device=bias.device)
        try:
            with torch.enable_grad():
                logits = self.model(some, position_ids=positions, use_cache=False).logits[0]
                loss = torch.nn.functional.cross_entropy(
                    logits[:-1].float(), some[0, 1:], reduction="sum"
                )
                own = [key for _, _, key, _, _ in self._seen]
                gradients = torch.autograd.grad(loss, [*keys, *own, *self._outputs])
        finally:
            self._context = []
        count = len(keys)
        pairs = zip(gradients[:count], gradients[count : 2 * count], strict=True)
        by_keys = [torch.cat([one, other[0]], dim=1).float() for one, other in pairs]
        return by_keys, [rows[0].float() for rows in gradients[2 * count :]]

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        if torch.is_grad_enabled() and not key.requires_grad:
            key.requires_grad_()
        output, weights = super()._attend(module, query, key, value, mask, **options)
        self._outputs.append(output)
        return output, weights


def pair_cosines(layer: DenseLayer, slopes: Tensor, stride: int = 8) -> tuple[Tensor, Tensor]:
    """Cosines of the loss's gradient E with Eq. 33's terms: c_11 of entries, and c_12 of pairs.

    With r = v - o, c_11 points to r_1 and c_12 away from r_1 + r_2, where alpha is below a half.

    Args:
        layer: all tokens, of which the last m are the chunk's.
        slopes: [m, H * G, D] E by query; every stride-th is looked at.
        stride: of queries.

    Returns:
        [H * G, queries, n - m] and one pair less, for neighbours before the chunk.
    """
    begin, group = layer.keys.shape[1] - len(slopes), slopes.shape[1] // len(layer.keys)
    at = torch.arange(0, len(slopes), stride)
    keys, values = (rows.repeat_interleave(group, 0) for rows in (layer.keys, layer.values))
    queries = layer.queries[begin + at].transpose(0, 1) * layer.scale
    later = torch.arange(keys.shape[1]) > (begin + at)[:, None]
    outputs = (queries @ keys.mT).masked_fill(later, -torch.inf).softmax(dim=2) @ values
    slopes, past = slopes[at].transpose(0, 1), values[:, :begin]
    dots = slopes @ past.mT - (slopes * outputs).sum(dim=2, keepdim=True)
    size = slopes.norm(dim=2, keepdim=True).clamp_min(1e-30)
    middle = (past[:, 1:] + past[:, :-1]) / 2
    far = [torch.cdist(outputs, x, compute_mode=_EXACT) for x in (past, middle)]
    sums = dots, -(dots[..., 1:] + dots[..., :-1]) / 2
    own, both = (
        torch.where(r > 1e-6, x / (size * r).clamp_min(1e-30), 0).clamp(-1, 1)
        for x, r in zip(sums, far, strict=True)
    )
    return own, both


def compress_by_gradients(
    pipeline: Pipeline, layer: DenseLayer, num_tokens: int, budget: float, gradients: Tensor
) -> Kept:
    """What `compress` keeps with `asymkv`, with keys weighted by [H, n, D] gradients."""
    policy = pipeline.scorer
    assert isinstance(policy, AsymKV)
    kept = compress(pipeline, layer, num_tokens, budget)
    view = layer.view(num_tokens, pipeline.needs.window_size)
    num_kept = kept.mask[:, : view.num_entries].sum(dim=1)
    joined = policy.choose(view, policy.score(view), num_kept)
    assert layer.rotary is not None
    keys, positions = view.kv.keys().float(), kept.merged.positions
    assert positions is not None
    merged = merge_pairs(keys, gradients[:, : view.num_entries], joined, layer.rotary)
    turned = layer.rotary.rerotate(merged, positions)
    return replace(kept, merged=replace(kept.merged, keys=turned))


def merge_pairs(keys: Tensor, gradients: Tensor, joined: Tensor, rotary: Rotary) -> Tensor:
    """[H, n, D] fp32 merged keys before rotation, at the places of their groups' first entries.

    Args:
        keys, gradients: [H, n, D] fp32, rotated to 0, 1, 2 and so on.
        joined: [H, n] the round in which an entry joins the one before; 0: in none.
        rotary: how keys are rotated.
    """
    back = -torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1)
    keys, gradients = rotary.rerotate(keys, back), rotary.rerotate(gradients, back)
    tokens = torch.ones(keys.shape[:2], device=keys.device)
    for number in range(1, int(joined.max()) + 1):
        for head, row in enumerate(joined):
            remaining = ((row == 0) | (row >= number)).nonzero()[:, 0]
            at = (row[remaining] == number).nonzero()[:, 0]
            pair = torch.stack((remaining[at - 1], remaining[at]))
            slopes, counts = gradients[head, pair], tokens[head, pair]
            weights = slopes**2
            unknown = weights.sum(dim=0) <= 0
            weights = torch.where(unknown, counts[..., None].expand_as(weights), weights)
            keys[head, pair[0]] = (weights * keys[head, pair]).sum(dim=0) / weights.sum(dim=0)
            gradients[head, pair[0]], tokens[head, pair[0]] = slopes.sum(dim=0), counts.sum(dim=0)
    return keys


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Yields a list that gets the bytes of tensors which autograd keeps for the way back."""
    sizes: dict[int, int] = {}
    total: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield total
    total.append(sum(sizes.values()))
