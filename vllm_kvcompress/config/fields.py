"""What a user can set for a server: every field with its type, default, bounds and help.

What follows from the fields is in `derived.py`, and which of them exclude each other in
`settings.py`.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from vllm_kvcompress.config.auto import (
    AUTO,
    DEFAULT_BUDGET,
    DEFAULT_POLICY,
    PROFILED_POLICIES,
    PROFILED_POLICY,
)
from vllm_kvcompress.config.request import Fraction
from vllm_kvcompress.options import MAX_TOKENS, Options, option
from vllm_kvcompress.prompts.settings import PromptSettings
from vllm_kvcompress.scheduling.budgets import Budget
from vllm_kvcompress.scheduling.protocols import PAPER
from vllm_kvcompress.scheduling.read_rule import DEFAULT_MIN_TOKENS as READ_MIN_TOKENS
from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.scheduling.triggers import parse_triggers

Scalar = str | int | float | bool

SETTINGS_KEY = "kvcompress"  # our section of --additional-config and of YAML files
STATUS_PLUGIN = "kvcompress-status"  # adds the page at /kvcompress to the server
PROMPTS_PLUGIN = "kvcompress-prompts"  # shortens the messages of chats
PROTECT_PLUGIN = "kvcompress-protect"  # finds the tokens of chat roles
AUTO_MIN_ANSWER_TOKENS = 64  # with AUTO; see docs/results/conversations.md
DEFAULT_MIN_TOKENS = 256  # shorter prompts lose most and free least: docs/results/spans.md

Ceiling = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


def _names(value: object) -> object:
    """Splits names at commas, such as `"snapkv,none"`; a list becomes a tuple."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return value
    return tuple(name.strip() for name in names if name.strip())


def _by_tokens(value: object) -> object:
    """Takes keys as numbers, ascending, which JSON and flags have as texts."""
    if not isinstance(value, dict) or not all(str(key).isdecimal() for key in value):
        return value
    return {int(key): value[key] for key in sorted(value, key=int)}


def _switch(value: object) -> object:
    """Takes True as 1.0, and False as None."""
    return (1.0 if value else None) if isinstance(value, bool) else value


class SettingsFields(Options):
    """The fields of `Settings`, each checked by itself."""

    name: ClassVar[str] = SETTINGS_KEY
    flags: ClassVar[str] = "--kv-"

    policy: str = option(
        ...,
        f"what to keep: `auto` ([by the budget](policies.md#which-one) "
        f"{' or '.join(PROFILED_POLICIES)}, without measured heads {DEFAULT_POLICY}), or a "
        "[policy](policies.md) and modifiers joined by `+`, such as `adakv+criticalkv` "
        "(`vllm-kvcompress policies` lists them); `none`: stock vLLM",
        "P",
        min_length=1,
        example=AUTO,
    )
    budget: Budget = option(
        DEFAULT_BUDGET,
        "how much to keep, rounded up to whole blocks: a fraction of the prompt such as `0.25` "
        "(`1.0`: all), or tokens per KV head such as `2048`, in the mean over heads and layers; or "
        "`loss:0.02`, the smallest fraction that loses [no more nats per "
        "token](promises.md#a-budget-by-loss)",
        "B",
    )
    longer_budgets: Annotated[dict[Ceiling, Fraction], BeforeValidator(_by_tokens)] = option(
        {},
        "the fraction for prompts from that many tokens on, such as `4096=0.25`; may be repeated; "
        "`loss:` budgets set it",
        "TOKENS=F",
        flag="longer_budget",
        example={"4096": 0.25},
    )
    trigger: str = option(
        "prompt",
        "[when](#triggers): `prompt` (when the prompt has been read), `chunk` or `chunk:N` (while "
        "it is being read, so that memory stays bounded), `decode:N` (every N generated tokens), "
        "`pressure:0.9` (only while the pool is fuller than that, or a request waits for room); "
        "joined by commas; or `paper` ([as the policy's paper](policies.md#as-in-the-papers))",
        "T",
    )
    ceiling: Ceiling | None = option(
        None,
        "the [most that a request holds](#a-ceiling) after a step, prompt and answer together, in "
        "tokens per KV head (the mean over heads and layers), such as `1024`; without budget and "
        "trigger beside it only what exceeds it is compressed",
        "N",
        example=1024,
    )
    protect: Annotated[tuple[str, ...], BeforeValidator(_names)] = option(
        (),
        "`system`, `tools` or both: parts of chats that [every head keeps](#what-is-never-evicted)",
        "ROLE,...",
        example="system,tools",
    )
    protect_mode: Literal["whole", "fair"] = option(
        "whole",
        "what is kept of [protected tokens](#what-is-never-evicted): `whole`, all of them; `fair`, "
        "of each span at least the share that a head keeps of everything",
        "MODE",
        example="fair",
    )
    keep_prompt: Annotated[Fraction | None, BeforeValidator(_switch)] = option(
        None,
        "keep prompts [whole](#what-is-never-evicted), so that only generated tokens are evicted, "
        "or in every head the part `0.25`; with a ceiling, `decode:N` or --kv-after-reasoning",
        "F",
        const=1.0,
        example=0.25,
    )
    after_reasoning: Annotated[float, Field(ge=0, lt=1)] | None = option(
        None,
        "compress what a request holds [when its reasoning ends](#reasoning): keep this part of "
        "the prompt and the reasoning, such as `0.25`, and all protected tokens; `0`: only these; "
        "needs vLLM's --reasoning-config",
        "F",
        example=0.25,
    )
    params: dict[str, Scalar] = option(
        {},
        "a parameter of the policy, such as `window_size=64`; may be repeated",
        "NAME=VALUE",
        flag="param",
        repeats=True,
    )
    profile: str | None = option(
        None,
        "[measured heads](#measured-heads) for `auto` and `headkv`, or the file of `duoattention` "
        "or `triattention` (`vllm-kvcompress profile` makes one; `auto` finds the one in the "
        "model's directory)",
        "FILE",
    )
    measure_heads: bool = option(
        True,
        "measure no [heads](#measured-heads) when the engine starts; in YAML `false`. Without it, "
        "`auto` and `headkv` measure those that no file has",
    )
    min_tokens: int = option(
        DEFAULT_MIN_TOKENS,
        "compress no request that has fewer tokens than this",
        "N",
        ge=0,
        le=MAX_TOKENS,
    )
    min_answer_tokens: int = option(
        0,
        "leave prompts whole whose answer is limited (`max_tokens`) to fewer tokens than this, "
        f"while no request waits and half of the pool is free; {AUTO_MIN_ANSWER_TOKENS} with "
        "`auto` if not given",
        "N",
        ge=0,
        le=MAX_TOKENS,
    )
    request_policies: Annotated[tuple[str, ...], BeforeValidator(_names)] = option(
        (),
        "policies that a request may ask for instead, with `vllm_xargs` `kv_policy`; `none`: not "
        "to be compressed",
        "P,...",
        flag="allow_request_policies",
        example="snapkv,none",
    )
    min_request_budget: Budget | None = option(
        None,
        "smallest fraction that a request may ask for, with `vllm_xargs` `kv_budget`; needs "
        "--kv-max-request-budget",
        "B",
    )
    max_request_budget: Budget | None = option(
        None, "largest fraction that a request may ask for; needs the smallest", "B"
    )
    min_request_ceiling: Ceiling | None = option(
        None,
        "smallest ceiling that a request may ask for, with `vllm_xargs` `kv_ceiling`; up to "
        "--kv-ceiling",
        "N",
        example=256,
    )
    reuse_contexts: bool = option(
        False,
        "keep [contexts that requests name](#contexts-that-many-ask-about) with `vllm_xargs` "
        "`kv_context_tokens`, compressed, for later requests about the same one",
    )
    reuse_conversations: Literal["reuse", "anew", "auto", "off"] | None = option(
        None,
        "keep the compressed cache of finished requests for the next turn of their "
        "[conversation](#conversations); if the prefix cache has the history, too: `reuse` the "
        "compressed one, compress `anew` for the new question, or `auto` (default without a "
        f"value, and of {PROFILED_POLICY} without the option where it can); `off`: keep none",
        "HOW",
        const="auto",
    )
    spill: Annotated[float, Field(gt=0)] | None = option(
        None,
        "GiB of host memory, per engine, to which kept contexts and conversations "
        "[go](#host-memory) when the pool needs their blocks, such as `4`",
        "GIB",
        example=4,
    )
    read: str | None = option(
        None,
        "have decode steps [read](#reading-less) a part of the cache: `quest:0.25` of each head's "
        "pages, or `quest:2048` tokens of it; `longcache`, or "
        "`longcache:global=32,local=4096,span=32,top=64`: the first and last tokens and the best "
        "spans, with `prefill=512` also for prompts; frees no memory; needs no --kv-policy",
        "R",
    )
    read_min_tokens: int | None = option(
        None,
        f"read the whole cache of requests with fewer tokens (default {READ_MIN_TOKENS})",
        "N",
        ge=0,
        le=MAX_TOKENS,
    )
    min_request_read: Fraction | None = option(
        None,
        "smallest fraction that a request may ask for instead, with `vllm_xargs` `kv_read`; up to "
        "1.0, which reads everything",
        "F",
    )
    draft: str | None = option(
        None,
        "have the model [draft](#drafting) tokens that read a part of the cache, `quest:0.1` of "
        "each head's pages, and verify them reading all: outputs as without; needs no --kv-policy",
        "R",
    )
    attention: Literal["auto", "flash", "triton", "own"] = option(
        "auto",
        "[kernels for attention on GPUs](gpu.md#attention): `flash` or `triton` (vLLM's), `own` "
        "(this package's, for compressed requests, and with CUDA graphs of whole decode steps), or "
        "`auto`: own where it gives such graphs, else vLLM's",
        "K",
    )
    shadow: float = option(
        0.0,
        "[score](promises.md) this fraction of answers again with the full cache, while nothing "
        "waits, such as `0.01`; the loss is in `/metrics`",
        "F",
        ge=0,
        le=1,
        example=0.01,
    )
    calibration: str | None = option(
        None,
        "the file that `loss:` budgets follow from (default: where `vllm-kvcompress calibrate` "
        "writes it)",
        "FILE",
    )
    promised_loss: Annotated[float, Field(gt=0)] | None = option(
        None,
        "nats per token that answers are [promised](promises.md#a-budget-by-loss) to lose at most, "
        "for `/metrics` and an alert; `loss:` budgets set it",
        "F",
        example=0.02,
    )
    prompts: PromptSettings | None = option(
        None, "a section with the settings of [shorter prompts](#shorter-prompts)"
    )

    @field_validator("trigger", mode="before")
    @classmethod
    def _check_trigger(cls, value: object) -> str:
        return PAPER if value == PAPER else ",".join(map(str, parse_triggers(value)))

    @field_validator("params")
    @classmethod
    def _check_params(cls, params: dict[str, Scalar]) -> dict[str, Scalar]:
        for name, value in params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}: expected a finite number, found {value!r}.")
        return params

    @field_validator("read")
    @classmethod
    def _check_read(cls, read: str | None) -> str | None:
        if read is not None:
            ReadRule.parse(read)
        return read

    @field_validator("draft")
    @classmethod
    def _check_draft(cls, draft: str | None) -> str | None:
        if draft is not None and ReadRule.parse(draft).prefill_tokens:
            raise ValueError(f'"{draft}": prompts are always read in full; leave out prefill.')
        return draft
