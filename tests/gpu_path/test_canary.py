"""Answers scored again with the full cache under both of vLLM's model runners for GPUs."""

from __future__ import annotations

import pytest

from tests.engine.conftest import request
from tests.engine.test_canary import SETTINGS, expected_score
from tests.gpu_path.conftest import Run
from tests.tiny_models import prompt


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_scores_are_those_of_two_engines(llama: str, run_gpu_path: Run, runner: str) -> None:
    """A long prompt, whose shadow begins behind its prefix-cache hit, and a short one.

    Steps are scheduled ahead of those that run.
    """
    prompts = {"long": prompt(640, 1), "short": prompt(300, 2)}
    phases = [[request(name, prompts[name], 20, logprobs=None) for name in prompts]]
    watched = run_gpu_path(llama, phases, settings={**SETTINGS, "shadow": 1.0}, runner=runner)
    phases = [[request(name, prompts[name], 20) for name in prompts]]
    plain = run_gpu_path(llama, phases, settings=SETTINGS, runner=runner)["outputs"]
    texts = [
        request(name, prompts[name] + plain[name]["tokens"], 1, prompt_logprobs=5)
        for name in prompts
    ]
    stock = run_gpu_path(llama, [texts], runner=runner)["outputs"]
    assert watched["shadow_outcomes"] == {"scored": 2}
    assert watched["free_at_end"] == watched["num_blocks"] - 1
    for name, actual in zip(prompts, watched["shadows"], strict=True):
        assert watched["outputs"][name]["tokens"] == plain[name]["tokens"]
        score = expected_score(plain[name], stock[name])
        assert actual["num_changed"] == score["num_changed"]
        assert actual["lost_nats"] == pytest.approx(score["lost_nats"], abs=1e-3)
