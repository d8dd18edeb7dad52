"""Profiles: prompts hold a needle, scores are attention on it, files read back."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_kvcompress.cli import profile
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.policies.duoattention import DuoAttention
from vllm_kvcompress.tools.model_folder import profile_beside
from vllm_kvcompress.tools.profiler import (
    CHUNK_TOKENS,
    CONTENT_WORDS,
    CUE_WORDS,
    ProfileSettings,
    compressed_layers,
    gates_of,
    measure_heads,
    needle_prompt,
    vocabulary_words,
)

VOCABULARY = 96
NEEDLE = CUE_WORDS + CONTENT_WORDS


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=600,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


class PerfectRetriever:
    """A model whose last head attends to what followed the same token before, and no other."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        config = SimpleNamespace(
            vocab_size=VOCABULARY,
            num_attention_heads=3,
            num_hidden_layers=2,
            max_position_embeddings=600,
        )
        self.config = SimpleNamespace(get_text_config=lambda: config)

    def __call__(
        self, tokens: torch.Tensor, past_key_values: Any, output_attentions: bool = False, **_: Any
    ) -> Any:
        seen = [*(past_key_values or []), *tokens[0].tolist()]
        rows = torch.zeros(1, 3, tokens.shape[1], len(seen))
        rows[..., 0] = 1.0
        for i, token in enumerate(tokens[0].tolist()):
            rows[0, 2, i, 0] = 0.0
            rows[0, 2, i, seen.index(token) + 1] = 1.0
        return SimpleNamespace(past_key_values=seen, attentions=[torch.zeros_like(rows), rows])


@pytest.mark.parametrize("seed", range(20))
def test_prompts_hold_the_needle_twice(seed: int) -> None:
    prompt = needle_prompt(range(2, 60), [0], 80, seed)
    assert len(prompt.tokens) == 80
    assert prompt.tokens[0] == 0
    needle = prompt.tokens[-NEEDLE:]
    assert prompt.tokens[prompt.needle : prompt.needle + NEEDLE] == needle
    assert all(prompt.tokens.count(token) == 2 for token in needle)
    assert prompt.tokens[prompt.asked] == needle[CUE_WORDS - 1]


def test_a_head_that_retrieves_scores_one() -> None:
    scores = measure_heads(
        PerfectRetriever(), make_tokenizer(), ProfileSettings(num_samples=3, length=64)
    )
    assert scores == [[[0.0] * 3] * 3, [[0.0] * 3, [0.0] * 3, [1.0] * 3]]


def test_scores_are_the_attention_of_the_whole_prompt() -> None:
    """In chunks, as in one pass."""
    model, tokenizer = make_model(), make_tokenizer()
    settings = ProfileSettings(num_samples=2, length=CHUNK_TOKENS + 70, seed=5)
    scores = measure_heads(model, tokenizer, settings)
    words = vocabulary_words(tokenizer, VOCABULARY)
    for sample in range(2):
        prompt = needle_prompt(words, [0], settings.length, 5 * 1_000_003 + sample)
        with torch.no_grad():
            attentions = model(torch.tensor([prompt.tokens]), output_attentions=True).attentions
        for layer in range(2):
            for head in range(4):
                rows = attentions[layer][0, head].tolist()
                asking = range(prompt.asked, prompt.asked + CONTENT_WORDS)
                mass = [sum(rows[i][prompt.needle : prompt.needle + NEEDLE]) for i in asking]
                expected = sum(mass) / len(mass)
                assert scores[layer][head][sample] == pytest.approx(expected, abs=1e-5)


def test_seeds_decide_the_scores() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    runs = [measure_heads(model, tokenizer, ProfileSettings(1, 64, seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_words_are_ordinary_tokens() -> None:
    assert vocabulary_words(make_tokenizer(), VOCABULARY) == list(range(2, VOCABULARY))
    assert vocabulary_words(make_tokenizer(), 50) == list(range(2, 50))


def test_only_full_attention_layers_are_measured() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert compressed_layers(SimpleNamespace(layer_types=kinds)) == [1, 3]
    assert compressed_layers(SimpleNamespace(num_hidden_layers=3)) == [0, 1, 2]


def test_gates_are_relative_to_the_best_query_head() -> None:
    scores = [[[0.1, 0.3], [0.0, 0.0], [0.4, 0.4], [0.0, 0.8]], [[0.0], [0.1], [0.05], [0.0]]]
    assert gates_of(scores, 2, None) == [
        [pytest.approx(0.5), 1.0],
        [pytest.approx(0.25), pytest.approx(0.125)],
    ]
    assert gates_of(scores, 2, 0.5) == [[pytest.approx(0.5), 1.0], [0.0, 0.0]]
    assert gates_of([[[0.0], [0.0]]], 2, None) == [[0.0, 0.0]]


@pytest.mark.parametrize(("length", "sentence"), [(20, "at least 36"), (700, "model's 600")])
def test_lengths_that_are_refused(length: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        measure_heads(make_model(), make_tokenizer(), ProfileSettings(1, length))


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    profile.add_options(parser)
    return profile.run(parser.parse_args(arguments))


def test_headkv_files_fit_their_model(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "heads.json"
    arguments = ["--kind", "headkv", "--out", str(out), "--length", "64", "--samples", "2"]
    assert run_command(str(saved_model), *arguments) == 0
    assert f"--kv-policy auto --kv-profile {out}" in capsys.readouterr().out
    rows = json.loads(out.read_text())
    assert len(rows) == 8
    assert all(len(scores) == 2 for scores in rows.values())
    for policy in ("headkv", "spans+headkv"):
        resolve(policy, {}, out).bind(2, 2, 4, 16)


def test_heads_go_where_auto_finds_them(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved_model, folder)
    assert run_command(str(folder), "--kind", "headkv", "--length", "64", "--samples", "1") == 0
    assert profile_beside(folder) == str(folder / "kv_heads.json")
    assert len(json.loads((folder / "kv_heads.json").read_text())) == 8


@pytest.mark.parametrize(("model", "kind"), [("some/name", "headkv"), ("here", "duoattention")])
def test_elsewhere_a_profile_needs_a_place(model: str, kind: str, tmp_path: Path) -> None:
    name = str(tmp_path) if model == "here" else model
    with pytest.raises(ConfigError, match="expected --out FILE"):
        run_command(name, "--kind", kind)


def test_duoattention_files_fit_their_model(saved_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads.tsv"
    arguments = ["--kind", "duoattention", "--out", str(out), "--length", "64", "--samples", "1"]
    sizes = ["--sink-size", "4", "--recent-size", "8", "--sparsity", "0.5"]
    assert run_command(str(saved_model), *arguments, *sizes) == 0
    pipeline = resolve("duoattention", {}, out).bind(2, 2, 4, 16)
    bound = pipeline.allocator
    assert isinstance(bound, DuoAttention)
    assert sorted(gate for row in bound.gates for gate in row)[:2] == [0.0, 0.0]
    assert (bound.num_sinks, bound.num_recent) == (4, 8)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--samples", "0"], "--samples 0: expected at least 1"),
        (["--sparsity", "1.5"], "expected a share from 0 to 1"),
        (["--sink-size", "-1"], "expected numbers of tokens"),
        ([], "cannot be loaded as a causal language model"),
    ],
)
def test_settings_that_are_refused(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_command(
            str(tmp_path), "--kind", "duoattention", "--out", str(tmp_path / "x"), *arguments
        )


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match="expected a model's directory, found none there"):
        run_command(missing, "--kind", "headkv", "--out", str(tmp_path / "x"))
