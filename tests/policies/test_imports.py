"""The policies and all below them run without vLLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

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
import {modules}
"""


def import_without(modules: Iterable[str], *blocked: str) -> subprocess.CompletedProcess[str]:
    """Imports modules in a fresh process, whose error says which cannot be imported."""
    code = BLOCKED.format(modules=", ".join(modules), blocked=set(blocked))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_policies_import_without_vllm() -> None:
    done = import_without(MODULES, "vllm")
    assert done.returncode == 0, done.stderr


def test_scheduling_and_statistics_import_without_torch() -> None:
    modules = ("vllm_kvcompress.scheduling.ledger", "vllm_kvcompress.metrics.stats")
    done = import_without(modules, "vllm", "torch")
    assert done.returncode == 0, done.stderr


def test_blocked_modules_cannot_be_imported() -> None:
    done = import_without(["vllm_kvcompress.compression.layer"], "torch")
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr
