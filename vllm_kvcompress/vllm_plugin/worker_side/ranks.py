"""Agreement among tensor-parallel ranks."""

from __future__ import annotations

import torch
from vllm.distributed.parallel_state import get_tp_group


def on_any_rank(flags: list[bool]) -> list[bool]:
    """Returns, for each flag, whether it is set on any tensor-parallel rank.

    All ranks must call this, with equally many flags. It does not wait for a device.
    """
    group = get_tp_group()
    if group.world_size == 1 or not flags:
        return flags
    joined = torch.tensor(flags, dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(joined, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return [bool(flag) for flag in joined.tolist()]
