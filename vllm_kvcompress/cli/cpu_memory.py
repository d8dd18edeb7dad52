"""The share of a CPU's memory that a server takes where no option says how much.

vLLM takes 92% of a NUMA node and refuses to start where less is free; a browser is enough for that.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import (
    MemoryNodeInfo,
    get_memory_node_info,
    get_visible_memory_node,
)

from vllm_kvcompress.cli.vllm_command import option_values
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.rounding import ceil_div

_OPTION = "--gpu-memory-utilization"  # vLLM's, for CPUs as well
_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_MAX_SHARE = 0.92  # vLLM's own
_GIB = 2**30
_RESERVE_BYTES = 2 * _GIB  # for the API server and other processes
_MIN_BYTES = 2**29  # for a worker


def take_free_memory(arguments: argparse.Namespace, command: Sequence[str]) -> None:
    """Sets a server's share of memory to what is free, and prints how much that is.

    Does nothing on GPUs, or where an option or the environment says how much memory to take.

    Args:
        arguments: of `vllm serve`, as vLLM parsed them; `gpu_memory_utilization` is replaced.
        command: the same, as typed.

    Raises:
        ConfigError: too little is free to start.
    """
    options = (_OPTION, "--kv-cache-memory-bytes")
    is_given = _VARIABLE in os.environ or any(option_values(command, name) for name in options)
    if is_given or not current_platform.is_cpu():
        return
    nodes = [get_memory_node_info(node) for node in get_visible_memory_node()]
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    num_workers = math.prod(getattr(arguments, size) for size in sizes)
    share = memory_share(nodes, ceil_div(num_workers, len(nodes)))
    total = min(node.total_memory for node in nodes)
    per_worker = "" if num_workers == 1 else f" of each of {num_workers} workers"
    print(
        f"vllm-kvcompress: {share * total / _GIB:.1f} of {total / _GIB:.1f} GiB of memory for the "
        f"model and KV cache{per_worker}: what is free, less {_RESERVE_BYTES // _GIB} GiB. "
        f"{_OPTION} or {_VARIABLE} (GiB of KV cache) changes it.",
        file=sys.stderr,
    )
    arguments.gpu_memory_utilization = share


def memory_share(nodes: Sequence[MemoryNodeInfo], workers_per_node: int) -> float:
    """Returns the share of a node that each of its workers may take.

    Args:
        nodes: memory of the NUMA nodes that the server may use; the one with least free decides.
        workers_per_node: workers that share a node.

    Raises:
        ConfigError: a worker would have less than 0.5 GiB.
    """
    node = min(nodes, key=lambda node: node.available_memory / node.total_memory)
    usable = (node.available_memory - _RESERVE_BYTES) / workers_per_node
    if usable < _MIN_BYTES:
        raise ConfigError(
            f"expected {_MIN_BYTES / _GIB:.1f} GiB of free memory for each worker, and "
            f"{_RESERVE_BYTES // _GIB} GiB for the rest of the server, found "
            f"{node.available_memory / _GIB:.1f} GiB free on a NUMA node for {workers_per_node} "
            f"worker(s); end other processes, or set {_VARIABLE} (GiB of KV cache) yourself."
        )
    share = min(usable / node.total_memory, _MAX_SHARE)
    return int(share * 10_000) / 10_000
