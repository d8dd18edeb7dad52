"""Probes that break the engine on purpose, called before it starts."""

from __future__ import annotations

from typing import Any


def free_sources_early(report: dict[str, Any]) -> None:
    """Frees an event's source blocks before it has run, so that they are poisoned."""
    from vllm_kvcompress.vllm_plugin.scheduler_side.block_manager import CompressedBlockManager

    begin_event = CompressedBlockManager.begin_event

    def hasty(self: Any, request_id: str, position: int, decision: Any) -> Any:
        event = begin_event(self, request_id, position, decision)
        sources = self.req_to_blocks[request_id][event.first_block : event.end_block]
        self.block_pool.free_blocks(reversed(sources))
        return event

    CompressedBlockManager.begin_event = hasty


def free_sources_unseen(report: dict[str, Any]) -> None:
    """Frees source blocks early and disables owner checks, so that only poison can show it."""
    from vllm_kvcompress.vllm_plugin.scheduler_side.integrity import SchedulerChecks
    from vllm_kvcompress.vllm_plugin.worker_side.access_checks import WorkerChecks

    free_sources_early(report)
    SchedulerChecks.after_step = lambda *args: None
    WorkerChecks.check = lambda *args: None


def write_to_fresh_blocks(report: dict[str, Any]) -> None:
    """Lets every event write to fresh blocks, none in place; this breaks nothing."""
    from vllm_kvcompress.vllm_plugin.scheduler_side.block_manager import CompressedBlockManager

    CompressedBlockManager._stays_in_place = lambda *args: False
