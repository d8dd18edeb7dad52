"""Memory of freed temporaries stays in the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from vllm_kvcompress.kernels.common.tiles import keep_freed_memory

def temporaries():
    return [torch.ones(5 << 20, dtype=torch.uint8) for _ in range(6)]

if {keeps}:
    keep_freed_memory()
for _ in range(3):
    temporaries()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    temporaries()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(keeps: bool) -> int:
    """Counts page faults of a process that makes and frees 30 MiB of tensors four times."""
    command = [sys.executable, "-c", FAULTS.format(keeps=keeps)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these settings")
def test_temporaries_reuse_the_memory_of_freed_ones() -> None:
    kept, returned = page_faults(keeps=True), page_faults(keeps=False)
    assert kept < 100 < returned
