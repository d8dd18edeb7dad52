"""A model that goes on from a compressed context, without an engine: evicted tokens are masked.

One reading of a context serves any number of settings, so many can be compared on few cores. What
differs from serving: nothing is freed, and a context is compressed once, at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offline.dense import DenseLayer, DenseModel, Kept
from offline.read_pages import read_mask, recall
from vllm_kvcompress.scheduling.read_rule import ReadRule


@dataclass
class Reading:
    """How much of what is held of a context tokens read.

    Attributes:
        rule: of those that are decoded.
        num_whole: of the first ones, which belong to the prompt and read everything.
        num_best: tokens with the highest products, of which it is counted how many are read.
        recalls: for every layer, that part and the part of the attention weights on what is read,
            in the mean over query heads and tokens.
    """

    rule: ReadRule
    num_whole: int = 0
    num_best: int = 64
    recalls: list[tuple[float, float]] = field(default_factory=list)

    def mask(self, queries: Tensor, keys: Tensor, held: Tensor, scale: float) -> Tensor:
        """Mask of the tokens that each query reads, as `read_mask` returns it."""
        mask = read_mask(queries, keys, self.rule, held)
        read = recall(queries, keys, mask, self.num_best, scale)[:, :, self.num_whole :]
        self.recalls.append((float(read[0].mean()), float(read[1].mean())))
        mask[:, : self.num_whole] = True
        return mask


class MaskedModel(DenseModel):
    """Reads contexts as `DenseModel` does, and predicts from what is kept of them."""

    def __init__(self, folder: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(folder, dtype)
        self._context: list[tuple[Tensor, Tensor, Tensor]] = []
        self._reading: Reading | None = None

    def logits(
        self,
        context: list[DenseLayer],
        kept: list[Kept] | None,
        tokens: Tensor,
        reading: Reading | None = None,
    ) -> Tensor:
        """[m, vocabulary] fp32, of tokens that follow a context.

        Args:
            context: every layer of it.
            kept: what every layer keeps; None: everything.
            tokens: [m] that are read.
            reading: how much of what is kept each of them reads; None: all of it.
        """
        dtype, self._reading = self.model.dtype, reading
        self._context = [
            _compressed(layer, None if kept is None else kept[layer.index], dtype)
            for layer in context
        ]
        return self._go_on(context[0].keys.shape[1], tokens, len(tokens))

    def _go_on(self, begin: int, tokens: Tensor, num_logits: int) -> Tensor:
        """[num_logits, vocabulary] fp32 of the last of some tokens, behind `_context`.

        Args:
            begin: position of the first one.
            tokens: [m] that are read; their queries, keys and values are in `_seen` afterwards.
            num_logits: at least 1.
        """
        self._seen = []
        positions = torch.arange(begin, begin + len(tokens), device=tokens.device)[None]
        try:
            with torch.no_grad():
                output = self.model(
                    tokens[None],
                    position_ids=positions,
                    use_cache=False,
                    logits_to_keep=num_logits,
                )
        finally:
            self._context, self._reading = [], None
        logits: Tensor = output.logits[0].float()
        return logits

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        if not self._context:
            return super()._attend(module, query, key, value, mask, **options)
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        self._seen.append((module, query, key, value, scale))
        keys, values, bias = self._context[module.layer_idx]
        group, count = query.shape[1] // key.shape[1], query.shape[2]
        own = torch.full((count, count), float("-inf"), dtype=query.dtype, device=query.device)
        before = bias[:, None].expand(-1, count, -1)
        full_mask = torch.cat([before, own.triu(1).expand(len(bias), -1, -1)], dim=2)
        if self._reading is not None:
            every_key = torch.cat([keys, key[0]], dim=1).float()
            held = torch.nn.functional.pad(bias > float("-inf"), (0, count), value=True)
            read = self._reading.mask(query[0].float(), every_key, held, scale)
            full_mask = full_mask.masked_fill(~read, float("-inf"))
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            torch.cat([keys[None], key], dim=2).repeat_interleave(group, dim=1),
            torch.cat([values[None], value], dim=2).repeat_interleave(group, dim=1),
            attn_mask=full_mask.repeat_interleave(group, dim=0)[None],
            scale=scale,
        )
        return output.transpose(1, 2).contiguous(), None


def _compressed(
    layer: DenseLayer, kept: Kept | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [H, n, D], and [H, n] what is added to their logits."""
    bias = torch.zeros(layer.keys.shape[:2], device=layer.keys.device)
    keys, values = layer.keys, layer.values
    if kept is not None:
        merged = kept.merged
        if kept.corrects:
            raise NotImplementedError("corrections of attention need an engine")
        keys, values = _replaced(keys, merged.keys), _replaced(values, merged.values)
        bias = _replaced(bias, merged.bias).masked_fill(~kept.mask, float("-inf"))
    return keys.to(dtype), values.to(dtype), bias.to(dtype)


def _replaced(values: Tensor, some: Tensor | None) -> Tensor:
    """With the entries of full blocks as a merger left them."""
    return values if some is None else torch.cat([some, values[:, some.shape[1] :]], dim=1)
