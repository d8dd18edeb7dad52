"""Prompts as token ids, in two parts: the context, and the question that comes after it."""

from __future__ import annotations

from typing import Any

from vllm_kvcompress.errors import ConfigError

_MARK = "\u241e"  # a symbol that stands between the parts while a chat template is rendered


def load_tokenizer(model: str) -> Any:
    """A model's Hugging Face tokenizer.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{model}: no tokenizer could be loaded: {reason}") from None


def split_prompt(
    tokenizer: Any, context: str, question: str, answer_prefix: str = ""
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, cut between context and question.

    The parts are tokenized on their own, so that the context's tokens do not depend on the
    question, whether that is known when the context is compressed or not.

    Args:
        tokenizer: a Hugging Face tokenizer; its chat template is used if it has one.
        context: the first part of the user's message.
        question: the rest of it.
        answer_prefix: how the reply begins.
    """
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": f"{context}\n{_MARK}{question}"}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        first, _, second = text.partition(_MARK)
        head = tokenizer(first, add_special_tokens=False)["input_ids"]
    else:
        head = tokenizer(f"{context}\n")["input_ids"]
        second = question
    rest = tokenizer(f"{second}{answer_prefix}", add_special_tokens=False)["input_ids"]
    return list(head), list(rest)
