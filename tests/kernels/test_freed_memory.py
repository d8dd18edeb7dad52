"""Memory of freed temporaries stays in the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RESIDENT_AFTER_FREEING = """
import resource
from pathlib import Path
import torch
from vllm_kvcompress.kernels.common.tiles import keep_freed_memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

if {keeps}:
    keep_freed_memory()
torch.ones(5 << 20, dtype=torch.uint8)
before = resident_bytes()
for _ in range(4):
    temporaries = [torch.ones(5 << 20, dtype=torch.uint8) for _ in range(6)]
    del temporaries
print(resident_bytes() - before)
"""
# A fixed threshold: by default glibc raises it with the first tensor that is freed, and then
# returns memory or not, depending on what else lies at the end of the heap.
FIXED_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


def mib_kept(keeps: bool) -> float:
    """Returns how many MiB a process keeps of 30 MiB of tensors, made and freed four times."""
    command = [sys.executable, "-c", RESIDENT_AFTER_FREEING.format(keeps=keeps)]
    environment = {**os.environ, **FIXED_THRESHOLD}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return int(done.stdout) / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these settings")
def test_temporaries_reuse_the_memory_of_freed_ones() -> None:
    assert mib_kept(keeps=False) < 5
    assert 20 < mib_kept(keeps=True) < 90  # 120 MiB were made
