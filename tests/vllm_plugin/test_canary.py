"""Which answers the canary takes, how many wait, and what is refused beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError, UnsupportedError
from vllm_kvcompress.vllm_plugin.scheduler_side.canary import MAX_PENDING_TOKENS, Canary
from vllm_kvcompress.vllm_plugin.startup.refusals import check_engine

COMPRESSED: Any = SimpleNamespace(ledger=SimpleNamespace(first_event_position=64), read_rule=None)


def canary(fraction: float = 1.0) -> Canary:
    table: Any = SimpleNamespace(shadows={})
    return Canary(fraction, table, max_model_len=2**20)


def request(name: str, num_tokens: int = 4, **params: Any) -> Request:
    params = {"max_tokens": 8, **params}
    return Request(name, [7] * num_tokens, SamplingParams(**params), None)


def answer(watcher: Canary, name: str, num_tokens: int = 4) -> None:
    """Has a request answered with one token."""
    one = request(name, num_tokens)
    watcher.watch(one)
    one.append_output_token_ids(5)
    logprobs = LogprobsLists(np.array([[5, 6]]), np.array([[-1.0, -0.5]]), np.array([2]))
    output = EngineCoreOutput(request_id=name, new_token_ids=[5], new_logprobs=logprobs)
    watcher.end(one, COMPRESSED)
    watcher.collect({0: EngineCoreOutputs(outputs=[output])})
    assert output.new_logprobs is None


def sampled(fraction: float) -> set[str]:
    watcher, names = canary(fraction), set()
    for number in range(4000):
        one = request(f"cmpl-{number}")
        watcher.watch(one)
        names |= {one.request_id} if one.sampling_params.logprobs else set()
    return names


def test_the_fraction_of_requests_is_sampled_by_their_ids() -> None:
    """A larger fraction samples the same ones and more."""
    tenth, quarter = sampled(0.1), sampled(0.25)
    assert 320 < len(tenth) < 480
    assert 880 < len(quarter) < 1120
    assert tenth < quarter
    assert tenth == sampled(0.1)


def test_requests_whose_logits_are_chosen_or_masked_are_left_out() -> None:
    """So that what their clients get stays as it is."""
    params = SamplingParams(max_tokens=8, logprob_token_ids=[3, 4])
    chosen, streamed = Request("c", [7], params, None), request("s")
    streamed.resumable = True
    watcher = canary()
    for each in (chosen, streamed):
        before = each.sampling_params
        watcher.watch(each)
        assert each.sampling_params is before


def test_the_clients_own_parameters_are_not_changed() -> None:
    params = SamplingParams(max_tokens=8)
    one = Request("r", [7], params, None)
    canary().watch(one)
    assert params.logprobs is None
    assert one.sampling_params.logprobs == 1


def test_what_waits_is_bounded_and_what_is_dropped_is_counted() -> None:
    """The oldest answers stay, and go first; one that cannot fit is dropped once nothing runs."""
    watcher, size = canary(), MAX_PENDING_TOKENS // 2 - 1
    for name in ("first", "second", "third"):
        answer(watcher, name, size)
    assert watcher.stats.shadow_outcomes == {"dropped": 1}
    assert watcher.next_shadow(room_tokens=100, is_idle=False) is None
    shadow = watcher.next_shadow(room_tokens=2**20, is_idle=False)
    assert shadow is not None
    assert shadow.num_prompt_tokens == size + 1
    assert watcher.next_shadow(room_tokens=2**20, is_idle=True) is None  # one at a time
    watcher.take_back()
    assert watcher.next_shadow(room_tokens=100, is_idle=True) is None
    assert watcher.stats.shadow_outcomes == {"dropped": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "none"}, "nothing is compressed, so every answer has the full cache; give a"),
        ({"policy": "snapkv", "budget": 1.0}, "nothing is compressed"),
        ({"policy": "none", "read": "longcache:prefill=512"}, "leave out shadow, or prefill"),
        ({"policy": "snapkv", "shadow": 1.5}, r"shadow \(--kv-shadow\).*less than or equal to 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.from_dict({"shadow": 0.1, **settings})


def test_processed_log_probabilities_are_refused(llama: str) -> None:
    """They are another thing for sampled tokens than for those of a prompt."""
    from tests.engine.test_refusals import engine_config

    settings = {"policy": "snapkv", "shadow": 0.1}
    check_engine(engine_config(llama, settings))
    config = engine_config(llama, settings, logprobs_mode="processed_logprobs")
    with pytest.raises(UnsupportedError, match="expected --logprobs-mode raw_logprobs, found pro"):
        check_engine(config)
