"""The arithmetic of `vllm-kvcompress plan`; engine tests compare it with an engine's own report."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from transformers import GemmaConfig

from vllm_kvcompress.cli.main import main
from vllm_kvcompress.cli.plan import size
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools import capacity

QUARTER = Settings.from_dict({"policy": "streamingllm", "budget": 0.25})


def test_a_model_as_its_makers_count_it(llama_8b: str) -> None:
    """8,030,261,248 parameters; 128 KiB of cache per token."""
    shape = capacity.read_shape(llama_8b, None, num_ranks=1)
    assert shape.weight_bytes == 2 * 8_030_261_248
    assert shape.token_bytes == 128 * 2**10
    half = capacity.read_shape(llama_8b, None, num_ranks=2)
    assert (half.token_bytes, half.weight_bytes) == (64 * 2**10, 8_030_261_248)


def test_requests_that_fit_counted_one_by_one(llama_8b: str) -> None:
    """Requests are read one after the other, each beside what is left of those before it."""
    shape = capacity.read_shape(llama_8b, None, num_ranks=1)
    fits = capacity.plan(shape, QUARTER, 40 * 2**30, 32768, 16)
    free = fits.num_blocks
    assert free == 40 * 2**30 // (128 * 2**10 * 16)
    assert fits.stock == free / 2048
    read = 0
    while free >= 2048 + 512:  # the prompt's blocks, and fresh ones for a quarter of them
        free -= 512 + 1  # the quarter, and a block to go on in
        read += 1
    assert int(fits.compressed or 0) == read


def test_the_command(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu-memory", "80GiB", "--context", "32k", "--kv-policy", "streamingllm"]
    assert main(["plan", llama_8b, *options, "--kv-budget", "0.25"]) == 0
    out = capsys.readouterr().out
    assert "32768 tokens per request, blocks of 16 tokens" in out
    cache = int(0.92 * 80 * 2**30) - 2 * 8_030_261_248 - 3 * 2**30
    assert f"{cache // (2 * 2**20)} blocks, 128.0 KiB per token" in out
    assert "compressed" in out
    assert main(["plan", llama_8b, "--gpu-memory", "16GiB"]) == 2
    assert "expected memory for a KV cache" in capsys.readouterr().err


def test_scales_beside_the_tokens_count(llama_8b: str) -> None:
    """Heads of 128: 132 bytes a key in 8 bits, 68 in 4."""
    for name, stored in {"int8_per_token_head": 132, "int4_per_token_head": 68}.items():
        shape = capacity.read_shape(llama_8b, None, num_ranks=1, cache_dtype=name)
        assert shape.token_bytes == 2 * 32 * 8 * stored
    with pytest.raises(ConfigError, match=r"nvfp4: expected one of auto, .*int4_per_token_head"):
        capacity.read_shape(llama_8b, None, num_ranks=1, cache_dtype="nvfp4")


def test_the_largest_pipeline_stage_decides(llama_8b: str) -> None:
    """One of three stages has 11 of 32 layers."""
    shape = capacity.read_shape(llama_8b, None, num_ranks=2).largest_stage(3)
    assert (shape.num_layers, shape.num_ranks) == (11, 6)
    assert shape.token_bytes == 11 * 2 * 4 * 128 * 2
    assert shape.with_weights(60).weight_bytes == 10
    with pytest.raises(ConfigError, match="at most one stage for each of the model's 32 layers"):
        shape = capacity.read_shape(llama_8b, None, num_ranks=1).largest_stage(33)


def test_models_with_other_layers_are_refused(tmp_path: Path) -> None:
    config = GemmaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="found full_attention, sliding_attention"):
        capacity.read_shape(str(tmp_path), None, num_ranks=1)


@pytest.mark.parametrize(
    ("text", "number"),
    [("80GiB", 80 * 2**30), ("512MB", 512 * 10**6), ("32k", 32768), ("4096", 4096), ("1.5g", 15e8)],
)
def test_sizes(text: str, number: float) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1", "3 apples"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size"):
        size(text)
