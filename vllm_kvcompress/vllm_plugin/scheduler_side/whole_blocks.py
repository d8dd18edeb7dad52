"""KV connectors: to one, every request ends where it is first compressed.

    step         S computes the event's position      S + 1                    its end
    a request    [ prompt, computed with everything ] [ depends on the event ] finished
    connector    stores its full blocks               finished                 -

Blocks that hold tokens computed with everything mean the same to all requests, so a connector
stores and loads them as in stock vLLM. What comes later depends on what was kept: a connector never
hears of it. An event frees its sources before the request ends; a connector that is still reading
them learns of that as vLLM's interface has it, since to the connector the request has finished: it
ends its copies before the step, or has the blocks kept for it until they have ended.

Where one engine reads prompts and another generates (disaggregated prefill), the first compresses
nothing that it sends. The second takes a prompt whole, and computes the last tokens again whose
queries its event needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.v1.request import RequestStatus

from vllm_kvcompress.vllm_plugin.compat.scheduler import without_requests
from vllm_kvcompress.vllm_plugin.scheduler_side.request_table import RequestTable
from vllm_kvcompress.vllm_plugin.startup.connector_refusals import (
    reads_prompts_whole,
    takes_prompts_whole,
)

if TYPE_CHECKING:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_kvcompress.vllm_plugin.scheduler_side.kept_states import KeptStates

# What else vLLM asks a connector about a request; not all of it in every version.
_OF_REQUESTS = (
    "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids",
    "register_finished_partial_tail",
)


class SharedPart:
    """A request as a connector sees it.

    Attributes:
        end: tokens that had been computed when the request ended for the connector; None: it goes
            on.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.end: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def is_finished(self) -> bool:
        """Whether it has ended for the connector."""
        return self.end is not None or self._request.is_finished()

    @property
    def status(self) -> RequestStatus:
        """An end at an event is an abort: nobody goes on with what the request has computed."""
        return self._request.status if self.end is None else RequestStatus.FINISHED_ABORTED

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed with everything."""
        return self._request.num_computed_tokens if self.end is None else self.end

    @property
    def num_output_placeholders(self) -> int:
        """Tokens that are sampled in steps under way; none of them belongs to the shared part."""
        return self._request.num_output_placeholders if self.end is None else 0


class WholeBlocks:
    """vLLM's connector in the scheduler, to which every request ends at its first event.

    Everything that is not here is the connector's own.
    """

    def __init__(
        self,
        connector: Any,
        table: RequestTable,
        kept: KeptStates,
        manager: KVCacheManager,
        transfer: KVTransferConfig,
    ) -> None:
        self._connector, self._table, self._kept, self._manager = connector, table, kept, manager
        self._parts: dict[str, SharedPart] = {}
        self._ending: set[str] = set()  # to be named as finished in the next metadata
        self._reads_whole = reads_prompts_whole(transfer)
        self._takes_whole = takes_prompts_whole(transfer)
        # Of requests that ended for it at an event: blocks in use until they are stored.
        self._unstored: dict[str, list[KVCacheBlock]] = {}
        # Requests that have ended, and whose blocks vLLM frees once they are stored or sent.
        self._delayed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._connector, name)
        if name not in _OF_REQUESTS:
            return value
        return lambda request, *args: value(self._parts[request.request_id], *args)

    def on_new_request(self, request: Request) -> None:
        """Announces a request, unless it scores an answer for `--kv-shadow`."""
        part = self._parts[request.request_id] = SharedPart(request)
        if request.request_id in self._table.shadows:
            part.end = 0
        else:
            self._connector.on_new_request(part)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns how many tokens to load, cut as a prefix-cache hit is; whole blocks only.

        What NIXL and LMCache offer is taken whole (`CompressionMixin.end_load` goes back), unless
        an event comes within the prompt. None are loaded by a request that begins with a kept
        state, which already stands for more tokens, and by one that was compressed before it was
        preempted.
        """
        request_id = request.request_id
        part, record = self._parts[request_id], self._table[request_id]
        if part.end is not None or record.reuse.beginning is not None:
            return 0, False
        number, is_async = self._connector.get_num_new_matched_tokens(part, num_computed_tokens)
        if not number:
            return number, False
        chunks, size = self._table.spec.chunks, self._table.spec.block_size
        longest = record.longest_hit(num_computed_tokens + number, request.num_tokens, chunks)
        longest -= longest % size
        takes_whole = self._takes_whole and is_async
        in_one_step = self._is_last_chunk(record.ledger, longest, request)
        if (self._reads_whole or takes_whole) and not in_one_step:
            return 0, False
        if takes_whole:
            return number, is_async
        usable = longest - num_computed_tokens
        return (usable, is_async) if usable > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Hands over the blocks of a request that is admitted."""
        if not self._is_hidden(request.request_id):
            part = self._parts[request.request_id]
            self._connector.update_state_after_alloc(part, blocks, num_external_tokens)

    def build_connector_meta(self, output: SchedulerOutput) -> Any:
        """Builds the step's metadata from what the connector may see of the step."""
        hidden = {each for each in output.num_scheduled_tokens if self._is_hidden(each)}
        for request_id in hidden:
            self._end(request_id, 0)  # unless it has ended: it began with a kept state
        over = {each for each in output.finished_req_ids if self._ended(each)}
        visible = without_requests(
            output,
            hidden | self._read_in_parts(output),
            finished=(output.finished_req_ids - over) | self._ending,
            written=self._table.written + self._kept.restored_blocks(),
        )
        self._ending = set()
        for request_id in output.finished_req_ids:
            self._parts.pop(request_id, None)
        return self._connector.build_connector_meta(visible)

    def end_at_events(self, request_ids: Iterable[str]) -> None:
        """Ends the requests of a step that has been scheduled, if it begins their first event."""
        for request_id in request_ids:
            position = self._table[request_id].ledger.first_event_position
            if position is not None:
                self._end(request_id, position)

    def request_finished(
        self, request: Request, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Passes on that a request has ended, unless it ended for the connector before."""
        return self._finish(self._connector.request_finished, request, block_ids)

    def _finish(
        self, tell: Any, request: Request, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        part = self._parts[request.request_id]
        if part.end is not None:
            return False, None
        is_delayed, parameters = tell(part, block_ids)
        if is_delayed:
            self._delayed.add(request.request_id)
        return is_delayed, parameters

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Frees blocks that were kept until they were stored; vLLM hears of what it keeps itself.

        A connector may also name requests that it never stored, such as one that scores an answer.
        """
        self._connector.update_connector_output(connector_output)
        sent = connector_output.finished_sending or set()
        for request_id in sent:
            self.release(request_id)
        connector_output.finished_sending = sent & self._delayed
        self._delayed -= sent

    def release(self, request_id: str) -> None:
        """Frees the blocks of a request that wait to be stored: they are, or it is preempted."""
        kept = self._unstored.pop(request_id, [])
        self._manager.block_pool.free_blocks(reversed(kept))

    def has_pending_push_work(self) -> bool:
        """Whether steps go on although nothing is to be computed."""
        pending: bool = self._connector.has_pending_push_work()
        return pending or bool(self._unstored)

    def _end(self, request_id: str, num_tokens: int) -> None:
        """Ends a request for the connector, with the blocks of its first `num_tokens` tokens.

        If the connector asks for them, they stay in use when the event frees them.
        """
        part = self._parts[request_id]
        if part.end is not None:
            return
        part.end = num_tokens
        self._ending.add(request_id)
        if num_tokens:
            blocks = self._manager.get_block_ids_for_computed_tokens(request_id, num_tokens)
        else:
            blocks = tuple([] for _ in self._table.all_managers)
        if isinstance(self, SupportsHMA):
            is_delayed, _ = self._connector.request_finished_all_groups(part, blocks)
        else:
            is_delayed, _ = self._connector.request_finished(part, blocks[0])
        if is_delayed and num_tokens:
            pool = self._manager.block_pool
            kept = [pool.blocks[each] for group in blocks for each in group]
            pool.touch(kept)
            self._unstored[request_id] = kept

    def _ended(self, request_id: str) -> bool:
        """Whether a request ended for the connector before it did."""
        part = self._parts.get(request_id)
        return part is not None and part.end is not None

    def _is_hidden(self, request_id: str) -> bool:
        """Whether nothing that a request computes now is for other requests."""
        return self._ended(request_id) or self._table[request_id].reuse.state is not None

    def _read_in_parts(self, output: SchedulerOutput) -> set[str]:
        """Returns new requests whose prompt does not end with this step.

        Only for connectors that store a prompt in its first step, computed or not.
        """
        if not self._reads_whole:
            return set()
        return {
            each.req_id
            for each in output.scheduled_new_reqs
            if each.num_computed_tokens + output.num_scheduled_tokens[each.req_id]
            < self._parts[each.req_id].num_prompt_tokens
        }

    @staticmethod
    def _is_last_chunk(ledger: Any, start: int, request: Request) -> bool:
        """Whether no event ends the chunk that begins at `start` before the prompt's end."""
        position = ledger.next_position(start)
        return position is None or position >= request.num_tokens


@SupportsHMA.register  # so that vLLM calls `request_finished_all_groups`
class WholeHybridBlocks(WholeBlocks):
    """The same, of a connector that knows of several cache groups."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Passes on that a request has ended, unless it ended for the connector before."""
        return self._finish(self._connector.request_finished_all_groups, request, block_ids)


def limit_connector(
    connector: Any,
    table: RequestTable,
    kept: KeptStates,
    manager: KVCacheManager,
    transfer: KVTransferConfig,
) -> WholeBlocks:
    """Wraps a scheduler's connector."""
    kind = WholeHybridBlocks if isinstance(connector, SupportsHMA) else WholeBlocks
    return kind(connector, table, kept, manager, transfer)
