"""What a request asks for in `vllm_xargs`."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from vllm_kvcompress.options import Options, option
from vllm_kvcompress.scheduling.plan import Spans

MAX_SPANS = 64  # that a request may protect

Fraction = Annotated[float, Field(gt=0, le=1)]


def _integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _spans(value: object) -> Spans:
    """Parses [[0, 12], [40, 52]], or flat, as vLLM's server takes it: [0, 12, 40, 52]."""
    bounds: list[Any] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        bounds += item if isinstance(item, list | tuple) else [item]
    bounds = list(map(_integer, bounds))
    are_numbers = all(type(bound) is int and bound >= 0 for bound in bounds)
    are_pairs = len(bounds) % 2 == 0 and len(bounds) <= 2 * MAX_SPANS
    if not are_numbers or not are_pairs or not _are_spans(bounds):
        raise ValueError(
            f"expected starts and ends of up to {MAX_SPANS} spans of tokens, ascending and "
            f"disjoint, such as [0, 120, 400, 520], found {value!r}."
        )
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def _are_spans(bounds: list[int]) -> bool:
    """Whether every span has a token, and none begins within the one before."""
    pairs = enumerate(pairwise(bounds))
    return all(one < other + index % 2 for index, (one, other) in pairs)


def _boolean(value: object) -> object:
    return bool(value) if isinstance(value, int) and value in (0, 1) else value


class RequestOptions(Options):
    """A request's own options in `vllm_xargs`; `kv_` stands before each name."""

    name: ClassVar[str] = "vllm_xargs"
    prefix: ClassVar[str] = "kv_"

    context_tokens: Annotated[int, BeforeValidator(_integer)] | None = option(
        None,
        "compress that many first tokens of the prompt before the rest is read, so that the "
        "question does not decide what is kept",
        ge=1,
        example=1024,
    )
    prepare: Annotated[bool, BeforeValidator(_boolean)] = option(
        False,
        "the context is compressed at the end of the prompt, by what the rest of it attends to, "
        "and [kept for later requests](#preparing-a-context)",
        example=True,
    )
    policy: str | None = option(
        None,
        'another policy, if the operator allows it; `"none"`: not to be compressed',
        example="snapkv",
    )
    budget: Fraction | None = option(
        None, "another fraction of the prompt, within the operator's limits", example=0.5
    )
    ceiling: Annotated[int, BeforeValidator(_integer)] | None = option(
        None,
        "another [ceiling](#a-ceiling), from `--kv-min-request-ceiling` to `--kv-ceiling`",
        ge=1,
        example=512,
    )
    protect: Annotated[Spans, BeforeValidator(_spans)] = option(
        (),
        "spans of prompt tokens that [every head keeps](#what-is-never-evicted): start and end of "
        "each",
        example=[0, 120],
    )
    read: Fraction | None = option(
        None,
        "decode steps [read](#reading-less) another fraction of the cache, from "
        "`--kv-min-request-read` to 1.0",
        example=0.5,
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.prepare and self.context_tokens is None:
            raise ValueError(
                "vllm_xargs kv_prepare: expected kv_context_tokens beside it, found none; say how "
                "many tokens of the prompt are the context, and repeat that behind them."
            )
        return self

    @property
    def chooses(self) -> bool:
        """Whether it asks for something that not every server can do or allows."""
        return self.needs_permission or bool(self.protect)

    @property
    def needs_permission(self) -> bool:
        """Whether it asks for something that only an operator can allow."""
        asked = (self.policy, self.budget, self.ceiling, self.read)
        return self.prepare or any(each is not None for each in asked)
