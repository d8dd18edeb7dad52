"""Policies over whole caches, without an engine: keys, values and queries as a model has them.

For measuring what policies do to attention, layer by layer: every layer sees the hidden states of
the full cache, and is judged by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offline.gathered_kv import GatheredKV
from vllm_kvcompress.compression.layer import compress_layer
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.kernels.common.rotary import Rotary
from vllm_kvcompress.kernels.value_norms import output_roots
from vllm_kvcompress.policies import Pipeline
from vllm_kvcompress.policies.base import EntryState, LayerView, Merged

BLOCK_SIZE = 32
_CAPTURED = "kvcompress_captured"


@dataclass(frozen=True)
class DenseLayer:
    """One layer's attention over a text.

    Attributes:
        index, num_layers: which layer of how many.
        keys, values: [H, n, D] fp32, keys rotated.
        queries: [n, H * G, D] fp32, rotated, not scaled.
        output_weight: [H * G, D, M] o_proj by query head.
        scale: of the logits.
        rotary: how keys are rotated; None: in a way that depends on the length.
    """

    index: int
    num_layers: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    output_weight: Tensor
    scale: float
    rotary: Rotary | None

    def first(self, num_tokens: int) -> DenseLayer:
        """The layer after the first tokens alone, which know nothing of later ones."""
        return replace(
            self,
            keys=self.keys[:, :num_tokens],
            values=self.values[:, :num_tokens],
            queries=self.queries[:num_tokens],
        )

    def view(self, num_tokens: int, window_size: int) -> LayerView:
        """What a policy sees when the first tokens have been read."""
        num_full = num_tokens - num_tokens % BLOCK_SIZE
        keys, values = self.keys[:, :num_full], self.values[:, :num_full]
        tail = self.keys[:, num_full:num_tokens], self.values[:, num_full:num_tokens]
        weight = self.output_weight
        positions = torch.arange(num_full, device=keys.device).expand(len(keys), -1)
        return LayerView(
            kv=GatheredKV.of(keys, values, tail=tail),
            queries=self.queries[max(0, num_tokens - window_size) : num_tokens],
            scale=self.scale,
            layers=range(self.index, self.index + 1),
            block_size=BLOCK_SIZE,
            ends=(num_tokens,),
            output_weight=weight.unflatten(0, (len(keys), -1)).transpose(1, 2).contiguous(),
            output_root=output_roots(weight),
            rotary=self.rotary,
            entries=EntryState(positions=positions),
        )


@dataclass(frozen=True)
class Kept:
    """What a policy makes of a layer.

    Attributes:
        mask: [H, n] bool: kept entries of the compressed tokens, the partial last block's too.
        merged: what became of keys, values and the rest of the full blocks.
        corrects: attention's outputs are owed what `merged` remembers of evicted entries.
    """

    mask: Tensor
    merged: Merged
    corrects: bool = False


def compress(
    pipeline: Pipeline,
    layer: DenseLayer,
    num_tokens: int,
    budget: float,
    max_queries: int | None = None,
) -> Kept:
    """Compresses the first tokens to a part of their blocks, rounded up.

    A layer gets what the policy gives it of all layers' pages, as in an engine.

    Args:
        pipeline: the policy.
        layer: the layer.
        num_tokens: how many; what is more than whole blocks stays.
        budget: from 0 to 1.
        max_queries: last queries that are there to observe, as behind a prefix-cache hit; None: as
            many as the policy observes.
    """
    num_heads = len(layer.keys)
    heads = (layer.num_layers, num_heads, layer.queries.shape[1], BLOCK_SIZE)
    window_size = pipeline.needs.window_size
    if max_queries is not None:
        window_size = min(window_size, max_queries)
    view = layer.view(num_tokens, window_size)
    bound, num_blocks = pipeline.bind(*heads), num_tokens // BLOCK_SIZE
    num_kept = math.ceil(round(budget * num_blocks, 6))
    held_pages = [num_blocks * num_heads] * layer.num_layers
    layer_pages = bound.allocator.layer_pages(num_kept, held_pages, num_heads, num_blocks)
    selection = compress_layer(bound, view, layer_pages[layer.index])
    mask = torch.zeros(num_heads, num_tokens, dtype=torch.bool, device=view.device)
    mask[:, view.num_entries :] = True
    mask[selection.heads(BLOCK_SIZE), selection.kept_indices] = True
    return Kept(mask, selection.merged, pipeline.corrects)


class DenseModel:
    """A Hugging Face model whose attention can be looked at.

    Args:
        folder: name or directory.
        dtype: that it computes in.

    Raises:
        ConfigError: it cannot be loaded.
    """

    def __init__(self, folder: str, dtype: torch.dtype = torch.bfloat16) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        if folder.startswith((".", "/")) and not Path(folder).is_dir():
            raise ConfigError(f"{folder}: expected a model's directory, found none there.")
        AttentionInterface.register(_CAPTURED, self._attend)
        self._seen: list[tuple[Any, Tensor, Tensor, Tensor, float]] = []
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=_CAPTURED
        )
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def layers(self, tokens: list[int]) -> list[DenseLayer]:
        """Every layer's attention over a text."""
        return self.read(tokens, 1)[0]

    def read(self, tokens: list[int], num_logits: int) -> tuple[list[DenseLayer], Tensor]:
        """Every layer's attention over a text, and [num_logits, vocabulary] of its last tokens."""
        self._seen = []
        inputs = torch.tensor([tokens], device=self.model.device)
        with torch.no_grad():
            output = self.model(inputs, use_cache=False, logits_to_keep=num_logits)
        rotary = self._rotary()
        layers = [
            DenseLayer(
                index=index,
                num_layers=len(self._seen),
                keys=keys[0].float(),
                values=values[0].float(),
                queries=queries[0].transpose(0, 1).float(),
                output_weight=_by_head(module.o_proj.weight, queries.shape[1]),
                scale=scale,
                rotary=rotary,
            )
            for index, (module, queries, keys, values, scale) in enumerate(self._seen)
        ]
        return layers, output.logits[0]

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        scale = options.get("scaling") or query.shape[-1] ** -0.5
        self._seen.append((module, query, key, value, scale))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def _rotary(self) -> Rotary | None:
        embedding = self.model.model.rotary_emb
        if getattr(embedding, "rope_type", "default") not in ("default", "linear", "llama3"):
            return None
        return Rotary(embedding.inv_freq.float())


def _by_head(weight: Tensor, num_query_heads: int) -> Tensor:
    """[M, H * G * D] -> [H * G, D, M] fp32."""
    return weight.detach().float().t().unflatten(0, (num_query_heads, -1)).contiguous()
