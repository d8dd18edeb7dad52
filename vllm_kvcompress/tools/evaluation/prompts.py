"""Builds prompts as token ids, in two parts: the context, and the question that comes after it."""

from __future__ import annotations

from typing import Any

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation.item import Item

REPEAT = "\n\nRepeat the previous context exactly."  # KVzip's words (arXiv 2505.23416)
_MARK = "\u241e"  # a symbol that stands between the parts while a chat template is rendered


def load_tokenizer(model: str) -> Any:
    """Loads a model's Hugging Face tokenizer.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{model}: no tokenizer could be loaded: {reason}") from None


def longest_prompt(model: str) -> int | None:
    """The model's maximum length in tokens, replies included; None if its config does not say.

    Raises:
        ConfigError: there is no such model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model}: {str(error).strip().splitlines()[0]}") from None
    return getattr(config, "max_position_embeddings", None)


def split_prompt(
    tokenizer: Any, item: Item, longest: int | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, cut between context and question.

    The parts are tokenized separately, so that the context's tokens do not depend on the question.

    Args:
        tokenizer: a Hugging Face tokenizer; its chat template is used if it has one.
        item: what is asked.
        longest: limit of prompt and reply together; beyond it, the middle of the context is left
            out where the item allows it (LongBench's rule).

    Raises:
        ConfigError: a text with fewer tokens than are to be compressed and predicted.
    """
    if item.continuation:
        return _split_text(tokenizer, item)
    before = f"{item.context}{item.separator}"
    if item.chat and getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": f"{before}{_MARK}{item.question}"}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        first, _, second = text.partition(_MARK)
        head = tokenizer(first, add_special_tokens=False)["input_ids"]
    else:
        head = tokenizer(before)["input_ids"]
        second = item.question
    rest = tokenizer(f"{second}{item.answer_prefix}", add_special_tokens=False)["input_ids"]
    if item.may_cut and longest is not None:
        head = _cut_middle(head, longest - item.max_tokens - len(rest))
    return list(head), list(rest)


def before_and_after(tokenizer: Any) -> tuple[int, list[int]]:
    """Number of tokens that a chat template puts before a message, and the tokens after it."""
    if not getattr(tokenizer, "chat_template", None):
        return 0, []
    before, after = split_prompt(tokenizer, Item("", "", (), "", max_tokens=0, separator=""))
    return len(before), after


def repetition_of(tokenizer: Any, context: list[int]) -> list[int]:
    """What a preparing request sends after a context: the demand to repeat it, and the context."""
    begin, reply = before_and_after(tokenizer)
    asked = tokenizer(REPEAT, add_special_tokens=False)["input_ids"]
    return [*asked, *reply, *context[begin:]]


def _split_text(tokenizer: Any, item: Item) -> tuple[list[int], list[int]]:
    """The tokens that are compressed, and those that are predicted."""
    tokens = list(tokenizer(item.context)["input_ids"])
    wanted = item.length + item.continuation
    if len(tokens) < wanted:
        raise ConfigError(
            f"{item.task}: a text of {len(tokens)} tokens, expected at least {wanted}: "
            f"{item.length} to compress (--lengths) and {item.continuation} to predict "
            "(--continuation); give a longer text, or fewer tokens."
        )
    return tokens[: item.length], tokens[item.length : wanted]


def _cut_middle(tokens: list[int], room: int) -> list[int]:
    """At most `room` tokens: the first half and the last."""
    if len(tokens) <= room:
        return tokens
    half = max(0, room) // 2
    return tokens[:half] + tokens[len(tokens) - half :]
