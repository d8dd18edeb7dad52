"""`profile` measures through the engine, and its files read back; engine tests check the scores."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.forked import command
from vllm_kvcompress.cli import profile
from vllm_kvcompress.config.auto import profile_beside
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.duoattention import DuoAttention
from vllm_kvcompress.policies.triattention import read_statistics
from vllm_kvcompress.tools.evaluation import texts
from vllm_kvcompress.tools.profiler import StreamingSizes, gates_of, write_duoattention


def test_gates_are_relative_to_the_best_query_head() -> None:
    scores = [[[0.1, 0.3], [0.0, 0.0], [0.4, 0.4], [0.0, 0.8]], [[0.0], [0.1], [0.05], [0.0]]]
    assert gates_of(scores, 2, None) == [
        [pytest.approx(0.5), 1.0],
        [pytest.approx(0.25), pytest.approx(0.125)],
    ]
    assert gates_of(scores, 2, 0.5) == [[pytest.approx(0.5), 1.0], [0.0, 0.0]]
    assert gates_of([[[0.0], [0.0]]], 2, None) == [[0.0, 0.0]]


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    profile.add_options(parser)
    return profile.run(parser.parse_args(arguments))


def run_process(folder: Path, *arguments: str) -> str:
    """Runs the command in a process of its own, since an engine needs one; returns its words."""
    done = command(folder, "profile", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_heads_go_where_auto_finds_them(llama: str, tmp_path: Path) -> None:
    """The same as from any engine of the model; another seed gives others."""
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    asked = ("--kind", "headkv", "--length", "64", "--samples", "2", "--engine", "dtype=float32")
    words = run_process(tmp_path, str(folder), *asked)
    found = profile_beside(folder)
    assert found == str(folder / "kv_heads.json")
    assert f"3 layers of 4 query heads; serve with --kv-policy auto --kv-profile {found}" in words
    rows = json.loads(Path(found).read_text())
    assert len(rows) == 12
    assert all(len(scores) == 2 for scores in rows.values())
    for policy in ("headkv", "spans+headkv"):
        resolve(policy, {}, Path(found)).bind(3, 2, 4, 16)
    other = tmp_path / "other.json"
    run_process(tmp_path, llama, *asked, "--seed", "1", "--out", str(other))
    assert json.loads(other.read_text()) != rows


def test_queries_are_those_of_the_model_before_it_turns_them(llama: str, tmp_path: Path) -> None:
    """Means of the projections that plain transformers compute, position by position."""
    out, length = tmp_path / "queries.pt", 40
    asked = ("--length", str(length), "--samples", "3", "--engine", "dtype=float32")
    words = run_process(tmp_path, llama, "--kind", "triattention", "--out", str(out), *asked)
    assert (
        f"3 layers of 4 query heads; serve with --kv-policy triattention --kv-profile {out}"
        in words
    )
    sums = [[[[0.0] * 16 for _ in range(3)] for _ in range(4)] for _ in range(3)]
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    tokenizer, count, seen = AutoTokenizer.from_pretrained(llama), 0, []
    for layer in model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *call: seen.append(call[2][0]))
    for kind in ("prose", "manual", "source"):
        (piece,) = texts.pieces(kind, length, 0, 1)
        tokens = tokenizer(piece)["input_ids"][: length - 1]
        with torch.no_grad():
            model(torch.tensor([tokens]))
        count += len(tokens)
        for layer, rows in enumerate(seen[-3:]):
            for row in rows.unflatten(1, (4, 32)).tolist():
                for head, query in enumerate(row):
                    for f in range(16):
                        parts = query[f], query[f + 16], math.hypot(query[f], query[f + 16])
                        for part, value in enumerate(parts):
                            sums[layer][head][part][f] += value
    found = read_statistics(out)
    assert torch.allclose(found, torch.tensor(sums) / count, atol=1e-4)


def test_duoattention_files_fit_their_model(tmp_path: Path) -> None:
    out, scores = tmp_path / "heads.tsv", [[[0.5], [0.1], [0.2], [0.9]], [[0.1], [0], [0], [0]]]
    write_duoattention(out, scores, 2, StreamingSizes(4, 8, 0.5))
    bound = resolve("duoattention", {}, out).bind(2, 2, 4, 16).allocator
    assert isinstance(bound, DuoAttention)
    assert sorted(gate for row in bound.gates for gate in row)[:2] == [0.0, 0.0]
    assert (bound.num_sinks, bound.num_recent) == (4, 8)


@pytest.mark.parametrize(("model", "kind"), [("some/name", "headkv"), ("here", "duoattention")])
def test_elsewhere_a_profile_needs_a_place(model: str, kind: str, tmp_path: Path) -> None:
    name = str(tmp_path) if model == "here" else model
    with pytest.raises(ConfigError, match="expected --out FILE"):
        run_command(name, "--kind", kind)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--samples", "0"], "--samples 0: expected at least 1"),
        (["--length", "20"], "--length 20: expected at least 36"),
        (["--sparsity", "1.5"], "expected a share from 0 to 1"),
        (["--sink-size", "-1"], "expected numbers of tokens"),
        ([], "cannot be served: "),
    ],
)
def test_settings_that_are_refused(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")  # is set back, as what the command sets
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with pytest.raises(ConfigError, match=sentence):
        run_command(
            str(tmp_path), "--kind", "duoattention", "--out", str(tmp_path / "x"), *arguments
        )


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match="expected a model's directory, found none there"):
        run_command(missing, "--kind", "headkv", "--out", str(tmp_path / "x"))
