"""What tensor-parallel ranks have to agree on among themselves."""

from __future__ import annotations

import torch
from vllm.distributed.parallel_state import get_tp_group


def on_any_rank(flags: list[bool]) -> list[bool]:
    """Whether each is true on any tensor-parallel rank; all of them have to ask, of as many.

    The hosts agree among themselves: no device is waited for.
    """
    group = get_tp_group()
    if group.world_size == 1 or not flags:
        return flags
    told = torch.tensor(flags, dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return [bool(flag) for flag in told.tolist()]
