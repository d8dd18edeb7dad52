"""The most that a request holds, on the real engine: prompt and answer, whatever the triggers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Run, alone, check_as_alone, request
from tests.tiny_models import prompt
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.config.texts import start_lines
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.base import PageShape
from vllm_kvcompress.vllm_plugin.request_options import RequestCheck

BLOCK, CEILING = 32, 170
BLOCKS = CEILING // BLOCK
GENERATED = 220  # tokens
CHECKED = {"KVCOMPRESS_CHECK": "1"}  # every step, in the scheduler and in the workers
SIZES = {"short": 20, "middle": 150, "long": 700, "blocks": 320}
REQUESTS = [
    request(name, prompt(size, seed=size), GENERATED, at_step=5 * i)
    for i, (name, size) in enumerate(SIZES.items())
]
SERVERS: dict[str, dict[str, Any]] = {
    "alone": {"policy": "adakv"},
    "in any order": {"policy": "keydiff", "asynchronous": True},
    "a fraction": {"policy": "snapkv", "budget": 0.6, "trigger": "prompt"},
    "every few tokens": {"policy": "h2o", "budget": 0.3, "trigger": "chunk:96,decode:24"},
    "pressure": {"policy": "spans", "budget": 0.5, "trigger": "pressure:0.6"},
    "reading": {"policy": "adakv", "read": "quest:0.5", "read_min_tokens": 40},
    "merging": {"policy": "kvmerger", "ceiling": 256},
    "correcting": {"policy": "momentkv", "ceiling": 512, "asynchronous": True},
}


def fresh(report: dict[str, Any]) -> int:
    """Counts the events that wrote to fresh blocks."""
    return sum(event["blocks_written"] > 0 for event in report["events"])


@pytest.mark.parametrize("name", SERVERS)
def test_no_request_holds_more_than_its_ceiling(llama: str, run_engine: Run, name: str) -> None:
    """Blocks are counted after every step; beside them, what an event replaces for a step or two.

    Together, and preempted in a small pool, requests have the outputs that they have alone.
    """
    apart = ("short", "long")
    settings = {"ceiling": CEILING, **SERVERS[name]}
    asynchronous = settings.pop("asynchronous", False)
    most = settings["ceiling"] // BLOCK
    report = run_engine(
        llama,
        [REQUESTS, *([alone(one)] for one in REQUESTS if one["id"] in apart)],
        settings=settings,
        environment=CHECKED,
        asynchronous=asynchronous,
        num_gpu_blocks_override=60 if most < 16 else 90,
        max_model_len=2048,
    )
    counts = [count for held in report["held"] for count in held.values()]
    if "pressure" not in name:  # which has blocks for last queries beside
        assert max(counts) <= 2 * most + 1
        during_events = sum(count > most + 1 for count in counts)
        assert during_events <= (2 + asynchronous) * fresh(report)  # one more at a prompt's end
        assert report["most_held_tokens"] <= settings["ceiling"]
    assert {"ceiling"} <= {event["trigger"] for event in report["events"]}
    assert all(len(output["tokens"]) == GENERATED for output in report["outputs"].values())
    if name not in ("pressure", "reading"):
        check_as_alone(report["outputs"], apart)
    assert report["free_at_end"] == report["num_blocks"] - 1


def test_what_stays_below_the_ceiling_is_stock_vllms(llama: str, run_engine: Run) -> None:
    """With nothing else said, only what exceeds the ceiling is compressed, and not before."""
    below = [request("below", prompt(100, seed=1), 60), request("longer", prompt(100, seed=2), 71)]
    stock = run_engine(llama, [below])
    ours = run_engine(llama, [below], settings={"policy": "adakv", "ceiling": CEILING})
    assert len(ours["events"]) == 1  # 100 and 71 tokens, of which the last one is not held
    assert ours["events"][0]["source_tokens"] == BLOCKS * BLOCK
    for name, size in (("below", 60), ("longer", BLOCKS * BLOCK - 99)):
        expected = stock["outputs"][name]["tokens"][:size]
        assert ours["outputs"][name]["tokens"][:size] == expected


def test_a_pool_smaller_than_the_longest_request_serves_it(llama: str, run_engine: Run) -> None:
    """Stock vLLM does not start with it. Preempted requests come to the same outputs."""
    requests = [request(f"r{i}", prompt(1400 - 300 * i, seed=i), 200) for i in range(4)]
    settings = {"policy": "adakv", "ceiling": CEILING}
    tight = {"num_gpu_blocks_override": 2 * BLOCKS + 2, "max_model_len": 2048}
    small = run_engine(llama, [requests], settings=settings, environment=CHECKED, **tight)
    roomy = run_engine(llama, [requests], settings=settings, num_gpu_blocks_override=200)
    for name, output in roomy["outputs"].items():
        assert small["outputs"][name]["tokens"] == output["tokens"], name
    assert small["max_concurrency"] >= 1
    assert roomy["max_concurrency"] == pytest.approx(200 / (BLOCKS + 1))  # vLLM rounds blocks up


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["adakv", "pyramidkv"])
def test_answers_under_a_ceiling_are_not_preempted(
    llama: str, run_engine: Run, policy: str, asynchronous: bool
) -> None:
    """All are full at the same step; `pyramidkv` takes fresh blocks for every event.

    The pool has the ceilings of five requests and an event's fresh blocks. More run where answers
    are short.
    """
    long = [request(f"long {i}", prompt(60, seed=i), 250) for i in range(8)]
    short = [request(f"short {i}", prompt(20, seed=i), 30) for i in range(12)]
    report = run_engine(
        llama,
        [long, short, [alone(long[-1])]],
        settings={"policy": policy, "ceiling": CEILING},
        environment=CHECKED,
        asynchronous=asynchronous,
        num_gpu_blocks_override=5 * BLOCKS + BLOCKS,
        max_model_len=320,
        max_num_seqs=16,
    )
    assert report["preemptions"] == 0
    assert report["most_held_tokens"] <= CEILING
    running = [set(held) for held in report["held"]]
    assert max(sum("long" in name for name in names) for names in running) == 5
    assert max(sum("short" in name for name in names) for names in running) > 8
    check_as_alone(report["outputs"], ["long 7"])  # it has waited


def test_two_ranks_hold_as_much_as_one(llama: str, run_engine: Run) -> None:
    """Tensor parallel: every rank has the events of the ceiling, and waits for the same blocks."""
    requests = [request(f"r{i}", prompt(60 + 90 * i, seed=i), 150) for i in range(6)]
    shared: dict[str, Any] = {
        "settings": {"policy": "snapkv", "ceiling": CEILING},
        "num_gpu_blocks_override": 4 * BLOCKS,
        "max_model_len": 2048,
    }
    one = run_engine(llama, [requests], environment=CHECKED, **shared)
    two = run_engine(
        llama,
        [requests],
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1", **CHECKED},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **shared,
    )
    for one_request in requests:
        name = one_request["id"]
        assert two["outputs"][name]["tokens"] == one["outputs"][name]["tokens"], name
    assert two["held"] == one["held"]
    assert two["events"] == one["events"]
    assert (two["preemptions"], two["free_at_end"]) == (0, two["num_blocks"] - 1)
    assert two["most_held_tokens"] == one["most_held_tokens"] <= CEILING


def test_drafts_end_before_an_event(llama: str, run_engine: Run) -> None:
    """Speculative decoding leaves the outputs as they are."""
    settings = {"policy": "adakv", "ceiling": CEILING}
    tokens = prompt(40, seed=1) * 3
    outputs = []
    for more in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}):
        report = run_engine(
            llama,
            [[request("a", tokens, 200)]],
            settings=settings,
            environment=CHECKED,
            **more,
        )
        assert report["most_held_tokens"] <= CEILING
        outputs.append(report["outputs"]["a"]["tokens"])
    assert outputs[0] == outputs[1]


def test_contexts_and_conversations_go_on_under_a_ceiling(llama: str, run_engine: Run) -> None:
    """Branches begin with a state that is as large as the ceiling allows."""
    settings = {
        "policy": "keydiff",
        "ceiling": CEILING,
        "reuse_conversations": "reuse",
        "reuse_contexts": True,
    }
    context = prompt(400, seed=9)
    named = {"kv_context_tokens": 400}
    first = [
        request("first", prompt(256, seed=1), 100),
        request("about", context + prompt(30, seed=2), 20, xargs=named),
    ]
    second = [
        *(request(f"b{i}", prompt(28 + 90 * i, seed=5), 150, follows="first") for i in range(3)),
        *(request(f"c{i}", context + prompt(9 + 70 * i, seed=i), 150, xargs=named) for i in (3, 4)),
    ]
    phases = [first, second, [alone(one) for one in second]]
    report = run_engine(llama, phases, settings=settings, environment=CHECKED)
    assert report["conversations_continued"] >= 3
    assert report["contexts_reused"] == 2
    assert report["most_held_tokens"] <= CEILING
    check_as_alone(report["outputs"], [one["id"] for one in second if one["id"][0] == "c"])


def test_requests_choose_a_smaller_ceiling(llama: str, run_engine: Run) -> None:
    """Each has the output of a server with that ceiling."""
    settings = {"policy": "adakv", "ceiling": 256, "min_request_ceiling": 96}
    chosen = {"own": None, "less": 100, "least": 96}
    requests = [
        request(name, prompt(300, seed=1), 100, xargs=ceiling and {"kv_ceiling": ceiling})
        for name, ceiling in chosen.items()
    ]
    together = run_engine(llama, [requests], settings=settings, environment=CHECKED)
    for name, ceiling in chosen.items():
        own = {"policy": "adakv", "ceiling": ceiling or 256}
        expected = run_engine(llama, [[request(name, prompt(300, seed=1), 100)]], settings=own)
        assert together["outputs"][name]["tokens"] == expected["outputs"][name]["tokens"], name
        assert expected["most_held_tokens"] <= (ceiling or 256)


def check(asked: float, **settings: Any) -> None:
    """Checks a request at admission, as vLLM has it do."""
    server = Settings.from_dict({"policy": "adakv", **settings})
    checking = type("Checking", (RequestCheck,), {"settings": server})
    checking.validate_params(SamplingParams(extra_args={"kv_ceiling": asked}))


def test_a_request_gets_the_limit_with_its_refusal() -> None:
    limits = {"ceiling": 1024, "min_request_ceiling": 256}
    check(256, **limits)
    check(1024.0, **limits)
    for wrong in (1025, 255):
        with pytest.raises(ConfigError, match=r"kv_ceiling .*: this server allows 256 to 1024"):
            check(wrong, **limits)
    check(1024, ceiling=1024)
    with pytest.raises(ConfigError, match="allows 1024 to 1024"):
        check(2048, ceiling=1024)
    with pytest.raises(ConfigError, match="lets no request choose"):
        check(512)
    with pytest.raises(ConfigError, match="kv_ceiling"):
        check(0.5, **limits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ceiling": 0.25}, r"ceiling \(--kv-ceiling\) should be a valid integer, found 0.25"),
        ({"ceiling": 512, "policy": "none"}, "policy none holds all"),
        ({"ceiling": 512, "request_policies": ["none"]}, "policy none holds all"),
        ({"min_request_ceiling": 512}, "expected a ceiling"),
        ({"ceiling": 256, "min_request_ceiling": 512}, "expected a ceiling of at least"),
    ],
)
def test_ceilings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.from_dict({"policy": "adakv", **settings})


@pytest.mark.parametrize("policy", ["snapkv", "streamingllm", "keydiff", "momentkv", "kvmerger"])
@pytest.mark.parametrize("block_size", [16, 32])
def test_the_smallest_ceiling_that_works_is_named(policy: str, block_size: int) -> None:
    """What is named works, and a block less does not."""
    pipeline = resolve(policy)
    shape = PageShape(2, 64, block_size, 2 * block_size * 64 * 2)
    with pytest.raises(ConfigError, match="give at least") as refused:
        pipeline.check_ceiling(1, shape)
    (smallest,) = re.findall(r"give at least (\d+)\.", str(refused.value))
    pipeline.check_ceiling(int(smallest), shape)
    with pytest.raises(ConfigError, match=f"give at least {smallest}"):
        pipeline.check_ceiling(int(smallest) - 1, shape)
    protected = pipeline.protection.num_sinks + pipeline.protection.num_recent
    assert int(smallest) >= protected + block_size


def test_auto_takes_the_policy_for_tokens_and_leaves_prompts_whole() -> None:
    settings = Settings.from_dict({"policy": "auto", "ceiling": 1024})
    assert (settings.policy, settings.budget) == ("spans+headkv", 1.0)
    assert Settings.from_dict(settings.to_dict()) == settings
    assert "never more than 1024 tokens per KV head" in start_lines(settings)[0]
    with_budget = Settings.from_dict({"policy": "auto", "ceiling": 1024, "budget": 0.5})
    assert with_budget.policy == "spans+headkv"
    assert with_budget.budget == 0.5
    assert Settings.from_dict({"policy": "auto", "ceiling": 9, "trigger": "prompt"}).budget == 0.5
