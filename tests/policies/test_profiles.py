"""Profile files: the published formats, checked against the model."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from tests.policies.cases import (
    duoattention_file,
    headkv_file,
    triattention_file,
    triattention_statistics,
)
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.base import ModelHeads
from vllm_kvcompress.policies.duoattention import DuoAttention, read_pattern
from vllm_kvcompress.policies.headkv import HeadKV, read_importance
from vllm_kvcompress.policies.parts.profiles import Table
from vllm_kvcompress.policies.triattention import (
    TriAttention,
    read_statistics,
    write_statistics,
)


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_headkv_scores_are_means(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", {"0-0": [0.2, 0.4], "0-1": [1], "1-1": [0.5], "1-0": [0, 1]})
    assert read_importance(path) == ((pytest.approx(0.3), 1.0), (0.5, 0.5))


def importance(path: Path, model: ModelHeads, temperature: float = 1.0) -> Table:
    """Importance of a rank's KV heads."""
    return HeadKV(temperature=temperature).with_profile(path).bind(model).importance


def test_headkv_means_over_the_group_sum_to_one(tmp_path: Path) -> None:
    scores = {f"{layer}-{head}": [layer + head] for layer in range(2) for head in range(4)}
    path = write(tmp_path / "p.json", scores)
    assert importance(path, ModelHeads(2, 2, 4, 16)) == (
        (pytest.approx(0.5 / 8), pytest.approx(2.5 / 8)),
        (pytest.approx(1.5 / 8), pytest.approx(3.5 / 8)),
    )


def test_headkv_temperature_sharpens(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", {"0-0": [1], "0-1": [3]})
    assert importance(path, ModelHeads(1, 2, 2, 16), temperature=2.0) == ((0.1, 0.9),)


def test_headkv_without_any_score_is_uniform(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", {"0-0": [0], "0-1": [0]})
    assert importance(path, ModelHeads(1, 2, 2, 16)) == ((0.5, 0.5),)


def test_each_rank_takes_its_own_heads(tmp_path: Path) -> None:
    models = [ModelHeads(1, 2, 4, 16, tp_rank=rank, tp_size=2) for rank in range(2)]
    path = write(tmp_path / "p.json", {f"0-{head}": [head] for head in range(8)})
    ranks = [importance(path, model)[0] for model in models]
    assert ranks[0] == (pytest.approx(0.5 / 3), pytest.approx(2.5 / 3))
    assert ranks[1] == (pytest.approx(4.5 / 11), pytest.approx(6.5 / 11))
    duo = DuoAttention().with_profile(duoattention_file(tmp_path, 1, 4))
    both = [duo.bind(model).gates[0] for model in models]
    assert both[0] + both[1] == duo.gates[0]


def test_each_pipeline_stage_takes_its_own_layers(tmp_path: Path) -> None:
    """Importance is relative to the stage's sum, since it divides its own budget."""
    path = write(tmp_path / "p.json", {f"{layer}-0": [2**layer] for layer in range(3)})
    first = ModelHeads(1, 1, 1, 16, later_layers=2)
    second = ModelHeads(2, 1, 1, 16, first_layer=1)
    assert importance(path, first) == ((1.0,),)
    assert importance(path, second) == ((pytest.approx(1 / 3),), (pytest.approx(2 / 3),))
    duo = DuoAttention().with_profile(duoattention_file(tmp_path, 3, 1))
    assert duo.bind(first).gates + duo.bind(second).gates == duo.gates
    table = triattention_statistics(3, 1)
    statistics = TriAttention().with_profile(triattention_file(tmp_path, 3, 1))
    assert torch.equal(statistics.bind(second).statistics, table[1:])
    with pytest.raises(ConfigError, match="expected 4 layers of 1 query heads"):
        importance(path, ModelHeads(2, 1, 1, 16, first_layer=2))


def test_duoattention_reads_a_directory_and_clips_gates(tmp_path: Path) -> None:
    write(tmp_path / "full_attention_heads.tsv", "1.2\t-0.5\n\n0.25\t0.5\n")
    write(tmp_path / "config.json", {"sink_size": 64, "recent_size": 128, "more": 1})
    for path in (tmp_path, tmp_path / "full_attention_heads.tsv"):
        assert read_pattern(path) == (((1.0, 0.0), (0.25, 0.5)), 64, 128)


def test_pipelines_are_bound_to_the_model(tmp_path: Path) -> None:
    headkv = resolve("headkv", {}, headkv_file(tmp_path, 3, 4)).bind(3, 2, 4, 16).allocator
    assert isinstance(headkv, HeadKV)
    assert headkv.block_size == 16
    assert sum(map(sum, headkv.importance)) == pytest.approx(1)
    duo = resolve("duoattention", {}, duoattention_file(tmp_path, 3, 2)).bind(3, 2, 4, 16)
    assert isinstance(duo.allocator, DuoAttention)
    assert (duo.allocator.num_sinks, duo.allocator.num_recent) == (2, 5)
    assert len(duo.allocator.gates) == 3
    assert duo.protection.num_sinks == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "expected JSON"),
        ([1, 2], "expected a JSON object, found list"),
        ({}, "expected every head of every layer, found 0"),
        ({"0": [1.0]}, "expected \"layer-head\": \\[scores\\], found '0'"),
        ({"0-0": 1.0}, "expected \"layer-head\": \\[scores\\], found '0-0': 1.0"),
        ({"0-0": []}, "expected \"layer-head\": \\[scores\\], found '0-0': \\[\\]"),
        ({"0-0": ["a"]}, "found '0-0'"),
        ({"0-0": [1], "1-1": [1]}, "found 2 of 2 x 2"),
        ({"0-0": [1], "-1-0": [1]}, "found '-1-0'"),
        ('{"0-0": [NaN]}', "expected finite numbers"),
    ],
)
def test_headkv_files_that_are_refused(tmp_path: Path, content: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_importance(write(tmp_path / "p.json", content))


def test_statistics_of_queries_are_read_as_written(tmp_path: Path) -> None:
    """A rank has its heads'; another model is refused."""
    table = triattention_statistics(3, 4)
    path = triattention_file(tmp_path, 3, 4)
    assert torch.equal(read_statistics(path), table)
    policy = TriAttention().with_profile(path)
    second = policy.bind(ModelHeads(3, 1, 2, 16, tp_rank=1, tp_size=2))
    assert torch.equal(second.statistics, table[:, 2:])
    with pytest.raises(ConfigError, match=r"expected 3 layers of 8 query heads.* found 3 of 4"):
        policy.bind(ModelHeads(3, 2, 8, 16))


def test_statistics_that_are_refused(tmp_path: Path) -> None:
    """Whatever is no file of the authors' format, code in it included."""
    path = triattention_file(tmp_path, 2, 2)
    content = torch.load(path, weights_only=True)
    del content["stats"]["layer01_head00"]
    torch.save(content, path)
    with pytest.raises(ConfigError, match="expected TriAttention's statistics of every head"):
        read_statistics(path)
    write_statistics(path, torch.full((1, 2, 3, 4), float("nan")))
    with pytest.raises(ConfigError, match="expected finite numbers"):
        read_statistics(path)
    for bad in (b"no file of torch's", pickle.dumps(Path, 2)):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="expected TriAttention's statistics"):
            read_statistics(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_statistics(tmp_path / "none.pt")


def test_files_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_importance(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pattern(tmp_path / "none.tsv")


@pytest.mark.parametrize(
    ("table", "sizes", "sentence"),
    [
        ("", {"sink_size": 1, "recent_size": 1}, "one gate per KV head"),
        ("0.1\t0.2\n0.3\n", {"sink_size": 1, "recent_size": 1}, "one gate per KV head"),
        ("0.1\tx\n", {"sink_size": 1, "recent_size": 1}, "expected gates as numbers"),
        ("nan\t0.2\n", {"sink_size": 1, "recent_size": 1}, "expected finite numbers"),
        ("0.1\t0.2\n", {"sink_size": 1}, "expected sink_size and recent_size"),
        ("0.1\t0.2\n", {"sink_size": -1, "recent_size": 1}, "expected sink_size and recent_size"),
        ("0.1\t0.2\n", None, "config.json: cannot be read"),
    ],
)
def test_duoattention_files_that_are_refused(
    tmp_path: Path, table: str, sizes: object, sentence: str
) -> None:
    write(tmp_path / "full_attention_heads.tsv", table)
    if sizes is not None:
        write(tmp_path / "config.json", sizes)
    with pytest.raises(ConfigError, match=sentence):
        read_pattern(tmp_path)


def test_profiles_of_other_models_are_refused(tmp_path: Path) -> None:
    headkv = resolve("headkv", {}, headkv_file(tmp_path, 3, 4))
    with pytest.raises(
        ConfigError, match="expected 2 layers of 4 query heads, as the model has, found 3 of 4"
    ):
        headkv.bind(2, 2, 4, 16)
    with pytest.raises(
        ConfigError, match="expected 3 layers of 8 query heads, as the model has, found 3 of 4"
    ):
        headkv.bind(3, 2, 4, 16, tp_rank=0, tp_size=2)
    duo = resolve("duoattention", {}, duoattention_file(tmp_path, 3, 2))
    with pytest.raises(
        ConfigError, match="expected 3 layers of 4 KV heads, as the model has, found 3 of 2"
    ):
        duo.bind(3, 4, 8, 16)
