"""Inkling on the path for GPUs: plain operators, and stock vLLM with tokens hidden from heads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHECKS = Path(__file__).parents[2] / "scripts" / "checks"
HIDDEN = "HIDDEN_TOKENS"  # variable that names a file, see `hide_tokens`
ENGINE: dict[str, Any] = {"dtype": "bfloat16", "kernels": "flash3"}


def replace_kernels(report: dict[str, Any]) -> None:
    """Gives the engine's process plain operators, since vLLM's are for NVIDIA's GPUs alone."""
    sys.path.append(str(CHECKS))
    from model_parts import operators

    operators.SINGLE["InklingForCausalLM"]()


def hide_tokens(report: dict[str, Any]) -> None:
    """Does the same, and has heads no longer see some tokens, which stay where they are.

    The file that HIDDEN_TOKENS names has, by layer, a list of [end, heads]: from the token `end` on
    a KV head does not see the tokens that the list `heads` has for it.
    """
    replace_kernels(report)
    from vllm.models.inkling.nvidia import attention

    from model_parts.relative_operators import AttendByDistance

    hidden_by_layer: Mapping[str, Any] = json.loads(Path(os.environ[HIDDEN]).read_text())
    layers: list[str] = []  # that attend now
    own = attention.InklingAttention._attention

    def attend(self: Any, *args: Any) -> None:
        layers[:] = [self.prefix]
        own(self, *args)

    class Hiding(AttendByDistance):
        """Hides tokens from query heads."""

        def hidden(self, hidden: Tensor, places: Tensor, group: int) -> Tensor:
            """Returns [heads, tokens, entries], true where a token does not see an entry."""
            (name,) = layers
            for end, heads in hidden_by_layer.get(name, ()):
                by_head = torch.zeros(len(heads), 1, hidden.shape[-1], dtype=torch.bool)
                for row, tokens in zip(by_head, heads, strict=True):
                    row[:, [token for token in tokens if token < hidden.shape[-1]]] = True
                later = (places >= end)[:, None]
                hidden = hidden | (by_head.repeat_interleave(group, dim=0) & later)
            return hidden

    attention.InklingAttention._attention = attend
    attention._INKLING_FA4_REL_ATTENTION_KERNEL = Hiding()
