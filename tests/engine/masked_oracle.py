"""The oracle of decoding in models of any layers: Hugging Face's, with evicted tokens masked.

Shares no code with the package: the prompt is computed densely, and every later token attends, in
each KV head of a full-attention layer, to the kept prompt tokens and to all behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


class MaskedDecoder:
    """A model that no longer sees some tokens of its prompt after reading it.

    Args:
        model: directory of the model.
        prompt: token ids.
        kept: kept[layer][head] = positions, among the first `num_full` tokens, that stay; layers
            are those with full attention.
        num_full: tokens of the prompt of which some are evicted.
        inputs: what else the model reads with the prompt, such as images.
    """

    def __init__(
        self,
        model: str,
        prompt: list[int],
        kept: list[list[list[int]]],
        num_full: int,
        **inputs: Tensor,
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
        self.num_tokens, self.kept, self.num_full = len(prompt), kept, num_full
        self.num_query_heads = self.model.config.get_text_config().num_attention_heads
        text = getattr(self.model.model, "language_model", self.model.model)
        layers = [each.self_attn for each in text.layers if hasattr(each, "self_attn")]
        layers = [each for each in layers if not getattr(each, "is_sliding", False)]
        assert len(layers) == len(kept)
        with torch.no_grad():
            output = self.model(torch.tensor([prompt]), use_cache=True, **inputs)
        self.first_logits, self.cache = output.logits[0, -1], output.past_key_values
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._masking(number), with_kwargs=True)

    def _masking(self, number: int) -> Any:
        """Returns a hook that gives a layer a mask with a row for each query head."""

        def masked(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            heads = self.kept[number]
            group = self.num_query_heads // len(heads)
            mask = torch.zeros(1, len(heads) * group, 1, self.num_tokens + 1)
            for query_head in range(len(heads) * group):
                for position in set(range(self.num_full)) - set(heads[query_head // group]):
                    mask[0, query_head, 0, position] = -1e30
            return args, {**kwargs, "attention_mask": mask}

        return masked

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Appends a token and returns the logits after it, [vocabulary]."""
        output = self.model(
            torch.tensor([[token]]),
            past_key_values=self.cache,
            use_cache=True,
            position_ids=torch.tensor([[self.num_tokens]]),
        )
        self.num_tokens += 1
        return output.logits[0, -1]
