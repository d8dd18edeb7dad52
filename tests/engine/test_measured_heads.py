"""Measured heads in the engine: who measures them, and how they divide budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import envs

from tests import tiny_models
from tests.engine.conftest import Run, request
from tests.engine.oracle import check_decoding
from tests.tiny_models import VOCABULARY, prompt

MAX_TOKENS = 40
AUTO = {"policy": "auto", "budget": 0.25, "min_answer_tokens": 0}
PHASES = [[request("a", prompt(640, seed=1), 8)]]
WATCH = "tests.engine.test_measured_heads:watch_heads"
FP8_KERNELS = "tests.engine.fp8_kernels:vector_kernels"  # stand in where the CPU has none
WORDS, START = range(4, VOCABULARY), [0]  # all but the tokenizer's special tokens


def watch_heads(report: dict[str, Any]) -> None:
    """Reports where heads come from, how often they were measured, and what was warned of."""
    from vllm_kvcompress.vllm_plugin.worker_side import measured_heads
    from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

    report |= {"from": [], "measured": 0, "warned": [], "importance": None}
    use, measure = WorkerCompression.use_heads, measured_heads.measure

    def using(self: Any, importance: Any, source: str) -> None:
        report["from"].append(source)
        report["importance"] = importance
        use(self, importance, source)

    def measuring(*args: Any) -> Any:
        report["measured"] += 1
        return measure(*args)

    def warning(text: str, *args: object) -> None:
        report["warned"].append(text % args)

    WorkerCompression.use_heads, measured_heads.measure = using, measuring
    measured_heads.logger.warning = warning


@pytest.fixture
def run_measuring(run_engine: Run, tmp_path: Path) -> Run:
    """Runs a scenario that measures heads, with a cache folder of the test's own."""
    architectures = Path(envs.VLLM_CACHE_ROOT) / "modelinfos"  # take vLLM long to find out
    architectures.mkdir(parents=True, exist_ok=True)
    (tmp_path / "modelinfos").symlink_to(architectures)

    def run(model: str, *phases: Any, **options: Any) -> dict[str, Any]:
        variables = {"VLLM_CACHE_ROOT": str(tmp_path), **options.pop("environment", {})}
        options.setdefault("probes", [WATCH])
        settings = AUTO | options.pop("settings", {})
        chosen: dict[str, Any] = {"settings": settings, "environment": variables, **options}
        return run_engine(model, *(phases or (PHASES,)), **chosen)

    return run


def kept_file(cache: Path) -> Path:
    """Returns the only file of measured heads in vLLM's cache folder."""
    (file,) = (cache / "kvcompress" / "heads").iterdir()
    return file


def plain_scores(model: str, length: int, num_prompts: int) -> dict[str, list[float]]:
    """Returns the scores of every head, from the attention that transformers hands out."""
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_kvcompress.compression.needles import needle_prompt

    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    scores: dict[str, list[float]] = {}
    for seed in range(num_prompts):
        asked = needle_prompt(WORDS, START, length, seed)
        with torch.no_grad():
            attentions = plain(torch.tensor([asked.tokens]), output_attentions=True).attentions
        for layer, attention in enumerate(attentions):
            for head in range(attention.shape[1]):
                rows = attention[0, head, asked.asked : length - 1].tolist()
                mass = [sum(row[asked.needle : asked.needle + 9]) for row in rows]
                scores.setdefault(f"{layer}-{head}", []).append(sum(mass) / 6)
    return scores


def test_engine_measures_heads_once_and_keeps_them(
    llama: str, run_measuring: Run, tmp_path: Path
) -> None:
    """By the attention of plain transformers; later starts read them, and repair their file."""
    first = run_measuring(llama, record_kept=True)
    assert (first["from"], first["measured"], first["warned"]) == (["measured now"], 1, [])
    assert first["outputs"]["a"]["cached"] == 0
    file = kept_file(tmp_path)
    text = file.read_text()
    scores = json.loads(text)
    expected = plain_scores(llama, 513, 2)  # one step of 512 tokens, and one to predict
    assert list(scores) == [f"{layer}-{head}" for layer in range(3) for head in range(4)]
    for name, values in scores.items():
        assert values[:2] == pytest.approx(expected[name], abs=1e-4)
    assert len({round(sum(values), 3) for values in scores.values()}) > 6, "heads differ"
    second = run_measuring(llama, record_kept=True)
    assert (second["from"], second["measured"], second["warned"]) == (["cache"], 0, [])
    given = run_measuring(llama, settings={"profile": str(file)}, record_kept=True)
    assert given["from"] == []
    for report in (second, given):
        assert report["outputs"] == first["outputs"]
        assert report["kept"] == first["kept"]
    counts = [record["counts"] for record in first["kept"]]
    assert len({sum(heads) for heads in counts}) > 1, "layers get different budgets"
    for damaged in ('{"0-0": [0.5', '{"0-0": [0.5]}'):
        file.write_text(damaged)
        third = run_measuring(llama, asynchronous=True)
        assert (third["from"], third["measured"], len(third["warned"])) == (["measured now"], 1, 1)
        assert third["outputs"]["a"]["tokens"] == first["outputs"]["a"]["tokens"]
        assert kept_file(tmp_path).read_text() == text


def test_layers_of_latent_rows_share_the_budget_by_the_heads_that_read_them(
    model_directory: Path, run_measuring: Run, tmp_path: Path
) -> None:
    """Query heads of MLA layers are measured as absorbed; each layer has one KV head."""
    model = str(tiny_models.build("deepseek_v2", model_directory / "latent"))
    report = run_measuring(model, attention_backend="CPU_MLA", max_model_len=1024, record_kept=True)
    expected = plain_scores(model, 768, 2)
    scores = json.loads(kept_file(tmp_path).read_text())
    assert list(scores) == [f"{layer}-{head}" for layer in range(3) for head in range(4)]
    for name, values in scores.items():
        assert values[:2] == pytest.approx(expected[name], abs=1e-4)
    counts = [record["counts"] for record in report["kept"]]
    assert sum(pages for (pages,) in counts) == 3 * 10, "a quarter of 40 blocks in 3 layers"
    assert len({pages for (pages,) in counts}) > 1


def test_heads_beside_the_model_are_read_instead(
    model_directory: Path, run_measuring: Run, tmp_path: Path
) -> None:
    """Also by engines that `serve` does not build."""
    model = tiny_models.build("llama", model_directory / "with-heads", seed=3)
    rows = {f"{layer}-{head}": [layer + head / 8] for layer in range(3) for head in range(4)}
    (model / "kv_heads.json").write_text(json.dumps(rows))
    report = run_measuring(str(model))
    assert (report["from"], report["measured"]) == (["model folder"], 0)
    assert report["importance"][2] == [2, 2.125, 2.25, 2.375]


def test_no_measured_heads_unless_wanted(llama: str, run_measuring: Run, tmp_path: Path) -> None:
    """Then `auto` is the policy that needs none."""
    report = run_measuring(llama, settings={"measure_heads": False})
    assert (report["from"], report["measured"]) == ([], 0)
    assert report["events"][0]["policy"] == "spans"
    assert not (tmp_path / "kvcompress").exists()


def test_where_nothing_can_be_kept_each_start_measures(
    llama: str, run_measuring: Run, tmp_path: Path
) -> None:
    (tmp_path / "kvcompress").write_text("no folder")
    for _ in range(2):
        report = run_measuring(llama)
        assert (report["from"], report["measured"]) == (["measured now"], 1)
        (warning,) = report["warned"]
        assert "each start measures them" in warning


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"load_format": "dummy"}, "weights are random"),
        ({"max_model_len": 32, "max_num_seqs": 2}, "no request can be as long as 36 tokens"),
    ],
)
def test_heads_that_cannot_be_measured_get_the_same(
    llama: str, run_measuring: Run, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    tokens = prompt(min(640, options.get("max_model_len", 640) - 8), seed=1)
    phases = [[request("a", tokens, 4)]]
    report = run_measuring(llama, phases, record_kept=True, **options)
    assert (report["from"], report["measured"]) == ([], 0)
    assert reason in report["warned"][0]
    assert len(report["outputs"]["a"]["tokens"]) == 4
    assert all(len(set(record["counts"])) == 1 for record in report["kept"])
    assert not (tmp_path / "kvcompress").exists()


@pytest.mark.parametrize(
    ("family", "options", "num_layers"),
    [
        ("qwen3_moe", {}, 3),
        ("gemma3", {}, 2),
        ("qwen3_next", {"dtype": "bfloat16"}, 2),
        ("llama", {"kv_cache_dtype": "fp8_e5m2", "probes": [WATCH, FP8_KERNELS]}, 3),
    ],
)
def test_every_architecture_is_measured_as_it_is_served(
    model_directory: Path,
    run_measuring: Run,
    tmp_path: Path,
    family: str,
    options: dict[str, Any],
    num_layers: int,
) -> None:
    """Experts, sliding windows and linear attention beside full layers, a quantised cache."""
    model = str(tiny_models.build(family, model_directory))
    report = run_measuring(model, **options)
    assert (report["from"], report["warned"]) == (["measured now"], [])
    assert len(report["importance"]) == num_layers
    assert report["free_at_end"] == report["num_blocks"] - 1
    assert len(report["events"]) == 1


def test_two_ranks_measure_all_heads(llama: str, run_measuring: Run, tmp_path: Path) -> None:
    """Each its own; both divide by all of them, and one keeps them."""
    ranks: dict[str, Any] = {
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    measured = run_measuring(llama, **ranks)
    file = kept_file(tmp_path)
    scores = json.loads(file.read_text())
    for name, values in plain_scores(llama, 513, 2).items():
        assert scores[name][:2] == pytest.approx(values, abs=1e-4)
    given = run_measuring(llama, settings={"profile": str(file)}, **ranks)
    assert given["outputs"] == measured["outputs"]
    assert len(given["events"]) == len(measured["events"]) == 1


def test_measured_heads_divide_the_budget_over_the_whole_model(
    llama: str, run_engine: Run, tmp_path: Path
) -> None:
    """A head with all the importance keeps everything; the others share the rest."""
    profile = tmp_path / "heads.json"
    rows = {
        f"{layer}-{head}": [float((layer, head) == (1, 2))]
        for layer in range(3)
        for head in range(4)
    }
    profile.write_text(json.dumps(rows))
    tokens = prompt(640, seed=1)
    report = run_engine(
        llama,
        [[request("a", tokens, MAX_TOKENS)]],
        settings={"policy": "keydiff+headkv", "profile": str(profile), "budget": 0.4},
        record_kept=True,
    )
    counts = [record["counts"] for record in report["kept"]]
    assert counts == [[6, 6], [6, 20], [5, 5]]
    check_decoding(llama, tokens, report["kept"], report["outputs"]["a"])
