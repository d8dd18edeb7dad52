"""Prompt chunks that read a part of the pages: dense attention over the pages each chooses,
whatever else is served, and whatever the prefix cache has."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.engine.conftest import Run, check_as_alone, each_alone, request
from tests.engine.oracle import BLOCK, ChunksDecoder, PagesDecoder, follow, kept_positions
from tests.tiny_models import prompt

LAYERS, HEADS = 3, 2
CLEAR = 1e-5  # the least difference of scores that rounding does not turn around
CHUNK = 128
READ = "longcache:global=32,local=64,span=32,top=2,prefill=128,score=mean"
HOW = {"number": 5, "always": (1, 2), "chunk": CHUNK, "num_read_fully": CHUNK}
LONG = prompt(500, seed=21)
BRANCH = [*LONG[:300], *prompt(150, seed=4)]
OTHER = prompt(385, seed=5)  # the last chunk is one token
SHORT = prompt(90, seed=3)
SETTINGS = {"policy": "none", "read": READ}
CHECKED = {"KVCOMPRESS_CHECK": "1"}


def decoder(model: str, tokens: list[int], kept: list | None = None) -> ChunksDecoder:
    num_full = len(tokens) // BLOCK * BLOCK
    kept = kept or [[list(range(num_full))] * HEADS] * LAYERS
    return ChunksDecoder(model, tokens, kept, num_full, **HOW)


def check(
    decoder: ChunksDecoder, output: dict[str, Any], events: dict[int, list] | None = None
) -> None:
    """Follows the output, and asserts that no choice of pages depends on rounding."""
    follow(decoder, output, events)
    assert min(decoder.closest, decoder.closest_in_chunks) > CLEAR


@pytest.fixture(scope="module")
def crowded(no_padding: str, run_engine: Run) -> dict[str, Any]:
    """Report of steps with room for one chunk and a few decoding requests."""
    first = [
        request("short", SHORT, 40),
        request("long", LONG, 12, at_step=2, prompt_logprobs=0),
        request("other", OTHER, 12, at_step=3),
    ]
    later = [
        request("again", LONG, 12),
        request("branch", BRANCH, 12, at_step=1),
        request("turn", prompt(30, seed=8), 12, follows="long"),
        request("other again", OTHER, 12, at_step=2),
    ]
    return run_engine(
        no_padding,
        [first, later],
        settings=SETTINGS,
        environment=CHECKED,
        max_num_batched_tokens=160,
        max_num_seqs=8,
    )


@pytest.fixture(scope="module")
def together(no_padding: str, run_engine: Run) -> dict[str, Any]:
    """Report of steps with chunks of several requests, some with a common prefix; steps
    are scheduled ahead."""
    names = {"long": LONG, "twin": LONG, "branch": BRANCH, "other": OTHER, "short": SHORT}
    return run_engine(
        no_padding,
        [[request(name, tokens, 12) for name, tokens in names.items()]],
        settings=SETTINGS,
        environment=CHECKED,
        asynchronous=True,
        max_num_seqs=8,
    )


@pytest.mark.parametrize(
    ("name", "cached"),
    [
        *(("short", 0), ("long", 0), ("other", 0), ("again", 384), ("branch", 256)),
        *(("turn", 384), ("other again", 384)),
    ],
)
def test_chunks_read_the_pages_with_the_highest_mean_for_any_query(
    no_padding: str, crowded: dict[str, Any], name: str, cached: int
) -> None:
    """Full chunks are shared; shorter ones and generated tokens are not."""
    tokens, output = crowded["prompts"][name], crowded["outputs"][name]
    check(decoder(no_padding, tokens), output)
    assert output["cached"] == cached


@pytest.mark.parametrize("name", ["long", "twin", "branch", "other", "short"])
def test_batched_chunks_read_the_pages_that_they_read_alone(
    no_padding: str, together: dict[str, Any], name: str
) -> None:
    """Some choose among pages that another request fills in the same step."""
    check(decoder(no_padding, together["prompts"][name]), together["outputs"][name])


def test_requests_of_one_step_share_full_chunks(together: dict[str, Any]) -> None:
    cached = {name: output["cached"] for name, output in together["outputs"].items()}
    assert (cached["twin"], cached["branch"]) == (CHUNK, 2 * CHUNK)


def test_prompt_logprobs_match_the_oracle_at_every_token(
    no_padding: str, crowded: dict[str, Any]
) -> None:
    """Seven pages of 8, 12 and 16 are read."""
    oracle = decoder(no_padding, LONG)
    assert oracle.chunk_pages == {256: (7, 8), 384: (7, 12), 500: (7, 16)}
    expected = torch.log_softmax(oracle.prompt_logits, -1)
    said = crowded["outputs"]["long"]["prompt_logprobs"]
    for place in range(1, len(LONG)):
        token = LONG[place]
        assert abs(float(expected[place - 1, token]) - said[place][str(token)]) < 2e-3, place


def test_check_fails_against_an_oracle_that_reads_whole_prompts(
    no_padding: str, crowded: dict[str, Any]
) -> None:
    """Whole prompts have other logprobs, so the check can tell."""
    everything = [[list(range(len(LONG) // BLOCK * BLOCK))] * HEADS] * LAYERS
    how = {name: HOW[name] for name in ("number", "always")}
    full_reader = PagesDecoder(no_padding, LONG, everything, len(LONG) // BLOCK * BLOCK, **how)
    with pytest.raises(AssertionError):
        follow(full_reader, crowded["outputs"]["long"])


def test_prompt_read_in_part_can_be_compressed_at_its_end(no_padding: str, run_engine: Run) -> None:
    settings = {**SETTINGS, "policy": "adakv", "budget": 0.5}
    report = run_engine(
        no_padding, [[request("a", LONG, 12)]], settings=settings, record_kept=True, max_num_seqs=8
    )
    check(decoder(no_padding, LONG, kept_positions(report["kept"], LAYERS)), report["outputs"]["a"])


@pytest.mark.parametrize("trigger", ["decode:20", "pressure:0.38"])
def test_prompt_read_in_part_can_be_compressed_while_decoding(
    no_padding: str, run_engine: Run, trigger: str
) -> None:
    """With triggers that fire only behind the prompt: one event, within the answer."""
    report = run_engine(
        no_padding,
        [[request("a", LONG, 36)]],
        settings={**SETTINGS, "policy": "adakv", "budget": 0.5, "trigger": trigger},
        record_kept=True,
        max_num_seqs=8,
        max_model_len=640,
        num_gpu_blocks_override=44,
    )
    (event,) = report["events"]
    assert event["trigger"] == trigger.partition(":")[0]
    end = report["kept"][0]["source"][0] + report["kept"][0]["tail"]
    assert len(LONG) < end < len(LONG) + 30
    kept = kept_positions(report["kept"], LAYERS)
    check(decoder(no_padding, LONG), report["outputs"]["a"], {end: kept})


def test_request_preempted_in_prefill_has_the_output_that_it_has_alone(
    no_padding: str, run_engine: Run
) -> None:
    """Other requests' answers outgrow the pool while the prompt is read."""
    answers = [request(f"r{i}", prompt(60, seed=i), 80) for i in range(3)]
    long = request("long", prompt(1500, seed=30), 12, at_step=4)
    report = run_engine(
        no_padding,
        [[*answers, long], *each_alone([long])],
        settings={**SETTINGS, "read": READ.replace("prefill=128", "prefill=32")},
        environment=CHECKED,
        max_num_batched_tokens=39,
        max_num_seqs=8,
        max_model_len=1600,
        num_gpu_blocks_override=57,
    )
    held = [blocks.get("long", 0) for blocks in report["held"]]
    lost = next(before for before, now in pairwise(held) if before and not now)
    assert 40 < lost < len(report["prompts"]["long"]) // BLOCK
    assert report["preemptions"] == 1
    check_as_alone(report["outputs"], ["long"])
