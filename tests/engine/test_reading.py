"""Decode steps that read a part of the held pages: dense attention over the chosen ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engine.conftest import Run, request
from tests.engine.oracle import BLOCK, PagesDecoder, follow, kept_positions
from tests.tiny_models import prompt
from vllm_kvcompress.attention.reading import SparseRead

LAYERS, HEADS = 3, 2
CLEAR = 1e-5  # the least difference of scores that rounding does not turn around
LONG = prompt(500, seed=21)


def everything(tokens: list[int]) -> list[list[list[int]]]:
    """Returns the kept tokens of an uncompressed request: all of its full blocks."""
    return [[list(range(len(tokens) // BLOCK * BLOCK))] * HEADS] * LAYERS


def check_reading(decoder: PagesDecoder, output: dict[str, Any]) -> None:
    """Follows the output, and asserts that no choice of pages depends on rounding."""
    follow(decoder, output)
    assert decoder.closest > CLEAR


def decoder(no_padding: str, tokens: list[int], kept: list, **how: Any) -> PagesDecoder:
    return PagesDecoder(no_padding, tokens, kept, len(tokens) // BLOCK * BLOCK, **how)


def compiled(report: dict[str, Any]) -> None:
    """Reports how often page choice was compiled, before every choice."""
    choose = SparseRead.choose

    def noting(*args: Any) -> Any:
        # One that an earlier process compiled is found without what it calls.
        from vllm_kvcompress.kernels.page_choice_numba import _choose

        report.setdefault("compiled", []).append(len(_choose.signatures))
        return choose(*args)

    SparseRead.choose = noting


@pytest.fixture(scope="module")
def report(no_padding: str, run_engine: Run) -> dict[str, Any]:
    """Report of uncompressed requests that read a quarter, longer and shorter ones.

    Beside them those that ask for a half, or for everything.
    """
    half, all_of_it = {"kv_read": 0.5}, {"kv_read": 1}
    batch = [
        request("long", LONG, 24),
        request("middle", prompt(321, seed=12), 40, at_step=1),
        request("short", prompt(60, seed=3), 40, at_step=2),
        request("half", prompt(321, seed=12), 16, at_step=3, xargs=half),
        request("all", prompt(290, seed=10), 16, at_step=4, xargs=all_of_it),
        request("late", prompt(290, seed=10), 20, at_step=12),
    ]
    turn = [request("turn", prompt(30, seed=8), 12, follows="middle", xargs=all_of_it)]
    again = [request("hit", [*LONG, *prompt(30, seed=1)], 20)]
    read = "quest:0.25,score=mean,global=0,local=0"  # the last page alone is always read
    settings = {"policy": "none", "read": read, "min_request_read": 0.2}
    return run_engine(
        no_padding,
        [batch, turn, again],
        settings=settings,
        max_num_batched_tokens=192,
        probes=["tests.engine.test_reading:compiled"],
    )


@pytest.mark.parametrize("name", ["long", "middle", "short", "half", "all", "late", "turn", "hit"])
def test_uncompressed_requests_read_the_pages_with_the_highest_mean(
    no_padding: str, report: dict[str, Any], name: str
) -> None:
    """Beside prefill, in chunks, and behind a prefix-cache hit."""
    tokens = report["prompts"][name]
    part = {"half": 0.5, "all": 1.0, "turn": 1.0}.get(name, 0.25)
    check_reading(
        decoder(no_padding, tokens, everything(tokens), part=part), report["outputs"][name]
    )


def test_page_choice_is_compiled_before_the_first_request(report: dict[str, Any]) -> None:
    """The first choice finds as much compiled as the last one, unless torch chooses."""
    from vllm_kvcompress.kernels.page_choice_numba import MAX_THREADS

    if torch.get_num_threads() > MAX_THREADS:
        pytest.skip("with so many threads pages are chosen in torch, which compiles nothing")
    assert 1 == report["compiled"][0] == report["compiled"][-1]


def test_longcache_reads_the_first_the_last_and_the_best_spans(
    no_padding: str, run_engine: Run
) -> None:
    tokens = prompt(400, seed=0)
    read = "longcache:global=32,local=96,span=32,top=2"
    report = run_engine(
        no_padding, [[request("a", tokens, 20)]], settings={"policy": "none", "read": read}
    )
    kept, how = everything(tokens), {"number": 6, "always": (1, 3), "score": "bounds"}
    check_reading(decoder(no_padding, tokens, kept, **how), report["outputs"]["a"])
    held = [math.ceil((400 + step) / BLOCK) for step in range(1, 20)]  # the prefill gives one
    assert [pages for pages in report["pages"] if pages[1]] == [[6, number] for number in held]


def test_pages_read_and_held_are_counted(report: dict[str, Any]) -> None:
    """In the last step, the longest request alone."""
    read, held = [pages for pages in report["pages"] if pages[1]][-1]
    assert (read, held) == (5, 18)


def test_reading_in_part_leaves_prefix_hits_as_they_are(report: dict[str, Any]) -> None:
    assert report["outputs"]["hit"]["cached"] == 500 // BLOCK * BLOCK


def test_tokens_generated_with_a_partial_read_are_not_shared(report: dict[str, Any]) -> None:
    """A turn that reads all pages hits the prompt, and not the answer that read a part."""
    assert len(report["prompts"]["turn"]) == 321 + 40 + 30
    assert report["outputs"]["turn"]["cached"] == 321 // BLOCK * BLOCK


def test_check_fails_against_an_oracle_that_reads_all_pages(
    no_padding: str, report: dict[str, Any]
) -> None:
    """Attention over all pages has other logprobs, so the check can tell."""
    tokens = report["prompts"]["long"]
    with pytest.raises(AssertionError):
        follow(decoder(no_padding, tokens, everything(tokens), part=1.0), report["outputs"]["long"])


@pytest.mark.parametrize("bounds", ["exact", "int8"])
def test_compressed_requests_read_a_part_of_their_kept_tokens(
    no_padding: str, run_engine: Run, bounds: str
) -> None:
    tokens, read = prompt(640, seed=2), f"quest:0.5,bounds={bounds}"
    report = run_engine(
        no_padding,
        [[request("a", tokens, 34)]],
        settings={"policy": "adakv", "budget": 0.5, "read": read},
        record_kept=True,
    )
    kept = kept_positions(report["kept"], LAYERS)
    how = {"score": "bounds" if bounds == "exact" else bounds, "always": (1, 2)}
    check_reading(decoder(no_padding, tokens, kept, part=0.5, **how), report["outputs"]["a"])


def test_reading_all_pages_gives_stock_outputs(no_padding: str, run_engine: Run) -> None:
    batch = [[request("a", prompt(500, seed=6), 24), request("b", prompt(90, seed=7), 24)]]
    stock = run_engine(no_padding, batch)
    for read in ("quest:1.0", "quest:4096", "longcache:prefill=64"):
        report = run_engine(no_padding, batch, settings={"policy": "none", "read": read})
        assert report["outputs"] == stock["outputs"], read


def test_reading_survives_decode_events_and_preemptions(no_padding: str, run_engine: Run) -> None:
    """Requests read in part before they are compressed, in a pool too small for all of them;
    the debug mode says whom every page belongs to."""
    batch = [request(f"r{i}", prompt(300, seed=i), 150, at_step=2 * i) for i in range(4)]
    settings = {"policy": "snapkv", "budget": 0.5, "trigger": "decode:64", "read": "quest:0.5"}
    options = {"settings": settings, "max_model_len": 512, "environment": {"KVCOMPRESS_CHECK": "1"}}
    crowded = run_engine(no_padding, [batch], num_gpu_blocks_override=40, **options)
    roomy = run_engine(no_padding, [batch], **options)
    assert crowded["preemptions"] > 0 == roomy["preemptions"]
    assert len(crowded["events"]) >= 4
    assert crowded["free_at_end"] == crowded["num_blocks"] - 1
    assert all(len(output["tokens"]) == 150 for output in crowded["outputs"].values())
