"""Asks an engine one request, and records which tokens every head keeps at its events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from vllm_kvcompress.compression.event import Event
from vllm_kvcompress.policies.base import LayerView, Selection
from vllm_kvcompress.prompts.roles import find_role_tokens, joined
from vllm_kvcompress.vllm_plugin.compat.engine import engine_scheduler, greedy

TEMPLATE_KEYS = (
    *("tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
_INCOMPLETE = "\ufffd"  # how decoders write a part of a character


class KeptPositions:
    """Follows the tokens of one request through its events; an `EventObserver`.

    Attributes:
        held: by layer of the cache group, the positions that each KV head holds of full blocks,
            in the order of their places.
        events: what each event did, as plain numbers.
    """

    def __init__(self) -> None:
        self.held: dict[int, list[list[int]]] = {}
        self.events: list[dict[str, Any]] = []

    def compressed(
        self, event: Event, layer: int, view: LayerView, values: Tensor, selection: Selection
    ) -> None:
        """Replaces what the heads of a layer held by what they keep."""
        plan, size = event.plan, view.block_size
        tail = range(plan.first_block * size, plan.end_block * size)
        held = self.held[layer] if plan.resident_blocks else [[] for _ in range(view.num_heads)]
        sources = [[*positions, *tail] for positions in held]
        kept = selection.kept_indices.split((selection.page_counts * size).tolist())
        self.held[layer] = [
            [source[index] for index in indices.tolist()]
            for source, indices in zip(sources, kept, strict=True)
        ]
        if layer == 0:
            protection = event.pipeline.protection
            self.events.append(
                {
                    "policy": plan.policy,
                    "trigger": plan.trigger,
                    "position": plan.position,
                    "compressed_tokens": plan.end_block * size,
                    "source_tokens": plan.num_source_blocks * size,
                    "kept_tokens": plan.num_kept_blocks * size,
                    "num_sinks": protection.num_sinks,
                    "num_recent": protection.num_recent,
                    "protected": plan.protected,
                }
            )


def watch(worker: Any) -> None:
    """Has a worker record what its events keep, layer by layer; for `collective_rpc`."""
    compression = getattr(worker, "compression", None)  # stock vLLM's workers have none
    for group in () if compression is None else compression.groups.values():
        group.runner.observer = KeptPositions()


def watched(worker: Any) -> list[tuple[dict[int, list[list[int]]], list[dict[str, Any]]]]:
    """Returns what each cache group keeps, by the model's numbers of layers, and its events."""
    compression = getattr(worker, "compression", None)
    groups = []
    for group in () if compression is None else compression.groups.values():
        numbers = {index: _number(name) for name, index in group.layer_index.items()}
        observer = group.runner.observer
        held = {numbers[layer]: heads for layer, heads in observer.held.items()}
        groups.append((held, observer.events))
    return groups


def _number(layer_name: str) -> int:
    """Returns a layer's number in the model, such as 3 of model.layers.3.self_attn.attn."""
    return next(int(part) for part in layer_name.split(".") if part.isdecimal())


def explain(llm: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Answers a request in the engine's process, and returns what its heads keep.

    Args:
        llm: a `vllm.LLM` of this package's settings.
        body: `prompt`, or `messages` and `TEMPLATE_KEYS`; `max_tokens`, `ignore_eos` and
            `vllm_xargs`; `roles` of a chat, whose tokens are protected. All else is ignored.

    Returns:
        `pieces`, the prompt's and the answer's text as (number of tokens, text); `held`, by layer
        and KV head the positions that are still held of the first `compressed_tokens`, all others
        being held by every head; `events`; `skipped`, reasons why events were left out.

    Raises:
        ValueError: the policy failed, or roles cannot be found.
    """
    if body.get("roles"):
        body = _protecting(llm, body)
    skipped: Counter[str] = Counter()
    _count_skipped(engine_scheduler(llm.llm_engine), skipped)
    llm.collective_rpc(watch)
    output = _answer(llm, body)
    choice = output.outputs[0]
    if choice.finish_reason == "error":
        raise ValueError("the request failed in the engine; its log says why.")
    held: dict[int, list[list[int]]] = {}
    ranks = llm.collective_rpc(watched)
    for layers, _ in (group for rank in ranks for group in rank):
        for layer, heads in layers.items():
            held[layer] = [*held.get(layer, []), *heads]  # the ranks divide a layer's heads
    events = ranks[0][0][1] if ranks[0] else []
    tokenizer = llm.get_tokenizer()

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    prompt, answer = list(output.prompt_token_ids), list(choice.token_ids)
    return {
        "prompt_tokens": prompt,
        "answer_tokens": answer,
        "pieces": {
            name: list(text_pieces(decode, tokens))
            for name, tokens in (("prompt", prompt), ("answer", answer))
        },
        "compressed_tokens": events[-1]["compressed_tokens"] if events else 0,
        "held": [{"layer": layer, "heads": held[layer]} for layer in sorted(held)],
        "events": events,
        "skipped": dict(skipped),
    }


def _count_skipped(scheduler: Any, skipped: Counter[str]) -> None:
    """Has the scheduler count the events that it leaves out, by reason, in `skipped` as well."""
    table, make_stats = getattr(scheduler, "table", None), scheduler.make_stats
    if table is None:
        return

    def counting(*args: Any, **kwargs: Any) -> Any:
        for (_, reason), number in table.skipped.items():
            skipped[reason] += number
        return make_stats(*args, **kwargs)  # which clears the counts

    scheduler.make_stats = counting


def _answer(llm: Any, body: dict[str, Any]) -> Any:
    """Returns vLLM's output, greedy, for the body of a chat or a completion."""
    params = greedy(
        max_tokens=body["max_tokens"],
        ignore_eos=bool(body.get("ignore_eos")),
        extra_args=body.get("vllm_xargs"),
    )
    if "messages" in body:
        template = {key: body[key] for key in TEMPLATE_KEYS if key in body}
        outputs = llm.chat(body["messages"], params, use_tqdm=False, **template)
    else:
        text = body["prompt"]
        prompt = {"prompt" if isinstance(text, str) else "prompt_token_ids": text}
        outputs = llm.generate([prompt], params, use_tqdm=False)
    return outputs[0]


def _protecting(llm: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Returns a chat that also protects the tokens of its `roles`, as a server's middleware does.

    A rendering is the prompt of a request for one token, which leaves nothing in the prefix cache.
    """
    from vllm_kvcompress.vllm_plugin.request_options import request_options

    given = body.get("vllm_xargs") or {}

    async def render(request: dict[str, Any]) -> list[int]:
        output = _answer(llm, {**request, "max_tokens": 1, "vllm_xargs": None})
        return list(output.prompt_token_ids)

    found = asyncio.run(find_role_tokens(body, body["roles"], render))
    llm.reset_prefix_cache()
    if found is None or not found.spans:
        return body
    spans = joined([*found.spans, *request_options(given).protect])
    flat = [bound for span in spans for bound in span]
    return {**body, "vllm_xargs": {**given, "kv_protect": flat}}


def text_pieces(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Yields (number of tokens, text) such that the texts add up to that of all tokens.

    A character that several tokens share makes these one piece. Each piece is decoded behind the
    one before, on which its text may depend.
    """
    before = begin = 0
    for end in range(1, len(tokens) + 1):
        known, text = decode(tokens[before:begin]), decode(tokens[before:end])
        is_whole = text.startswith(known) and not text.endswith(_INCOMPLETE)
        if is_whole or end == len(tokens):
            yield end - begin, text[len(known) :]
            before, begin = begin, end
