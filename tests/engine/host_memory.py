"""Copies of vLLM's offloading connectors on CPUs, for which it has only GPU code; late on purpose.

vLLM loads `HostSpec` and the connectors by the names in `kv_transfer_config`. What connectors do in
the scheduler is vLLM's own. Blocks are read as late as the interface allows: one that somebody else
writes too early is then stored with wrong content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

Copy = tuple[int, bool, GPULoadStoreSpec, Any]


class HostWorker(OffloadingWorker):
    """Copies blocks between the cache and host memory, some calls after it was asked to.

    Attributes:
        host: per tensor [chunks, bytes of a chunk].
    """

    def __init__(self, caches: CanonicalKVCaches, spec: HostSpec) -> None:
        self.caches, self.blocks_per_chunk = caches, spec.blocks_per_chunk
        self.delay: int = spec.extra_config.get("delay", 0)
        self.record = Path(spec.extra_config["record"])
        sizes = [each.page_size_bytes * spec.blocks_per_chunk for each in caches.tensors]
        self.host = [torch.zeros(spec.num_chunks, size, dtype=torch.int8) for size in sizes]
        self._waiting: list[tuple[int, Copy]] = []
        self._calls = 0
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copies blocks to host memory later."""
        self._waiting.append((self._calls + self.delay, (job_id, True, src_spec, dst_spec)))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copies blocks from host memory later."""
        self._waiting.append((self._calls + self.delay, (job_id, False, dst_spec, src_spec)))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Runs the copies that are due, and returns what has ended since the last call."""
        self._calls += 1
        self._run({copy[0] for due, copy in self._waiting if due < self._calls})
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Runs copies whose blocks are about to be written."""
        self._run(job_ids)

    def _run(self, job_ids: set[int]) -> None:
        for _, copy in [each for each in self._waiting if each[1][0] in job_ids]:
            job_id, is_store, blocks, chunks = copy
            digests = [self._copy(is_store, *where) for where in self._places(blocks, chunks)]
            with self.record.open("a") as file:
                file.write(json.dumps({"store": is_store, "blocks": digests}) + "\n")
            self._done.append(TransferResult(job_id, success=True))
        self._waiting = [each for each in self._waiting if each[1][0] not in job_ids]

    def _places(self, blocks: GPULoadStoreSpec, chunks: Any) -> Iterator[tuple[int, int, int, int]]:
        """Yields group, block, chunk, and the block's place in the chunk."""
        ids, chunk_ids, size = iter(blocks.block_ids), iter(chunks.block_ids), self.blocks_per_chunk
        for group, (count, first) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            chunk = -1
            for index in range(first, first + count):
                if index == first or not index % size:
                    chunk = int(next(chunk_ids))
                yield group, int(next(ids)), chunk, index % size

    def _copy(self, is_store: bool, group: int, block: int, chunk: int, place: int) -> str:
        """Copies one block, and returns a digest of its content."""
        digest = hashlib.sha256()
        for number in {each.tensor_idx for each in self.caches.group_data_refs[group]}:
            tensor = self.caches.tensors[number].tensor.view(torch.int8)
            page = tensor.shape[1]
            slot = self.host[number][chunk, place * page : (place + 1) * page]
            if is_store:
                slot.copy_(tensor[block])
            else:
                tensor[block].copy_(slot)
            digest.update(slot.numpy().tobytes())
        return digest.hexdigest()[:16]


class HostSpec(CPUOffloadingSpec):
    """vLLM's bookkeeping of host memory, with a worker for CPUs."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Returns the worker that copies."""
        return HostWorker(kv_caches, self)


class LateCopies:
    """Copies of `SimpleCPUOffloadWorker`, which run when it has polled them often enough."""

    def __init__(self, cache: torch.Tensor, host: torch.Tensor, delay: int, record: Path) -> None:
        self.cache, self.host, self.delay, self.record = cache, host, delay, record

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Copies blocks later."""
        events_list.append((event_idx, self))
        self.jobs = [*getattr(self, "jobs", ()), [self.delay, src_blocks, dst_blocks, is_store]]

    def query(self) -> bool:
        """Whether the oldest copy has ended; runs it when it is due."""
        self.jobs[0][0] -= 1
        if self.jobs[0][0] >= 0:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Runs the oldest copy."""
        _, sources, targets, is_store = self.jobs.pop(0)
        come, go = (self.cache, self.host) if is_store else (self.host, self.cache)
        go[targets] = come[sources]
        with self.record.open("a") as file:
            file.write(json.dumps({"store": is_store, "blocks": sources}) + "\n")


class HostOffloadWorker(SimpleCPUOffloadWorker):
    """Takes the cache of a model whose layers all have the same pages, without streams."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Allocates host memory of as many bytes as was asked for."""
        (layout, *_), num_blocks = (
            self.kv_cache_config.kv_cache_tensors,
            (self.kv_cache_config.num_blocks),
        )
        storage = next(iter(kv_caches.values())).untyped_storage()
        raw = torch.empty(0, dtype=torch.int8).set_(storage)
        if layout.block_stride * num_blocks > raw.numel() // 2:  # a block has all its layers
            cache = raw[: num_blocks * layout.block_stride].view(num_blocks, -1)
        else:
            layers = raw.view(-1, num_blocks, layout.block_stride)
            cache = layers.transpose(0, 1)
        host = torch.zeros(self.cpu_capacity_bytes // cache[0].numel(), *cache.shape[1:])
        self.num_cpu_blocks = len(host)
        extra = self.vllm_config.kv_transfer_config.kv_connector_extra_config
        copies = LateCopies(
            cache, host.to(torch.int8), extra.get("delay", 0), Path(extra["record"])
        )
        self._backend = copies

    def wait_for_save(self) -> None:
        """Submits stores; the forward pass has ended."""
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            self._backend.launch_copy(
                metadata.store_gpu_blocks,
                metadata.store_cpu_blocks,
                True,
                metadata.store_event,
                self._store_events,
            )


class HostOffload(SimpleCPUOffloadConnector):
    """SimpleCPUOffloadConnector with copies for CPUs."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            capacity = self.worker_handler.cpu_capacity_bytes
            self.worker_handler = HostOffloadWorker(vllm_config, kv_cache_config, capacity)


class LossyExample(ExampleConnector):
    """ExampleConnector whose loads fail: a block of every loaded prompt is said to be damaged."""

    damaged: frozenset[int] = frozenset()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads nothing, and remembers a block."""
        for each in self._get_connector_metadata().requests:
            if not each.is_store:
                slot = int(each.slot_mapping[5 * self._block_size])
                self.damaged = frozenset({slot // self._block_size})

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the damaged blocks, once."""
        damaged, self.damaged = self.damaged, frozenset()
        return set(damaged)


class LossyOffloading(OffloadingConnector):
    """OffloadingConnector whose first load is said to fail at its block number `damaged`."""

    failed = False

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns that block in the step that begins the load."""
        place = self._kv_transfer_config.kv_connector_extra_config["damaged"]
        jobs = [] if self.failed else list(self._get_connector_metadata().load_jobs.values())
        self.failed = self.failed or bool(jobs)
        return {int(each.dst_spec.block_ids[place]) for each in jobs}


@dataclass
class Copies(KVConnectorMetadata):
    """What a step stores and loads: by request, files and blocks."""

    stores: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    loads: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class KeepingConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores blocks in files, and asks for those of every ended request until they are stored.

    It behaves as LMCache's connector for its server: it offers what it has whole, loads before a
    request's first step, and names a request as stored only once it has heard that it has ended.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.folder, self.delay = Path(extra["shared_storage_path"]), extra.get("delay", 0)
        self.record = Path(extra["record"])
        self.size = vllm_config.cache_config.block_size
        # In the scheduler:
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._num_stored: dict[str, int] = {}
        self._next = Copies()
        self._unsent: set[str] = set()
        # In the worker:
        self._waiting: list[tuple[int, str, list[tuple[str, int]]]] = []
        self._calls = 0
        self._named: set[str] = set()
        self._loaded: set[str] = set()

    def files_of(self, tokens: Sequence[int]) -> list[str]:
        """Returns the names of the files of a prefix's full blocks."""
        ends = range(self.size, len(tokens) + 1, self.size)
        return [hashlib.sha256(repr(list(tokens[:end])).encode()).hexdigest() for end in ends]

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Offers all that is stored of a prompt."""
        if request.status == RequestStatus.PREEMPTED:
            return 0, False
        files = self.files_of(request.all_token_ids)
        stored = list(takewhile(lambda name: (self.folder / name).exists(), files))
        number = min(len(stored) * self.size, request.num_tokens - 1) // self.size * self.size
        return max(0, number - num_computed), number > num_computed

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Notes a request's blocks; loads what was offered into those without a hash."""
        (ids,) = blocks.get_block_ids()
        self._requests[request.request_id], self._blocks[request.request_id] = request, list(ids)
        if num_external:
            first = sum(block.block_hash is not None for block in blocks.blocks[0])
            end = first + num_external // self.size
            pairs = zip(self.files_of(request.all_token_ids), ids, strict=False)
            self._next.loads[request.request_id] = list(pairs)[first:end]
            self._num_stored[request.request_id] = end

    def build_connector_meta(self, output: Any) -> Copies:
        """Stores the blocks that a step fills."""
        step, self._next = self._next, Copies()
        cached = output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._blocks[request_id] += new[0] if new else []
        starts = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, start in starts.items():
            tokens = list(self._requests[request_id].all_token_ids)
            end = min(start + output.num_scheduled_tokens[request_id], len(tokens))
            files = self.files_of(tokens[:end])
            first = self._num_stored.get(request_id, 0)
            pairs = zip(files, self._blocks[request_id], strict=False)
            step.stores[request_id] = list(pairs)[first:]
            self._num_stored[request_id] = max(first, len(files))
        return step

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Asks for the blocks."""
        for known in (self._requests, self._blocks, self._num_stored):
            known.pop(request.request_id, None)
        self._unsent.add(request.request_id)
        return True, None

    request_finished_all_groups = request_finished

    def update_connector_output(self, connector_output: Any) -> None:
        """Forgets requests whose blocks are stored."""
        self._unsent -= connector_output.finished_sending or set()

    def has_pending_push_work(self) -> bool:
        """Whether blocks of ended requests are still to be stored."""
        return bool(self._unsent)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the caches of all layers, whose first dimension is the block."""
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads the blocks of requests that wait for them."""
        for request_id, copies in self._get_connector_metadata().loads.items():
            for file, block in copies:
                for name, rows in torch.load(self.folder / file).items():
                    self.caches[name][block] = rows
            self._note(False, copies)
            self._loaded.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Has nothing to wait for."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Stores nothing layer by layer."""

    def wait_for_save(self) -> None:
        """Queues the blocks of a step."""
        for request_id, copies in self._get_connector_metadata().stores.items():
            self._waiting.append((self._calls + self.delay, request_id, copies))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Copies what is due; returns requests that have ended and are stored, and loaded ones."""
        self._calls += 1
        self._named |= finished_req_ids
        for due, _, copies in self._waiting:
            if due < self._calls:
                for file, block in copies:
                    rows = {name: cache[block].clone() for name, cache in self.caches.items()}
                    torch.save(rows, self.folder / file)
                self._note(True, copies)
        self._waiting = [each for each in self._waiting if each[0] >= self._calls]
        stored = self._named - {request_id for _, request_id, _ in self._waiting}
        self._named -= stored
        loaded, self._loaded = self._loaded, set()
        return stored, loaded

    def _note(self, is_store: bool, copies: list[tuple[str, int]]) -> None:
        line = {"store": is_store, "blocks": [block for _, block in copies]}
        with self.record.open("a") as file:
            file.write(json.dumps(line) + "\n")


def stand_in_for_lmcache(report: dict[str, Any]) -> None:
    """Has vLLM load `KeepingConnector` by the name of LMCache's connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry["LMCacheMPConnector"] = lambda: KeepingConnector
