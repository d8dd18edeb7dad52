"""The files that the documentation opens for one request are those that it goes through."""

from __future__ import annotations

import re

from tests.cli.server_process import ROOT
from tests.engine.conftest import Run, request
from tests.tiny_models import prompt

CHECK = "vllm_kvcompress.vllm_plugin.request_options:RequestCheck"
COMMAND = "cli/serve.py"  # of the process that starts the server
FRONT_END = (
    "vllm_plugin/api_server/stat_logger.py",
    "metrics/prometheus.py",
)  # of the server's process


def listed_files(heading: str) -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)


def test_a_request_and_its_event_go_through_the_documented_files(
    llama: str, run_engine: Run
) -> None:
    request_files = listed_files("One request in ten files")
    event_files = listed_files("One event, from plan to pages")
    assert len(set(request_files)) == len(request_files) == 10
    assert len(set(event_files)) == len(event_files) <= 12
    assert all((ROOT / "vllm_kvcompress" / file).exists() for file in request_files + event_files)
    report = run_engine(
        llama,
        [[request("one", prompt(300, seed=1), 8)]],
        settings={"policy": "snapkv", "budget": 0.25},
        logits_processors=[CHECK],
        probes=["tests.engine.trail:note_files"],
    )
    assert len(report["events"]) == 1
    in_the_engine = request_files[1:-2]
    assert request_files == [COMMAND, *in_the_engine, *FRONT_END]
    assert [file for file in report["trail"] if file in in_the_engine] == in_the_engine
    assert set(event_files) <= set(report["trail"])
