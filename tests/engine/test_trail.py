"""The files that the documentation opens for one request are those that it goes through."""

from __future__ import annotations

import re

from tests.cli.server_process import ROOT
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

CHECK = "vllm_kvcompress.vllm_plugin.request_options:RequestCheck"
FRONT_END = (
    "vllm_plugin/api_server/stat_logger.py",
    "metrics/prometheus.py",
)  # of the server's process


def listed_files() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## One chat completion\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)


def test_a_request_goes_the_way_that_is_described(llama: str, run_engine: Run) -> None:
    files = listed_files()
    assert 10 <= len(files) <= 15
    assert len(set(files)) == len(files), "each is opened once"
    report = run_engine(
        llama,
        [[request("one", prompt(300, seed=1), 8)]],
        settings={"policy": "snapkv", "budget": 0.25},
        logits_processors=[CHECK],
        probes=["tests.engine.trail:note_files"],
    )
    assert len(report["events"]) == 1
    assert tuple(files[-2:]) == FRONT_END
    assert all((ROOT / "vllm_kvcompress" / file).exists() for file in files)
    assert [file for file in report["trail"] if file in files] == files[:-2]
