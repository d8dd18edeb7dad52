"""Speculative decoding: events happen only behind accepted tokens."""

from __future__ import annotations

from typing import Any

from tests.engine.conftest import Run, request
from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options

POLICIES = ("adakv+criticalkv", "h2o")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
REPEATING = {"model": "tests.engine.test_speculation.Repeating", "num_speculative_tokens": 3}
NOTED = "tests.engine.test_speculation:note_drafts"
CHECKED = {"KVCOMPRESS_CHECK": "1"}


class Repeating:
    """A proposer of a user's own, without layers: guesses that the last token comes again."""

    def __init__(self, vllm_config: Any) -> None:
        self._number = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, model: Any) -> None:
        """Loads nothing; vLLM's runner for CPUs calls it."""

    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Returns as many guesses for each request that has a new token."""
        return [tokens[-1:] * self._number for tokens in sampled]


def note_drafts(report: dict[str, Any]) -> None:
    """Reports numbers of drafted and accepted tokens, what was drafted, and where events happened.

    What was drafted is by request, a list for every step.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_kvcompress.vllm_plugin.scheduler_side.block_manager import CompressedBlockManager

    report["drafts"], report["drafted"], report["positions"] = [0, 0], {}, []
    count, plan = Scheduler.make_spec_decoding_stats, CompressedBlockManager.plan_event
    update = Scheduler.update_draft_token_ids

    def counting(self: Any, *args: Any, **given: Any) -> Any:
        report["drafts"][0] += given["num_draft_tokens"]
        report["drafts"][1] += given["num_accepted_tokens"]
        return count(self, *args, **given)

    def noting(self: Any, request_id: str, position: int) -> None:
        unsent = self.table[request_id].unsent
        former = len(unsent.events)
        plan(self, request_id, position)
        if len(unsent.events) > former:
            report["positions"].append([request_id.rpartition("-")[0], position])

    def taking(self: Any, drafts: Any) -> None:
        for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if -1 not in tokens:  # else model runner V2 keeps them on the device
                report["drafted"].setdefault(request_id.rpartition("-")[0], []).append(tokens)
        update(self, drafts)

    Scheduler.make_spec_decoding_stats, CompressedBlockManager.plan_event = counting, noting
    Scheduler.update_draft_token_ids = taking


def requests() -> list[dict[str, Any]]:
    """Returns requests of both policies; random models repeat themselves, which ngram guesses."""
    return [
        request(f"{policy}-{length}", prompt(length, seed), 120, xargs={"kv_policy": policy})
        for policy in POLICIES
        for seed, length in enumerate((700, 333))
    ]


def settings(trigger: str = "prompt", budget: float = 0.25) -> dict[str, Any]:
    first, *others = POLICIES
    return {"policy": first, "budget": budget, "trigger": trigger, "request_policies": others}


def test_outputs_with_drafts_are_those_without(llama: str, run_engine: Run) -> None:
    """Events at the same positions, of the same tokens; every token that follows is the same."""
    given = {"settings": settings("chunk:128,decode:20"), "probes": [NOTED], "environment": CHECKED}
    plain = run_engine(llama, [requests()], **given)
    ends = {position for name, position in plain["positions"] if name.endswith("-700")}
    assert 700 in ends
    assert min(ends) < 700 < max(ends)
    for drafts in (NGRAM, REPEATING):
        report = run_engine(llama, [requests()], speculative_config=drafts, **given)
        drafted, accepted = report["drafts"]
        assert 0 < accepted < drafted
        assert sorted(report["positions"]) == sorted(plain["positions"])
        for name, expected in plain["outputs"].items():
            assert report["outputs"][name]["tokens"] == expected["tokens"], name


def test_budget_one_is_stock_vllm(llama: str, run_engine: Run) -> None:
    """With the options that `serve` passes; vLLM refuses logits processors beside drafts."""
    check = plugin_options(Settings.from_dict(settings()))["logits_processors"]
    given = {"speculative_config": NGRAM, "probes": [NOTED]}
    stock = run_engine(llama, [requests()], **given)
    ours = {"settings": settings(budget=1.0), "logits_processors": [check]}
    report = run_engine(llama, [requests()], **ours, **given)
    assert report["drafts"] == stock["drafts"]
    for name, expected in stock["outputs"].items():
        assert report["outputs"][name]["tokens"] == expected["tokens"], name
