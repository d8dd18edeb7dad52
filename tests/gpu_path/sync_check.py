"""Prints in which mode vLLM checks for waiting while our part of a worker's step runs.

    python -m tests.gpu_path.sync_check

A process of its own: vLLM decides when methods are defined whether they are checked.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.utils import gpu_sync_debug

gpu_sync_debug._SYNC_CHECK_MODE = "error"  # as VLLM_GPU_SYNC_CHECK=error has it on CUDA
torch.cuda.get_sync_debug_mode = lambda: 0
torch.cuda.set_sync_debug_mode = lambda _: None

from vllm.v1.worker.gpu_worker import Worker as GPUWorker  # noqa: E402

from vllm_kvcompress.vllm_plugin.worker_side.worker import CompressionWorker  # noqa: E402


class Stock(GPUWorker):
    """vLLM's worker, whose steps do nothing."""

    def execute_model(self, scheduler_output: Any) -> None:
        """Leaves the step to be sampled."""

    def sample_tokens(self, grammar_output: Any) -> None:
        """Sends nothing, as ranks other than the last."""


class Worker(CompressionWorker, Stock):
    """A step's methods alone."""


def main() -> None:
    """Runs a step before the end of warming up, and one behind it."""
    worker, seen = Worker.__new__(Worker), []

    def note(name: str) -> Any:
        return lambda *_: seen.append([name, gpu_sync_debug._checking.get()])

    names = ("begin_step", "end_forward", "end_step")
    worker.compression = SimpleNamespace(**{name: note(name) for name in names})
    for enable in (lambda: None, gpu_sync_debug.enable_gpu_sync_check):
        enable()
        worker.execute_model(None)
        worker.sample_tokens(None)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
