"""Which versions of vLLM are accepted, and what differs between them."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.version
from packaging.requirements import Requirement

from vllm_kvcompress.errors import UnsupportedError
from vllm_kvcompress.vllm_plugin.scheduler_side import scheduler
from vllm_kvcompress.vllm_plugin.startup import versions
from vllm_kvcompress.vllm_plugin.startup.versions import VLLM_VERSIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.1+cu130", "0.33.0"])
def test_known_versions_are_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.version, "__version__", version)
    versions.check_vllm_version()


@pytest.mark.parametrize("version", ["0.30.0", "0.34.0", "0.3.2", "1.0.0"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.version, "__version__", version)
    with pytest.raises(UnsupportedError, match=r"0\.31\.\*, 0\.32\.\*, 0\.33\.\*.*install"):
        versions.check_vllm_version()


@pytest.mark.parametrize(("version", "warns"), [("0.31.0", False), ("0.33.0", True)])
def test_start_up_warns_in_versions_that_were_only_checked(
    version: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm.version, "__version__", version)
    with caplog.at_level(logging.WARNING):
        versions.warn_of_version(logging.getLogger(__name__))
    assert [r.getMessage().count("0.33 and never run") for r in caplog.records] == [1] * warns


def test_the_cuda_extra_and_the_docs_name_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    specifier = Requirement(project["optional-dependencies"]["cuda"][0]).specifier
    minors = [f"0.{minor}" for minor in range(25, 40)]
    assert [each for each in minors if f"{each}.0" in specifier] == list(VLLM_VERSIONS)
    page = (ROOT / "docs" / "vllm-versions.md").read_text()
    assert all(f"| {each} | " in page for each in VLLM_VERSIONS)


class Stock:
    """What 0.33 has in the place of `Scheduler`'s method."""

    def _get_local_prefix_cache_hit(self, request: Any, max_cache_hit_length: int | None = None):
        return "vLLM's", max_cache_hit_length or 0


BEGINNING = SimpleNamespace(groups=lambda null_block: ([null_block] * 2,), num_tokens=64)


class Hits(scheduler.CompressionMixin, Stock):
    """A scheduler that keeps a state of two blocks for every request."""

    def __init__(self) -> None:
        self.record = SimpleNamespace(
            reuse=SimpleNamespace(), longest_hit=lambda num_cached, num_tokens, chunks: num_cached
        )
        self.table: Any = {"a": self.record}
        self.states: Any = SimpleNamespace(find_beginning=lambda *args: BEGINNING)
        self.spec: Any = SimpleNamespace(block_size=32, chunks=None)
        self.kv_cache_manager = SimpleNamespace(
            block_pool=SimpleNamespace(null_block="null"), create_kv_cache_blocks=lambda b: b
        )


def test_a_state_is_not_taken_where_vllm_limits_hits() -> None:
    """vLLM 0.33 may limit them: what is compressed of it could only be taken whole."""
    hits, request = Hits(), SimpleNamespace(request_id="a", num_tokens=100)
    state = ((["null", "null"],), 64, 0, False)
    assert hits._get_local_prefix_cache_hit(request) == state
    assert hits._get_local_prefix_cache_hit(request, None) == state
    assert hits.record.reuse.beginning is BEGINNING
    assert hits._get_local_prefix_cache_hit(request, 50) == ("vLLM's", 50)
    assert hits._get_local_prefix_cache_hit(request, max_cache_hit_length=9) == ("vLLM's", 9)
    assert hits.record.reuse.beginning is None
