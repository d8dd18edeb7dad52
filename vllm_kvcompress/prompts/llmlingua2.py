"""LLMLingua-2: Data Distillation for Efficient and Faithful Task-Agnostic Prompt Compression.

arXiv 2403.12968, section 3.3. A bidirectional token classifier gives every token of a text the
probability that it matters; words have the mean of their tokens; in every chunk of 512 tokens the
words above a percentile are kept, in their order.

It differs from the authors' package (llmlingua 0.2.2) where that changes what a text says: kept
parts are cut from the text, with its line breaks and letters, and words that the classifier's
vocabulary lacks may be kept; words count by the classifier's tokens, not by GPT-3.5's.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.words import ScoredText, ScoredWords, chunk_bounds

MAX_CHUNK_TOKENS = 512  # the two around a chunk included
_CHUNK_ENDS = (".", "\n")
_BATCH_SIZE = 8  # chunks
_KEEP = 1  # label of tokens to keep
_FIND = (
    "choose a LLMLingua-2 classifier, such as "
    "microsoft/llmlingua-2-bert-base-multilingual-cased-meetingbank, or the folder of one"
)


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f"prompt compressor {name}: {reason}; {_FIND}.")


def check_model(name: str) -> None:
    """Refuses a model that is no classifier of tokens to keep; reads its configuration alone.

    Raises:
        ConfigError: there is no model of this name, or it is no such classifier.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise _refusal(name, f"no model there that can be read ({reason})") from None
    kinds = config.architectures or []
    if not any("ForTokenClassification" in kind for kind in kinds):
        architectures = ", ".join(kinds) or "no architecture"
        raise _refusal(name, f"expected a token classifier, found {architectures}")
    if config.num_labels != 2:
        labels = "expected two labels, for tokens to leave out and to keep"
        raise _refusal(name, f"{labels}, found {config.num_labels}")


class TokenClassifier:
    """Scores texts with a classifier; may be used by several threads at once.

    Args:
        name: folder or name of a model for transformers' AutoModelForTokenClassification.
        device: where it runs.
        force_tokens: texts that are always kept. One that is a single token of the classifier is
            also a separate word with probability 1, as in the authors' package.
        min_tokens: shorter texts are not scored.

    Raises:
        ConfigError: the model cannot be loaded, or does not run.
    """

    def __init__(
        self, name: str, device: str = "cpu", force_tokens: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        from transformers import AutoModelForTokenClassification, AutoTokenizer

        check_model(name)
        dtype: Any = torch.float32 if device == "cpu" else "auto"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForTokenClassification.from_pretrained(
                name, dtype=dtype, trust_remote_code=False
            )
            self._model: Any = model.eval().to(device)
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            raise _refusal(name, f"cannot be loaded on {device} ({error})") from None
        if not self._tokenizer.is_fast:
            reason = "expected a tokenizer.json, which locates tokens in a text, found none"
            raise _refusal(name, reason)
        self._device = device
        self._min_tokens = min_tokens
        self._max_tokens = min(MAX_CHUNK_TOKENS, self._tokenizer.model_max_length)
        vocabulary = self._tokenizer.get_vocab()
        self._end_ids = [vocabulary[end] for end in _CHUNK_ENDS if end in vocabulary]
        single = [len(self._tokenizer.tokenize(text)) == 1 for text in force_tokens]
        self._forced_words = {t for t, one in zip(force_tokens, single, strict=True) if one}
        others = [re.escape(t) for t, one in zip(force_tokens, single, strict=True) if not one]
        self._forced_parts = re.compile("|".join(others)) if others else None
        self._try(name)

    def score(self, text: str) -> ScoredText:
        """Scores the words of a text."""
        encoding = self._tokenizer(text, add_special_tokens=False, verbose=False)[0]
        ids = np.array(encoding.ids, dtype=np.int64)
        if not len(ids) or len(ids) < self._min_tokens:
            return ScoredText(len(ids))
        pieces = [text[start:end] for start, end in encoding.offsets]
        spans = np.array(encoding.offsets, dtype=np.int32)
        spans[:, 0] += [len(piece) - len(piece.lstrip()) for piece in pieces]
        spans[:, 1] = np.maximum(
            spans[:, 1] - [len(piece) - len(piece.rstrip()) for piece in pieces], spans[:, 0]
        )
        stripped = [piece.strip() for piece in pieces]
        words = np.array(encoding.word_ids)
        begins = np.append(True, words[1:] != words[:-1])
        begins |= [bool(p) and p in string.punctuation for p in stripped]
        forced = np.array([piece in self._forced_words for piece in stripped])
        begins |= forced
        bounds = chunk_bounds(np.isin(ids, self._end_ids), self._max_tokens - 2)
        probabilities = self._probabilities([ids[start:end] for start, end in bounds])
        begins[[start for start, _ in bounds]] = True
        chunks = tuple(
            ScoredWords.from_tokens(spans[a:b], of_chunk, begins[a:b], forced[a:b])
            for (a, b), of_chunk in zip(bounds, probabilities, strict=True)
        )
        kept_parts = self._forced_parts.finditer(text) if self._forced_parts else ()
        return ScoredText(len(ids), chunks, tuple(match.span() for match in kept_parts))

    def _probabilities(self, chunks: list[Any]) -> list[Any]:
        """Probabilities that tokens are to be kept: [tokens] of every chunk."""
        first, last = self._around()
        rows = [[first, *ids.tolist(), last][: self._max_tokens] for ids in chunks]
        probabilities = []
        for start in range(0, len(rows), _BATCH_SIZE):
            batch = rows[start : start + _BATCH_SIZE]
            longest = max(map(len, batch))
            pad = self._tokenizer.pad_token_id or 0
            ids = torch.tensor([row + [pad] * (longest - len(row)) for row in batch])
            mask = torch.arange(longest) < torch.tensor([[len(row)] for row in batch])
            with torch.inference_mode():
                logits = self._model(
                    input_ids=ids.to(self._device), attention_mask=mask.long().to(self._device)
                ).logits
            keep = logits.float().softmax(-1)[..., _KEEP].double().cpu().numpy()
            num_tokens = [len(ids) for ids in chunks[start : start + _BATCH_SIZE]]
            probabilities += [row[1 : 1 + n] for row, n in zip(keep, num_tokens, strict=True)]
        return probabilities

    def _around(self) -> tuple[int, int]:
        """Tokens before and after every chunk."""
        known = self._tokenizer
        first = known.bos_token_id if known.cls_token_id is None else known.cls_token_id
        last = known.eos_token_id if known.sep_token_id is None else known.sep_token_id
        return first, last

    def _try(self, name: str) -> None:
        """Refuses a classifier that does not run, before the server starts."""
        if None in self._around():
            reason = "expected a tokenizer with cls_token and sep_token, around each text"
            raise _refusal(name, reason)
        try:
            self._probabilities([np.full(self._max_tokens - 2, self._around()[0])])
        except (IndexError, RuntimeError, ValueError) as error:
            reason = f"does not run on {self._max_tokens} tokens ({error})"
            raise _refusal(name, reason) from None
