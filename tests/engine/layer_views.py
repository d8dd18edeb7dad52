"""Counts the torch operators that this package runs in every layer of a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class _Asked(TorchDispatchMode):
    """Counts operators by name, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(report: dict[str, Any]) -> None:
    """Reports for each kind of step the operators of its layers and of its preparation.

    Without what vLLM's own methods run, and without steps that have events (a probe).
    """
    from vllm.v1.attention.backends import cpu_attn

    from vllm_kvcompress.vllm_plugin.worker_side.attention import base

    report["layers"], report["steps"] = [], []
    forward, theirs = base.CompressedImpl.forward, cpu_attn.CPUAttentionBackendImpl.forward
    build = base.CompressedBuilder.build

    def kind_of(metadata: Any) -> str | None:
        ours = getattr(metadata, "kvcompress", None)
        if ours is None or ours.work.events or not ours.work.compressed:
            return None
        queries = "" if metadata.max_query_len == 1 else "chunk"
        return queries + ("mixed" if ours.uncompressed else "alone")

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = kind_of(args[5])
        with _Asked() as asked:
            output = forward(self, *args, **kwargs)
        if kind is not None:
            report["layers"].append([kind, asked.counts])
        return output

    def uncounted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return theirs(self, *args, **kwargs)

    def preparing(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Asked() as asked:
            metadata = build(self, *args, **kwargs)
        kind = kind_of(metadata)
        if kind is not None:
            report["steps"].append([kind, asked.counts])
        return metadata

    base.CompressedImpl.forward, base.CompressedBuilder.build = counting, preparing
    cpu_attn.CPUAttentionBackendImpl.forward = uncounted
