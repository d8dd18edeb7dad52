"""Copies of vLLM's offloading connectors on CPUs, for which it has only GPU code; late on purpose.

vLLM loads `HostSpec` and the connectors by the names in `kv_transfer_config`. What connectors do in
the scheduler is vLLM's own. Blocks are read as late as the interface allows: one that somebody else
writes too early is then stored with wrong content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
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
