"""Runs the authors' package on small classifiers and stores what it keeps, for the tests.

    python -m venv llmlingua-env
    llmlingua-env/bin/pip install llmlingua==0.2.2 "transformers<5" torch==2.13.0
    llmlingua-env/bin/python scripts/release/llmlingua_golden.py tests/golden/llmlingua2.json

It needs an environment of its own: llmlingua 0.2 works with transformers below 5 only. Two
classifiers, one with BERT's tokens and one with XLM-RoBERTa's, whose weights are waves: they are
the same everywhere. Stored are the words of every text with the package's label for each.

Of the package two things are replaced. It repeats words by their tokens of GPT-3.5, whose
vocabulary it would download; here, as in this project, by those of the classifier. And it puts
BERT's tokens around every chunk, which XLM-RoBERTa does not know; here, as where the authors train
(experiments/llmlingua2/model_training), each classifier has its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForTokenClassification,
    BertConfig,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
)

# The package looks for these in a path.
KINDS = ("bert-base-multilingual-cased", "xlm-roberta-large")
SYLLABLES = ("ka", "lo", "mi", "ru", "ten", "sa", "ve", "dor", "pi", "nu")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
PUNCTUATION = ".,;:!?()-'\"/"
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": 2,
}


def words_text(num_words: int, step: int) -> str:
    """Sentences of made-up words, with numbers, commas and hyphens; no full stop in a word.

    There a chunk may end, and the package reads the rest of the word as one with a space before it.
    """
    words = []
    for i in range(num_words):
        n = (i * i * step + 7 * i + step) % 997
        word = SYLLABLES[n % 10] + SYLLABLES[n // 10 % 10] * (n % 3 > 0)
        word = word.capitalize() if n % 11 == 0 else word
        word = str(n) if n % 13 == 0 else word
        word = f"{word}-{SYLLABLES[n % 7]}" if n % 17 == 0 else word
        words.append(word + ("." if n % 9 == 0 else "," if n % 19 == 0 else ""))
    return " ".join(words) + "."


TEXTS = {
    "short": "Kalo ten (mi 12.5) said: ruve, dor-pi!  Sanu\nlomi kaka 7 veten?",
    "middle": words_text(120, 3),
    "long": words_text(700, 5),
    # One token a word: where a chunk begins within a word, the package reads it as another one.
    "unbroken": " ".join(SYLLABLES[i * i % 97 % 10] for i in range(1400)),
}
CASES: tuple[dict[str, Any], ...] = (
    {"rate": 0.5},
    {"rate": 0.9},
    {"rate": 0.33},
    {"rate": 0.7, "force_tokens": [".", "?", "7"]},
    {"target_token": 18},
)


def tokenizer_of(kind: str) -> Any:
    """A tokenizer with BERT's pieces (##), or with XLM-RoBERTa's (▁)."""
    pieces = [*SYLLABLES, *(s.capitalize() for s in SYLLABLES), *LETTERS, *PUNCTUATION]
    pieces = list(dict.fromkeys(pieces))
    if kind == KINDS[0]:
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        vocabulary = [*special, *pieces, *(f"##{piece}" for piece in pieces)]
        tokenizer = Tokenizer(
            models.WordPiece({p: i for i, p in enumerate(vocabulary)}, unk_token="[UNK]")
        )
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        pad, unk, cls, sep, mask = special
    else:
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        scored = [(piece, -8.0 + len(piece)) for piece in [*pieces, "▁"]]
        scored += [(f"▁{piece}", -7.0 + len(piece)) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram([(s, 0.0) for s in special] + scored, unk_id=3))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        tokenizer.decoder = decoders.Metaspace()
        cls, pad, sep, unk, mask = special
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unk,
        cls_token=cls,
        sep_token=sep,
        mask_token=mask,
        model_max_length=512,
    )


def build_classifier(kind: str, folder: Path) -> Path:
    """Writes a classifier whose weights are waves, and returns where."""
    tokenizer = tokenizer_of(kind)
    shape = {**SHAPE, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if kind == KINDS[0]:
        config: Any = BertConfig(**shape, max_position_embeddings=512)
    else:
        config = XLMRobertaConfig(**shape, max_position_embeddings=514, type_vocab_size=1)
    model = AutoModelForTokenClassification.from_config(config).eval()
    # By name: the order is another one in other versions of transformers.
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        places = torch.arange(parameter.numel(), dtype=torch.float64)
        wave = torch.sin(places * (1.7 + 0.31 * index) + places**2 * 0.013)
        size, around = (0.3, 1.0) if name.endswith("LayerNorm.weight") else (0.5, 0.0)
        parameter.data.copy_((size * wave + around).reshape(parameter.shape))
    target = folder / kind
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


class TokensOf:
    """In the place of GPT-3.5's tokenizer: the classifier's."""

    def __init__(self, kind: str) -> None:
        self._tokenizer = tokenizer_of(kind)

    def encode(self, text: str) -> list[str]:
        """The tokens of a text, or of a word as the package has it, with ▁ or ## before it."""
        if " " in text:
            tokens: list[str] = self._tokenizer.tokenize(text)
            return tokens
        return [token.value for token in self._tokenizer.backend_tokenizer.model.tokenize(text)]


def labelled(compressor: Any, text: str, case: dict[str, Any]) -> dict[str, Any]:
    """What the package makes of a text: its words, and 1 for each that it keeps."""
    done = compressor.compress_prompt_llmlingua2(
        [text], return_word_label=True, word_sep="\t", label_sep="\v", **case
    )
    pairs = [each.rsplit("\v", 1) for each in done["fn_labeled_original_prompt"].split("\t")]
    return {
        "case": case,
        "words": " ".join(word for word, _ in pairs),
        "kept": "".join(label for _, label in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    from llmlingua import PromptCompressor, prompt_compressor
    from llmlingua.utils import TokenClfDataset

    golden: dict[str, Any] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = build_classifier(kind, Path(folder))
            prompt_compressor.tiktoken.encoding_for_model = lambda _, kind=kind: TokensOf(kind)
            prompt_compressor.TokenClfDataset = partial(TokenClfDataset, model_name=kind)
            compressor = PromptCompressor(
                str(path),
                device_map="cpu",
                use_llmlingua2=True,
                model_config={"trust_remote_code": False},
            )
            golden[kind] = {
                name: [labelled(compressor, text, case) for case in CASES[:: len(text) // 1500 + 1]]
                for name, text in TEXTS.items()
            }
    out.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
