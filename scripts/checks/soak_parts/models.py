"""The models of a soak run: a tiny random one with a byte tokenizer, and the reference model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from soak_parts.setups import Setup

ROOT = Path(__file__).resolve().parents[3]
SPECIALS = ("<bos>", "<eos>", "<pad>", "<unk>")
VOCABULARY = len(SPECIALS) + 256
_WORDS = (*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
_CHARACTERS = {_WORDS.index(chr(code)): chr(code) for code in range(33, 127)}
PRINTABLE = tuple(_CHARACTERS)  # tokens of one character that every tokenizer leaves alone
LAYERS, QUERY_HEADS, KV_HEADS = 2, 4, 2
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def prepare(folder: Path) -> None:
    """Writes the tiny model and the profiles that policies need; nothing if they are there."""
    if (folder / "llama" / "tokenizer.json").exists():
        return
    from tests import tiny_models

    path = tiny_models.build(
        *("llama", folder),
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
    )
    heads = {f"{layer}-{head}": [1 + layer + head] for layer in range(2) for head in range(4)}
    (folder / "headkv.json").write_text(json.dumps(heads))
    (folder / "duo").mkdir(exist_ok=True)
    (folder / "duo" / "full_attention_heads.tsv").write_text("1\t0\n0\t1\n")
    (folder / "duo" / "config.json").write_text(json.dumps({"sink_size": 8, "recent_size": 32}))
    _byte_tokenizer().save_pretrained(path)


def model_of(setup: Setup, folder: Path) -> Path:
    """Returns the folder of the model that a setup serves."""
    return ROOT / "models" / "reference" if setup.recalls else folder / "llama"


def text_of(tokens: list[int]) -> str:
    """Decodes tokens of `PRINTABLE` into the text of a chat message."""
    return "".join(_CHARACTERS[token] for token in tokens)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte: byte-level BPE without merges."""
    vocabulary = {word: number for number, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )
