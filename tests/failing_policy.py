"""Policies in another package that fail at prompts of certain lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.conftest import request
from tests.tiny_models import prompt

BLOCK = 32
# Full blocks of the prompts at which something fails, in the middle layer.
NO_SCORE, NO_MEMORY, NO_PAGES, NOT_ON_THE_SECOND_RANK = 20, 21, 22, 23
KILLS_ITS_PROCESS = 24  # the last rank

CODE = f"""
import os
import signal
from dataclasses import dataclass

import torch

from vllm_kvcompress.policies import Needs, Policy, Stages
from vllm_kvcompress.policies.merging.momentkv import MomentKV


def fails(view, num_blocks):
    return view.layer == 1 and view.num_entries == num_blocks * view.block_size


@dataclass(frozen=True)
class Failing(Policy):
    name = "failing"
    paper = "None"
    summary = "The smallest values, or an error."
    stages = Stages(score="norm of the value", protect="nothing", select="smallest")

    @property
    def needs(self):
        return Needs(values=True, window_size=8)

    def score(self, view):
        if fails(view, {NO_SCORE}):
            raise RuntimeError("no score today")
        if fails(view, {NO_MEMORY}):
            raise torch.OutOfMemoryError("not that much")
        if fails(view, {NOT_ON_THE_SECOND_RANK}) and torch.distributed.get_rank() == 1:
            raise RuntimeError("not on this rank")
        last_rank = torch.distributed.get_world_size() - 1
        if fails(view, {KILLS_ITS_PROCESS}) and torch.distributed.get_rank() == last_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return -view.kv.values().float().norm(dim=-1)

    def layer_pages(self, num_blocks, capacity, num_heads, num_logical_blocks=0):
        if num_logical_blocks == {NO_PAGES}:
            raise ZeroDivisionError("no pages today")
        return super().layer_pages(num_blocks, capacity, num_heads, num_logical_blocks)


@dataclass(frozen=True)
class FailingMoments(MomentKV):
    name = "failing_moments"

    def merge(self, view, scores, kept):
        if fails(view, {NO_SCORE}):
            raise RuntimeError("no moments today")
        return super().merge(view, scores, kept)
"""
ENTRIES = """\
[vllm_kvcompress.policies]
failing = failing_values:Failing
failing_moments = failing_values:FailingMoments
"""


def install(folder: Path) -> Path:
    """Writes the package, and returns what to put on Python's path."""
    target = folder / "failing"
    about = target / "failing_policy-1.0.dist-info"
    about.mkdir(parents=True)
    (target / "failing_values.py").write_text(CODE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-policy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    return target


def good(name: str) -> list[dict[str, Any]]:
    """Makes requests whose events succeed."""
    return [
        request(f"{name}1", prompt(600, seed=1), 24),
        request(f"{name}2", prompt(500, seed=2), 24, at_step=1),
        request(f"{name}3", prompt(300, seed=3), 24, at_step=6),
    ]


def failing(num_blocks: int, output: int = 24, **more: Any) -> dict[str, Any]:
    """Makes a request at whose event the policy fails."""
    tokens = prompt(num_blocks * BLOCK + 5, seed=num_blocks)
    return request(f"bad{num_blocks}-{output}", tokens, output, **more)


def check(report: dict[str, Any], bad: list[dict[str, Any]]) -> None:
    """Asserts that good requests are unaffected by bad ones, and that every block is free."""
    outputs = report["outputs"]
    for number in (1, 2, 3):
        alone, beside = outputs[f"alone{number}"], outputs[f"beside{number}"]
        assert beside["tokens"] == alone["tokens"], number
        assert beside["finish_reason"] == alone["finish_reason"] == "length"
    for one in bad:
        ended = outputs[one["id"]]
        # One from the prompt, and one of the event's step, unless that never comes.
        assert len(ended["tokens"]) == min(2, one["max_tokens"])
        assert ended["finish_reason"] == ("error" if one["max_tokens"] > 1 else "length")
    assert report["free_at_end"] == report["num_blocks"] - 1
    assert len(report["events"]) == 6
    (policy,) = {event["policy"] for event in report["events"]}
    without_event = sum(one["max_tokens"] == 1 for one in bad)
    skipped = {f"{policy} error": len(bad) - without_event}
    if without_event:
        skipped[f"{policy} ends_with_first_token"] = without_event
    assert report["skipped"] == skipped
