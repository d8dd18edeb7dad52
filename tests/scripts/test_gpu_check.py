"""scripts/gpu_check.py, as far as it goes without a GPU."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu_parts.batched import WAYS, PromptsEnd, blocks_of, launches
from gpu_parts.flash import attention_of_requests, attention_per_head
from gpu_parts.measure import fill_caches_with
from gpu_parts.reading import chosen, means_of
from gpu_parts.report import (
    add_results,
    as_markdown,
    engine_passed,
    file_name,
    raggedness,
    result_files,
    table,
    with_earlier,
    write_results,
)
from gpu_parts.shapes import NUM_HEADS, blockwise, ragged_lengths
from gpu_parts.whole_events import (
    REQUEST,
    Cache,
    Model,
    WholeEvent,
    every_policy,
    make_pipeline,
)
from vllm_kvcompress.kernels.attention import decode_attention, prefill_attention
from vllm_kvcompress.kernels.common.paged_entries import PagedEntries
from vllm_kvcompress.policies import all_policies

TESTS = next(folder for folder in Path(__file__).parents if folder.name == "tests")
ROOT = TESTS.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"
CHECKS = {"kernels": [{"kernel": "x", "block_size": 16, "error": 0.0, "passed": True}]}


def results(**more: Any) -> dict[str, Any]:
    return {
        "device": "NVIDIA H200",
        "versions": {"torch": "2.13", "triton": "3.9"},
        "quick": False,
        "block_size": 16,
        "sources": "0123456789ab",
        "checks": {**CHECKS, "pytest": "12 passed in 3s"},
        **more,
    }


DECODE = {
    "batch": 8,
    "kept": 0.25,
    "layout": "ragged",
    "option": "lse",
    "seconds": 6e-5,
    "host_seconds": 8.2e-5,
    "bytes_per_second": 4.1e12,
    "of_read_bandwidth": 0.913,
    "vllm_seconds": None,
    "full_cache": {"paged": 3.9, "torch": 4.2},
}
PREFILL = {
    "chunk": 2048,
    "layout": "ragged",
    "kernel": "paged",
    "seconds": 1e-3,
    "flops_per_second": 4.56e14,
}
EVENT = {
    "prompt": 32768,
    "prefill_seconds": 1.5,
    "seconds": {"window_mass": 0.012, "compaction": 0.003},
    "policies": [
        {"policy": "adakv", "seconds": 0.0204, "host_seconds": 0.031, "of_prefill": 0.0136}
    ],
    "compaction_of_copy_bandwidth": 0.875,
}


def test_report_tables_hold_the_measured_numbers() -> None:
    text = as_markdown(
        results(read_bandwidth=4.5e12, decode=[DECODE], prefill=[PREFILL], events=[EVENT])
    )
    assert "1 of 1 checks passed. pytest: 12 passed in 3s." in text
    assert "| read | 4.50 |" in text
    assert "| 8 | 25.0% | ragged | lse | 60.0 | 82 | 4.10 | 91.3% | 3.90 | 4.20 |" in text
    assert "| 2048 | ragged | this package's | 1000.0 | 456 |" in text
    assert "| policy | 32768: GPU | 32768: host | 32768: of prefill |" in text
    assert "| adakv | 20.4 | 31.0 | 1.4% |" in text
    assert "| 32768 | 1.50 | 12.00 | 3.00 | 87.5% |" in text


WAY = {"seconds": 0.016, "host_seconds": 0.0323, "launches": 5120}
BATCHED = {
    "policy": "adakv",
    "requests": 16,
    "tokens": 512,
    "layers": 8,
    "alone": WAY,
    "at_once": {"seconds": 0.006, "host_seconds": 0.0081, "launches": 1280},
    "together": {"seconds": 0.004, "host_seconds": 0.0021, "launches": 330},
}
READING = {
    "batch": 8,
    "context": 32768,
    "part": 0.25,
    "choice_seconds": 2e-5,
    "choice_host_seconds": 3.1e-5,
    "part_seconds": 6e-5,
    "whole_seconds": 2e-4,
}


def test_batched_events_and_reading_have_tables() -> None:
    text = as_markdown(results(batched=[BATCHED], reading=[READING]))
    assert "## 16 events of 512 tokens in one step, 8 layers" in text
    assert "| adakv | 16.0 | 6.0 | 4.0 | 32.3 | 8.1 | 2.1 | 5120 | 1280 | 330 | 0.25x |" in text
    assert "| 8 | 32768 | 25.0% | 20.0 | 31 | 60.0 | 200.0 | 2.50x |" in text


def test_kernels_without_whole_events_have_a_table() -> None:
    text = as_markdown(results(events=[{**EVENT, "policies": []}]))
    assert "Whole events" not in text
    assert "| 32768 | 1.50 | 12.00 | 3.00 | 87.5% |" in text


def test_ragged_heads_are_compared_with_uniform_ones() -> None:
    uniform = {**DECODE, "layout": "uniform", "bytes_per_second": 4.51e12}
    assert raggedness([DECODE]) is None
    assert raggedness([DECODE, uniform]) == pytest.approx(0.1)
    text = as_markdown(results(decode=[DECODE, uniform]))
    assert "Ragged heads cost at most 10.0% more per byte than uniform ones." in text


def test_vllms_kernels_have_columns_where_they_were_measured() -> None:
    assert "vLLM" not in as_markdown(results(decode=[DECODE]))
    more = {"vllm_seconds": 1.5e-4, "flash_seconds": 1.2e-4}
    full = {"paged": 3.9, "flash": 2.81, "torch": 4.2}
    text = as_markdown(results(decode=[{**DECODE, **more, "full_cache": full}]))
    timed = "vLLM's Triton kernel, plain, µs | FlashAttention, plain, µs"
    assert f"| of read bandwidth | {timed} | times faster than a full cache, this" in text
    assert "| 91.3% | 150.0 | 120.0 | 3.90 | 2.81 | 4.20 |" in text


def test_parts_of_one_report_may_be_measured_one_by_one(tmp_path: Path) -> None:
    write_results(results(decode=[DECODE]), tmp_path)
    settings = {name: value for name, value in results().items() if name != "checks"}
    merged = with_earlier({**settings, "events": [EVENT]}, tmp_path)
    assert merged == results(decode=[DECODE], events=[EVENT])
    for other in ({"quick": True}, {"sources": "other"}, {"device": "NVIDIA H100"}):
        assert with_earlier({**settings, **other}, tmp_path) == {**settings, **other}


def test_failed_checks_are_named() -> None:
    failed = {"kernel": "window_mass", "block_size": 64, "error": 0.5, "passed": False}
    checks = {"kernels": [*CHECKS["kernels"], failed], "pytest": None}
    text = as_markdown(results(checks=checks))
    assert "1 of 2 checks passed" in text
    assert "| window_mass | 64 | 0.5 |" in text


def test_table_columns_of_numbers_are_right_aligned() -> None:
    assert table(("a", "b"), [("x", 1)]).splitlines()[1] == "| --- | ---: |"


def test_files_are_named_after_the_device(tmp_path: Path) -> None:
    numbers, text = write_results(results(), tmp_path / "new")
    assert (numbers, text) == result_files("NVIDIA H200", tmp_path / "new")
    assert (numbers.name, text.name) == ("gpu-nvidia-h200.json", "gpu-nvidia-h200.md")
    assert json.loads(numbers.read_text()) == results()
    assert text.read_text().startswith("# Measured on NVIDIA H200\n")


def test_files_have_plain_names() -> None:
    name = file_name("engine", "prompt,decode:64, pool of 4", "stock", suffix=".log")
    assert name == "engine-prompt-decode-64-pool-of-4-stock.log"


@pytest.mark.parametrize(
    ("command", "limit", "last"),
    [
        ("print('=== 3 passed ===')", 30, "3 passed"),
        ("print('1 failed'); exit(1)", 30, "error, exit status 1: 1 failed"),
        (
            "print('one', flush=True); import time; time.sleep(60)",
            2,
            "ended after 2 s; before: one",
        ),
    ],
)
def test_pytest_output_is_shown_at_once_and_logged(
    command: str, limit: float, last: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(SCRIPT))
    log = tmp_path / "new" / "pytest.log"
    said = script["stream"]([sys.executable, "-c", command], limit, log)
    assert said.endswith(last)
    assert script["passed"]({**CHECKS, "pytest": said}) is (said == last == "3 passed")
    assert log.read_text() == capfd.readouterr().out


def test_pytest_is_ended_before_the_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(SCRIPT))
    options = script["parse"]([])
    options.deadline = time.monotonic() + options.limit
    assert 0 < script["seconds_left"](options) < options.limit < 600


def test_options_and_their_defaults_are_parsed() -> None:
    parse = runpy.run_path(str(SCRIPT))["parse"]
    options = parse(["--quick", "--out", "elsewhere"])
    assert (options.quick, options.out) == (True, Path("elsewhere"))
    assert options.part == ("tests", "capture", "decode", "prefill", "events", "batched", "reading")
    assert parse(["--part", "tune", "tests"]).part == ["tune", "tests"]
    assert parse([]).out == SCRIPT.parents[1] / "docs" / "results"


@pytest.mark.parametrize(("said", "good"), [("9 passed", True), ("1 failed, 8 passed", False)])
def test_report_passes_only_if_pytest_and_kernels_passed(said: str, good: bool) -> None:
    passed = runpy.run_path(str(SCRIPT))["passed"]
    assert passed({**CHECKS, "pytest": said}) is good
    assert not passed({"kernels": [{"passed": False}], "pytest": None})


LOAD = {
    "taken_bytes": 500 * 2**20,
    "left_bytes": 0,
    "seconds": 2.0,
    "requests_per_second": 2.0,
    "tokens_per_second": 812.4,
    "first_token_seconds": 0.25,
    "token_seconds": 0.0125,
    "events": {},
    "lost_blocks": 0,
    "replies": [1, 2],
}
PATH = {"graphs": "FULL_AND_PIECEWISE", "observers": 0, "batched_tokens": None}
SERVED = {"start_seconds": 61.2, "compiled": 0, "path": PATH, "load": LOAD, "decode_only": []}
OURS = {
    **SERVED,
    "path": {**PATH, "batched_tokens": 16384},
    "load": {
        **LOAD,
        "events": {"prompt": 2},
        "taken_bytes": 680 * 2**20,
        "left_bytes": 200 * 2**20,
    },
    "decode_only": [
        {
            "length": 32768,
            "batch": 8,
            "steps": 128,
            "seconds": 0.01,
            "events_before": 8,
            "others": 0,
        }
    ],
}
RUN = {
    "model": "some/model",
    "settings": {"policy": "adakv", "budget": 0.25, "trigger": "prompt"},
    "requests": 4,
    "prompt": 4096,
    "output": 64,
    "pool": None,
    "checked": False,
    "long": 2,
    "short": 2,
    "engines": {
        "compressed": OURS,
        "stock": {**SERVED, "decode_only": [{**OURS["decode_only"][0], "seconds": 0.02}]},
        "piecewise": OURS,
    },
}


def test_engine_results_have_tables() -> None:
    text = as_markdown(results(engine={"prompt": RUN}))
    assert "events by prompt" in text
    assert "Passed." in text
    load = "| 61 | 2.00 | 812 | 250 | 12.5 | 2 prompt | 0 | 0 | 680 | 200 | 2 |"
    assert f"| compressed | FULL_AND_PIECEWISE {load}" in text
    assert "| tokens | requests | compressed | stock | piecewise |" in text
    assert "| 32768 | 8 | 10.00 | 20.00 | 10.00 | 0.50x | 0.50x |" in text


@pytest.mark.parametrize("name", ["compressed", "piecewise"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"load": {**OURS["load"], "events": {"prompt": 1}}},
        {"load": {**OURS["load"], "events": {"prompt": 3}}},
        {"load": {**OURS["load"], "lost_blocks": 3}},
        {"load": {**OURS["load"], "left_bytes": 100 * 2**20}},
        {"compiled": 2},
        {"path": {**OURS["path"], "observers": 1}},
        {"path": {**OURS["path"], "batched_tokens": 0}},
        {"decode_only": [{**OURS["decode_only"][0], "others": 1}]},
        {"refused": "RuntimeError: no"},
    ],
    ids=str,
)
def test_engine_fails_with_lost_blocks_missing_events_or_compilation(
    wrong: dict[str, Any], name: str
) -> None:
    engines = RUN["engines"]
    run = {**RUN, "engines": {**engines, name: {**engines[name], **wrong}}}
    assert engine_passed(RUN)
    assert not engine_passed(run)
    text = as_markdown(results(engine={"prompt": run}))
    assert "Failed." in text
    if "refused" in wrong:
        assert f"{name} ended: RuntimeError: no" in text


def test_stock_engine_with_events_fails() -> None:
    stock = {**SERVED, "load": {**LOAD, "events": {"prompt": 2}}}
    assert not engine_passed({**RUN, "engines": {**RUN["engines"], "stock": stock}})


@pytest.mark.parametrize(("decode", "passes"), [(2, True), (1, False)])
def test_engine_passes_only_with_events_of_every_trigger(decode: int, passes: bool) -> None:
    """Two requests of 160 tokens, long enough for a decode event behind 64."""
    load = {**OURS["load"], "events": {"prompt": 2, "decode": decode}}
    settings = {**RUN["settings"], "trigger": "prompt,decode:64"}
    run = {
        **RUN,
        "settings": settings,
        "output": 160,
        "engines": {"compressed": {**OURS, "load": load}},
    }
    assert engine_passed(run) is passes


def test_unfinished_run_has_a_report() -> None:
    unfinished = {name: OURS[name] for name in ("start_seconds", "load")}
    run = {**RUN, "engines": {"compressed": unfinished, "stock": {}}}
    assert not engine_passed(run)
    text = as_markdown(results(engine={"prompt": run}))
    assert "compressed has not ended." in text
    run["engines"] = {"compressed": OURS, "stock": unfinished}
    assert not engine_passed(run)
    assert "stock has not ended." in as_markdown(results(engine={"prompt": run}))
    assert "| compressed |  | 61 | 2.00 |" in text


def test_engines_are_merged_with_runs_of_the_same_requests() -> None:
    engines = RUN["engines"]
    merged = results(engine={"prompt": {**RUN, "engines": {"compressed": engines["compressed"]}}})
    more = {**RUN, "engines": {"stock": engines["stock"]}}
    add_results(merged, {"engine": {"prompt": more, "decode:64": more}})
    assert list(merged["engine"]["prompt"]["engines"]) == ["compressed", "stock"]
    assert list(merged["engine"]["decode:64"]["engines"]) == ["stock"]
    add_results(merged, {"engine": {"prompt": {**more, "requests": 5}}})
    assert list(merged["engine"]["prompt"]["engines"]) == ["stock"]


def test_cache_flush_writes_less_than_a_hundredth_of_what_it_reads() -> None:
    """Written lines stay in the cache until written back, which would disturb the timing."""
    other = torch.ones(1 << 12, dtype=torch.int32)
    with Writes() as writes:
        fill_caches_with(other)
    assert 0 < writes.num_bytes < other.nbytes // 100
    with Writes() as writes:
        other.zero_()
    assert writes.num_bytes == other.nbytes


class Writes(TorchDispatchMode):
    """Counts the bytes that operators write."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_bytes += sum(each.nbytes for each in tree_leaves(result))
        return result


def test_pytest_is_given_every_folder_with_tests_for_gpus() -> None:
    """pytest would run no test at all if one of its arguments had moved."""
    script = runpy.run_path(str(SCRIPT))
    marked = {path for path in TESTS.rglob("test_*.py") if "mark" + ".gpu" in path.read_text()}
    for path in marked - {Path(__file__)}:
        assert any(path.is_relative_to(ROOT / given) for given in script["GPU_TESTS"]), path
    assert all((ROOT / given).exists() for given in script["GPU_TESTS"])


def flash(**given: Any) -> None:
    """A stand-in for FlashAttention 3 that checks its arguments and computes in torch."""
    stand_in = pytest.importorskip("tests.gpu_path.flash_attention")
    names = ("scheduler_metadata", "q_descale", "k_descale", "v_descale")
    stand_in.varlen_attention(num_splits=0, fa_version=3, **dict.fromkeys(names), **given)


def entries_of(lengths: list[int]) -> PagedEntries:
    generator = torch.Generator().manual_seed(0)
    counts = -(-torch.tensor(lengths) // 16)
    pages = torch.randn(int(counts.sum()), 2 * 16 * 32, generator=generator).bfloat16()
    table = torch.zeros(len(lengths), int(counts.max()), dtype=torch.int32)
    held = torch.arange(table.shape[1]) < counts[:, None]
    table[held] = torch.randperm(len(pages), generator=generator).int()
    return PagedEntries(pages, table, torch.tensor(lengths).int(), 16, 32)


def test_flash_attention_per_head_equals_our_twin() -> None:
    entries = entries_of([45, 7, 130, 16])
    queries = torch.randn(4, 5, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for last in (1, 5):
        rows = queries[:, -last:].contiguous()
        actual = attention_per_head(flash, entries, rows, 0.2)()
        expected = prefill_attention(entries, rows.transpose(1, 2), 0.2)[0].transpose(1, 2)
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def test_flash_attention_of_requests_equals_our_twin() -> None:
    entries = blockwise(entries_of(6 * [75]), 3)
    queries = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    actual = attention_of_requests(flash, entries, queries, 0.2, 3)()
    expected = decode_attention(entries, queries, 0.2)[0]
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing to refuse")
def test_script_refuses_to_run_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "gpu_check needs an NVIDIA GPU that torch can use" in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_policy_is_measured() -> None:
    parts = {part for name in every_policy() for part in name.partition(":")[0].split("+")}
    assert {part.name for part in all_policies()} - {"window"} <= parts


@pytest.mark.parametrize("name", every_policy())
def test_measured_events_keep_a_quarter(name: str) -> None:
    """The events of a GPU over few small pages; repeating them gives the same."""
    model = Model(3, num_heads=2, group=2, head_size=16, hidden_size=64, dtype=torch.float32)
    event = WholeEvent(make_pipeline(name, model, 16), Cache(model, 512, 16, "cpu"))
    kept = []
    for _ in range(2):
        event.observe()
        for step in event.steps():
            step()
        tables = event.runner.tables
        kept.append(tables.counts[:, tables.slots[REQUEST]].clone())
        event.forget()
        assert not tables.slots
        assert not event.runner.windows.slots
    held = event.runner.pipeline.state_pages(16, event.cache.pool.page_shape)
    assert int(kept[0].sum()) == 3 * (8 * 2 - held)
    assert torch.equal(*kept)


@pytest.mark.parametrize("name", ["snapkv", "spans+headkv"])
def test_measured_step_of_events_keeps_a_quarter_of_each_request(name: str) -> None:
    """The step of a GPU over few small pages; batched, with fewer launches and equal results."""
    model = Model(3, num_heads=2, group=2, head_size=16, hidden_size=64, dtype=torch.float32)
    cache = Cache(model, blocks_of(4, 256, 16) * 16, 16, "cpu")
    step = PromptsEnd(make_pipeline(name, model, 16), cache, cache.pool, 4, 256)
    kept: list[torch.Tensor] = []
    forget = step.runner.tables.release

    def release(request_id: str) -> None:
        kept.append(step.runner.tables.counts[:, step.runner.tables.slots[request_id]].clone())
        forget(request_id)

    step.runner.tables.release = release  # type: ignore[method-assign]
    alone, layers, together = (launches(step, way) for way in WAYS)
    assert 2 * together < alone
    assert 2 * layers < alone
    held = step.runner.pipeline.state_pages(8, cache.pool.page_shape)
    assert [int(counts.sum()) for counts in kept] == 12 * [3 * (2 * 4 - held)]
    assert all(map(torch.equal, 2 * kept[:4], kept[4:]))


def test_pages_to_read_are_those_with_the_highest_means() -> None:
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(12, 2 * 16 * 32, generator=generator)
    table = torch.randperm(12, generator=generator).int().view(2, 6)
    entries = PagedEntries(pages, table, torch.full((2,), 96).int(), 16, 32)
    queries = torch.randn(2, 1, 32, generator=generator)
    read, lengths = chosen(entries, means_of(entries), queries, 3)
    assert lengths.tolist() == [48, 48]
    for row in range(2):
        keys = pages[table[row].long()].view(6, 16, 2, 32)[:, :, 0]
        products = keys @ queries[row, 0]
        highest = torch.maximum(products[:, :8].mean(1), products[:, 8:].mean(1))
        highest[-1] = torch.inf  # always read
        best = sorted(highest.topk(3).indices.tolist())
        assert read[row].tolist() == table[row][best].tolist()


def test_ragged_lengths_are_whole_pages_with_the_same_total() -> None:
    lengths = ragged_lengths(5, 8192, 32768, 16).view(5, NUM_HEADS)
    assert (lengths.sum(dim=1) == 8192 * NUM_HEADS).all()
    assert (lengths % 16 == 0).all()
    assert lengths.min() >= 16
    assert lengths.max() <= 32768
    assert lengths.max() > 2 * 8192


def test_source_hash_covers_all_kernel_files(tmp_path: Path) -> None:
    """Files in folders, too: a changed kernel starts another report."""
    sources = runpy.run_path(str(SCRIPT))["sources"]
    folder = tmp_path / "vllm_kvcompress" / "kernels" / "merging" / "moments"
    folder.mkdir(parents=True)
    sources.__globals__["ROOT"] = tmp_path
    hashes = set()
    for text in ("a = 1", "a = 2"):
        (folder / "reference.py").write_text(text)
        hashes.add(sources())
    assert len(hashes) == 2
