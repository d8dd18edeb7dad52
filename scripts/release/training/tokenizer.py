"""The reference model's tokenizer: one token per word, and a chat template of two tokens.

A chat with one user message becomes `<bos> message <answer>`; the reply ends with `<eos>`.
"""

from __future__ import annotations

from typing import Any

from training.tasks import VOCABULARY

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<answer>")
PAD, BOS, EOS, UNK, ANSWER = range(len(SPECIAL))
WORDS = (*SPECIAL, *VOCABULARY)
WORD_IDS = {word: i for i, word in enumerate(WORDS)}

CHAT_TEMPLATE = (
    "{{ '<bos> ' }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ ' <eos> ' }}{% else %}{{ ' <answer> ' }}{% endif %}"
    "{% endfor %}"
)


def encode(words: list[str]) -> list[int]:
    """Ids of words, without special tokens; unknown words become <unk>."""
    return [WORD_IDS.get(word, UNK) for word in words]


def build_tokenizer() -> Any:
    """Builds a Hugging Face fast tokenizer; save it with `save_pretrained`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(WORD_IDS, unk_token=SPECIAL[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # One "piece" per word with a space before it, so that decoding puts the spaces back.
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNK],
        additional_special_tokens=[SPECIAL[ANSWER]],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
