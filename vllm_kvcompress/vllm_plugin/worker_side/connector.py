"""What a worker tells a KV connector of requests that end for it at their first event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.core.sched.output import SchedulerOutput


def flush_connector(output: SchedulerOutput) -> None:
    """Ends copies from blocks that the step writes, before events and copies of ours write them.

    vLLM does the same before its forward pass; what has ended by then it does not wait for.
    """
    if has_kv_transfer_group() and output.kv_connector_metadata is not None:
        get_kv_transfer_group().handle_preemptions(output.kv_connector_metadata)


class EarlyEnds:
    """Names requests as finished to a connector when their first event runs, and not again later.

    A connector that keeps blocks says when a request's blocks are stored only once it has heard
    that the request has finished. Here that is long before vLLM says so.

    Args:
        connector: the worker's; its `get_transfer_results` is replaced.
    """

    def __init__(self, connector: Any) -> None:
        self._results = connector.get_transfer_results
        self._ending: set[str] = set()
        self._named: set[str] = set()  # that vLLM will name again
        connector.get_transfer_results = self.results

    def end(self, request_ids: Iterable[str]) -> None:
        """Has the connector hear with this step's results that requests have ended."""
        self._ending |= set(request_ids) - self._named

    def results(self, finished: set[str]) -> Any:
        """Returns what has been copied, having named what has finished."""
        named = (finished - self._named) | self._ending
        self._named = (self._named | self._ending) - finished
        self._ending = set()
        return self._results(named)
