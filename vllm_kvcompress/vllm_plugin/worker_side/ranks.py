"""What the ranks of one engine tell each other: failed events, layers, and measurements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, Work
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

_TAG = 7_201  # of messages between pipeline stages; vLLM's have none


def layers_around(num_layers: int) -> tuple[int, int]:
    """Returns how many layers earlier and later pipeline stages have; every rank must call it."""
    counts, stage = of_all_stages(num_layers), get_pp_group().rank_in_group
    return sum(counts[:stage]), sum(counts[stage + 1 :])


def of_all_stages(part: Any) -> list[Any]:
    """Returns the objects of all pipeline stages, in their order; every rank must call it."""
    group = get_pp_group()
    if group.world_size == 1:
        return [part]
    parts: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(parts, part, group.cpu_group)
    return parts


def of_all_ranks(part: Tensor) -> Tensor:
    """Returns a measurement of the whole model, on CPU; every rank must call it.

    Args:
        part: [layers, heads, ...] of this rank's pipeline stage and tensor-parallel rank.
    """
    group, parts = get_tp_group(), [part.cpu().contiguous()]
    if group.world_size > 1:
        own, parts = parts[0], [torch.empty_like(parts[0]) for _ in range(group.world_size)]
        torch.distributed.all_gather(parts, own, group.cpu_group)
    return torch.cat(of_all_stages(torch.cat(parts, dim=1)))


class FailedEvents:
    """Tells every rank which events of a step failed on any rank of its stage or of earlier ones.

    The last pipeline stage answers vLLM, so it has to know all. A stage sends what it knows on to
    the next one. It does not wait until that one has received it, since stages would no longer
    overlap, but only until its message before has been received.
    """

    def __init__(self) -> None:
        self._sent: Work | None = None

    def on_any_rank(self, flags: list[bool]) -> list[bool]:
        """Returns, for each flag, whether it is set on any rank of this stage or an earlier one.

        All ranks must call this in every step, with equally many flags. It does not wait for a
        device.
        """
        tensor_group, stages = get_tp_group(), get_pp_group()
        if not flags or tensor_group.world_size == stages.world_size == 1:
            return flags
        joined = torch.tensor(flags, dtype=torch.int32, device="cpu")
        if tensor_group.world_size > 1:
            torch.distributed.all_reduce(joined, ReduceOp.MAX, tensor_group.cpu_group)
        if not stages.is_first_rank:
            earlier = torch.empty_like(joined)
            torch.distributed.recv(earlier, stages.prev_rank, stages.cpu_group, _TAG)
            joined |= earlier
        if not stages.is_last_rank:
            if self._sent is not None:
                self._sent.wait()
            sent = torch.distributed.isend(joined, stages.next_rank, stages.cpu_group, _TAG)
            self._sent = sent
        return [bool(flag) for flag in joined.tolist()]
