"""KV events that vLLM announces to routers, compared with its prefix cache after every step.

A probe (see engine_process.py): it subscribes as a router does, over ZMQ, and replays
BlockStored and BlockRemoved.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

PROBE = "tests.engine.kv_events:replay"


def announcing(folder: Path) -> dict[str, Any]:
    """Arguments of `run_engine` that announce, listen and compare."""
    endpoint = f"ipc://{folder}/e"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return {"kv_events_config": events, "probes": [PROBE], "environment": {"KV_EVENTS": endpoint}}


class Router:
    """Tokens of the blocks that a router believes to be in the cache, by group and hash."""

    def __init__(self, endpoint: str) -> None:
        """Subscribes to a publisher that must exist already."""
        import zmq

        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        time.sleep(0.5)  # the publisher is not told of subscribers any faster
        self.next_number = 0
        self.blocks: dict[tuple[int, Any], tuple[int, ...]] = {}
        self.counts = {"stored": 0, "removed": 0}

    def listen(self, num_batches: int) -> None:
        """Takes in everything up to the last batch that was published."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        while self.next_number < num_batches:
            _, number, payload = self.socket.recv_multipart()
            assert int.from_bytes(number, "big") == self.next_number, "a batch was missed"
            self.next_number += 1
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                self.apply(event)

    def apply(self, event: Any) -> None:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored

        group = event.group_idx or 0
        if isinstance(event, BlockStored):
            size = event.block_size
            parts = [event.token_ids[i : i + size] for i in range(0, len(event.token_ids), size)]
            for block_hash, tokens in zip(event.block_hashes, parts, strict=True):
                self.blocks[group, block_hash] = tuple(tokens)
            self.counts["stored"] += len(parts)
        else:
            assert isinstance(event, BlockRemoved), event
            for block_hash in event.block_hashes:
                del self.blocks[group, block_hash]
            self.counts["removed"] += len(event.block_hashes)


def cached(pool: Any) -> set[tuple[int, Any]]:
    """Returns the blocks in vLLM's prefix cache by the names that events use."""
    from vllm.v1.core.kv_cache_utils import (
        get_block_hash,
        get_group_id,
        maybe_convert_block_hash,
    )

    keys = [block.block_hash for block in pool.blocks if block.block_hash is not None]
    return {(get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in keys}


def replay(report: dict[str, Any]) -> None:
    """Compares router and cache whenever the bookkeeping is checked."""
    from tests.engine.engine_process import Bookkeeping

    published = [0]
    routers: list[Router] = []
    begin, check = Bookkeeping.__init__, Bookkeeping.check

    def listening(books: Bookkeeping, engine: Any) -> None:
        begin(books, engine)
        routers.append(Router(os.environ["KV_EVENTS"]))
        report["kv_events"] = routers[0].counts
        publisher = books.scheduler.kv_event_publisher
        publish = publisher.publish

        def publish_and_count(batch: Any) -> None:
            published[0] += 1
            publish(batch)

        publisher.publish = publish_and_count

    def comparing(books: Bookkeeping) -> None:
        check(books)
        (router,) = routers
        router.listen(published[0])
        in_cache = cached(books.pool)
        assert set(router.blocks) <= in_cache, "announced, and not in the cache"
        assert in_cache <= set(router.blocks), "in the cache, and not announced"
        for request in books.scheduler.requests.values():
            known = request.all_token_ids
            for index, block_hash in enumerate(request.block_hashes):
                key = (0, as_named(block_hash))
                if key in router.blocks:
                    size = len(router.blocks[key])
                    assert router.blocks[key] == tuple(known[index * size : (index + 1) * size])

    Bookkeeping.__init__, Bookkeeping.check = listening, comparing


def as_named(block_hash: Any) -> Any:
    """Returns the name of a block's hash in events."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return maybe_convert_block_hash(block_hash)
