"""Measures which heads of a model carry what is copied, by having it repeat texts.

A text is read, then a request to repeat it and the text once more. A token's score is the highest
attention that any query of the repetition pays to it, over the queries and the query heads of a
group, as in KVzip (arXiv 2505.23416). Of all scores of the model the best half is looked at: a
head's share in it is the part of its tokens that belong there.

    text ... | request | text again ...
       ^~~~~~ attention ~~~~~^
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.evaluation import texts
from vllm_kvcompress.tools.evaluation.dense import DenseLayer, DenseModel
from vllm_kvcompress.tools.profiler import ProfileSettings, Scores, compressed_layers

NUM_SINKS = 4
BEST = 0.5  # part of the model's scores that is looked at
REQUEST = "\n\nRepeat the previous context exactly."
KINDS = ("prose", "source")  # of texts, in turn


def template(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens that a chat template puts before a context, and before a reply; few without one."""
    before, after = tokenizer.bos_token or "", "\n\n"
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": "CONTEXT"}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        before, _, after = text.partition("CONTEXT")
    return _ids(tokenizer, before), _ids(tokenizer, after)


def chunk_scores(layer: DenseLayer, num_context: int, start: int, end: int) -> Tensor:
    """[H, end - start] highest attention of the queries behind the context to a chunk of it.

    Keys of the chunk, the first tokens and the repetition itself compete, as in kvpress's
    KVzipPress.
    """
    num_sinks = min(NUM_SINKS, start)
    keys = layer.keys
    seen = torch.cat([keys[:, :num_sinks], keys[:, start:end], keys[:, num_context:]], dim=1)
    queries = layer.queries[num_context:].unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)
    found = torch.zeros(len(keys), end - start, device=keys.device)
    for member in range(queries.shape[1]):
        logits = layer.scale * queries[:, member] @ seen.mT
        own = logits[..., num_sinks + end - start :]
        own += torch.full_like(own[0], float("-inf")).triu(1)
        attention = logits.softmax(dim=-1)[..., num_sinks : num_sinks + end - start]
        found = torch.maximum(found, attention.amax(dim=1))
    return found


def best_shares(scores: Tensor) -> Tensor:
    """[layers, H] the part of each head's scores ([layers, H, n]) among the model's best."""
    best = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    best[scores.flatten().topk(round(BEST * scores.numel())).indices] = True
    return best.view(scores.shape).float().mean(dim=2)


def measure_heads(
    model: DenseModel,
    tokenizer: Any,
    settings: ProfileSettings,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Scores:
    """Shares of every head in the layers that are compressed.

    Args:
        model: the model.
        tokenizer: the model's.
        settings: how many texts, of how many tokens, and which.
        progress: wraps the loop over texts.

    Returns:
        By layer (full attention only), query head and text, from 0 to 1; query heads have what
        their KV head has.

    Raises:
        ConfigError: texts too long for the model, or too many.
    """
    config = model.model.config.get_text_config()
    before, reply = template(tokenizer)
    asked = [*_ids(tokenizer, REQUEST), *reply]
    _check(settings.length, len(before) + len(asked), config)
    compressed = compressed_layers(config)
    scores: Scores = [[[] for _ in range(config.num_attention_heads)] for _ in compressed]
    for number in progress(range(settings.num_samples)):
        text = text_tokens(tokenizer, settings, number)
        context = [*before, *text]
        layers = model.read([*context, *asked, *text], 1)[0]
        bounds = (len(context), len(before), len(context))
        found = torch.stack([chunk_scores(layers[index], *bounds) for index in compressed])
        for row, shares in zip(scores, best_shares(found).tolist(), strict=True):
            for head, values in enumerate(row):
                values.append(shares[head * len(shares) // len(row)])
    return scores


def text_tokens(tokenizer: Any, settings: ProfileSettings, number: int) -> list[int]:
    """A text of the wanted length: prose and source code in turn."""
    kind, nth = KINDS[number % len(KINDS)], settings.seed + number // len(KINDS)
    text = texts.pieces(kind, settings.length, nth, 1)[0]
    return _ids(tokenizer, text)[: settings.length]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _check(length: int, others: int, config: Any) -> None:
    most = getattr(config, "max_position_embeddings", None)
    if length < 1 or (most is not None and 2 * length + others > most):
        raise ConfigError(
            f"--length {length}: expected texts that fit twice into the model's {most} tokens, "
            f"beside {others} of the request; give a smaller one."
        )
