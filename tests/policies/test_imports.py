"""The policies and all below them run without vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "vllm_kvcompress.policies",
    "vllm_kvcompress.kernels",
    "vllm_kvcompress.cache.pages",
    "vllm_kvcompress.scheduling.ledger",
    "vllm_kvcompress.metrics.stats",
    "vllm_kvcompress.compression.layer",
    "vllm_kvcompress.tools.profiler",
]
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import {module}
"""


def import_without(module: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(module=module, blocked=set(blocked))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", MODULES)
def test_no_vllm(module: str) -> None:
    done = import_without(module, "vllm")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["vllm_kvcompress.scheduling.ledger", "vllm_kvcompress.metrics.stats"]
)
def test_no_torch_in_scheduling(module: str) -> None:
    done = import_without(module, "vllm", "torch")
    assert done.returncode == 0, done.stderr


def test_the_block_blocks() -> None:
    done = import_without("vllm_kvcompress.compression.layer", "torch")
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr
