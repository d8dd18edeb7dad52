"""How many pages heads get and which entries stay: Triton on a GPU, plain torch elsewhere."""

from __future__ import annotations

from vllm_kvcompress.kernels import selection_torch
from vllm_kvcompress.kernels.dispatch import by_device

apportion = by_device(selection_torch.apportion, "apportion_triton")
top_entries = by_device(selection_torch.top_entries, "top_entries_triton")
