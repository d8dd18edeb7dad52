"""The user's settings: what to compress with, how far, and when.

They come from flags, from a YAML file or from vLLM's `--additional-config`, always through
`Settings.from_dict`, and travel to every process as a plain dictionary. No torch, no vLLM.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import MAX_TOKENS, Options, check_choice, check_limits, option
from vllm_kvcompress.prompts.settings import PromptSettings
from vllm_kvcompress.scheduling.budgets import Budget
from vllm_kvcompress.scheduling.read_rule import DEFAULT_MIN_TOKENS as READ_MIN_TOKENS
from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.scheduling.rule import CompressionRule
from vllm_kvcompress.scheduling.triggers import Trigger, parse_triggers

Scalar = str | int | float | bool

SETTINGS_KEY = "kvcompress"  # our section of --additional-config and of YAML files
STATUS_PLUGIN = "kvcompress-status"  # adds the page at /kvcompress to the server
PROMPTS_PLUGIN = "kvcompress-prompts"  # shortens the messages of chats
NO_POLICY = "none"
AUTO = "auto"  # stands for DEFAULT_POLICY, wherever a policy is named
DEFAULT_POLICY = "spans"  # see "Which one" in docs/policies.md
PROFILED_POLICY = "spans+headkv"  # instead, where heads were measured
DEFAULT_BUDGET = 0.5  # of each prompt: loses next to nothing, see docs/results/spans.md
DEFAULT_MIN_TOKENS = 256  # shorter ones lose most and free least: docs/results/spans.md

Part = Annotated[float, Field(gt=0, le=1)]


def named_policy(policy: str, profile: str | None = None) -> str:
    """A policy string; the one that `auto` stands for, without or with a profile of heads."""
    if policy != AUTO:
        return policy
    return DEFAULT_POLICY if profile is None else PROFILED_POLICY


def _names(value: object) -> object:
    """A tuple of names from `"snapkv,none"` or from a list."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return tuple(part.strip() for part in parts if part.strip())


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _switch(value: object) -> object:
    return bool(value) if isinstance(value, int) and value in (0, 1) else value


class Settings(Options):
    """Everything that decides how requests are compressed.

    `auto` is replaced by the policy that it stands for, in `policy` and `request_policies`.
    """

    name: ClassVar[str] = SETTINGS_KEY
    flags: ClassVar[str] = "--kv-"

    policy: str = option(
        ...,
        f"what to keep: `auto` ([{DEFAULT_POLICY}, or with a profile "
        f"{PROFILED_POLICY}](policies.md#which-one)), or a [policy](policies.md) and modifiers "
        "joined by `+`, such as `adakv+criticalkv` (`vllm-kvcompress policies` lists them); "
        "`none`: stock vLLM",
        "P",
        min_length=1,
        example=AUTO,
    )
    budget: Budget = option(
        DEFAULT_BUDGET,
        "how much to keep, rounded up to whole blocks: a fraction of the prompt such as `0.25` "
        "(`1.0`: all), or tokens per KV head such as `2048`, in the mean over heads and layers",
        "B",
    )
    trigger: str = option(
        "prompt",
        "[when](#triggers): `prompt` (when the prompt has been read), `chunk` or `chunk:N` (while "
        "it is being read, so that memory stays bounded), `decode:N` (every N generated tokens), "
        "`pressure:0.9` (only while the pool is fuller than that, or a request waits for room); "
        "joined by commas",
        "T",
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
        "[measured heads](#profiles) for `auto` and `headkv`, or pattern file for `duoattention` "
        "(`vllm-kvcompress profile` makes one; `auto` finds the one in the model's directory)",
        "FILE",
    )
    min_tokens: int = option(
        DEFAULT_MIN_TOKENS,
        "leave requests alone while they have fewer tokens than this",
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
        None, "smallest fraction that a request may ask for, with `vllm_xargs` `kv_budget`", "B"
    )
    max_request_budget: Budget | None = option(
        None, "largest fraction that a request may ask for", "B"
    )
    reuse_contexts: bool = option(
        False,
        "keep [contexts that requests name](#contexts-that-many-ask-about) with `vllm_xargs` "
        "`kv_context_tokens`, compressed, for later requests about the same one",
    )
    reuse_conversations: Literal["reuse", "anew", "auto"] | None = option(
        None,
        "keep what requests leave, compressed, for the next turn of their "
        "[conversation](#conversations); where the prefix cache has its beginning too: `reuse` (go "
        "on from what is kept), `anew` (compress the whole history together, so that the question "
        "decides) or `auto` (default where the flag has no value)",
        "HOW",
        const="auto",
    )
    read: str | None = option(
        None,
        "have decode steps [read](#reading-less) a part of what is held: `quest:0.25` of each "
        "head's pages, or `quest:2048` tokens of it; `longcache`, or "
        "`longcache:global=32,local=4096,span=32,top=64`: the first and last tokens and the best "
        "spans, with `prefill=512` also for prompts; frees no memory; works without --kv-policy, "
        "too",
        "R",
    )
    read_min_tokens: int | None = option(
        None,
        f"read everything of requests with fewer tokens (default {READ_MIN_TOKENS})",
        "N",
        ge=0,
        le=MAX_TOKENS,
    )
    min_request_read: Part | None = option(
        None,
        "smallest fraction that a request may ask for instead, with `vllm_xargs` `kv_read`; up to "
        "1.0, which reads everything",
        "F",
    )
    attention: Literal["auto", "flash", "triton", "own"] = option(
        "auto",
        "[kernels for attention on GPUs](gpu.md#attention): `flash` or `triton` (vLLM's), `own` "
        "(this package's, for compressed requests, and with CUDA graphs of whole decode steps), or "
        "`auto`: own where it gives such graphs, else vLLM's",
        "K",
    )
    prompts: PromptSettings | None = option(
        None, "a section with the settings of [shorter prompts](#shorter-prompts)"
    )

    @field_validator("trigger", mode="before")
    @classmethod
    def _check_trigger(cls, value: object) -> str:
        return ",".join(map(str, parse_triggers(value)))

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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        object.__setattr__(self, "policy", named_policy(self.policy, self.profile))
        others = tuple(map(self._named, self.request_policies))
        object.__setattr__(self, "request_policies", others)
        check_limits("--kv-{}-request-budget", self.min_request_budget, self.max_request_budget)
        for name in ("read_min_tokens", "min_request_read"):
            if getattr(self, name) is not None and self.read is None:
                raise ValueError(
                    f"{name}: expected read beside it, found none; add --kv-read quest:0.25, or "
                    f"leave {name} out."
                )
        if self.min_request_read is not None and ReadRule.parse(str(self.read)).prefill_tokens:
            raise ValueError(
                f'min_request_read: with read "{self.read}" prompts are read in part, and what the '
                "prefix cache shares of them is only the same for requests that read alike; leave "
                "out min_request_read, or prefill."
            )
        if self.prompts and (self.reuse_contexts or self.reuse_conversations):
            raise ValueError(
                "prompts that are made shorter have other tokens in the next turn (a question, "
                "once answered, is shortened too), so that reuse_contexts and reuse_conversations "
                "would find nothing; remove them, or prompts."
            )
        return self

    def _named(self, policy: str) -> str:
        """The policy that a request asks for; a profile is that of the server's own."""
        return named_policy(policy, self.profile if self.policy == PROFILED_POLICY else None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` of it gives equal settings. Most defaults are left out."""
        always = {"policy": self.policy, "budget": self.budget, "trigger": self.trigger}
        return always | super().to_dict()

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        """When requests are compressed."""
        return parse_triggers(self.trigger)

    @property
    def read_rule(self) -> ReadRule | None:
        """How much decode steps read; None: everything."""
        return None if self.read is None else ReadRule.parse(self.read, self.read_min_tokens)

    def request_read_rule(self, read: float | None) -> ReadRule | None:
        """The read rule of a request that may ask for a part; ConfigError: it may not."""
        rule = self.read_rule
        if read is None:
            return rule
        check_choice("kv_read", read, self.min_request_read, 1.0)
        assert rule is not None, "min_request_read without read"
        return rule.reading(read)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that compress requests of this server, its own first."""
        named = dict.fromkeys((self.policy, *self.request_policies))
        return tuple(name for name in named if name != NO_POLICY)

    def for_request(self, policy: str | None, budget: float | None) -> Self:
        """The settings of a request that asks for a policy, or a budget, or both.

        The server's parameters and profile are those of its own policy.

        Raises:
            ConfigError: the server does not allow it.
        """
        policy = self.policy if policy is None else self._named(policy)
        allowed = tuple(dict.fromkeys((self.policy, *self.request_policies)))
        if policy not in allowed:
            raise ConfigError(
                f'policy "{policy}": this server allows {" and ".join(allowed)}; choose one, or '
                "leave it out."
            )
        chosen = self.budget if budget is None else budget
        if budget is not None:
            check_choice("kv_budget", budget, self.min_request_budget, self.max_request_budget)
        changes: dict[str, Any] = {"policy": policy, "budget": chosen}
        if policy != self.policy:
            changes |= {"params": {}, "profile": None}
        return self.model_copy(update=changes)

    @property
    def budget_text(self) -> str:
        """The budget in words; where it is the default, also how to change it."""
        if not isinstance(self.budget, float):
            return f"{self.budget} tokens per KV head"
        text = f"{self.budget:g} of each prompt"
        if self.budget == DEFAULT_BUDGET:
            text += f" (the default; --kv-budget, or budget under {SETTINGS_KEY}, changes it)"
        return text

    def start_lines(self) -> list[str]:
        """What the settings do, and then what would serve this user better."""
        text = self._kept_text()
        if self.read_rule is not None:
            prompts = " and prompts" if self.read_rule.prefill_tokens else ""
            text += f"; decode steps{prompts} read {self.read}"
        if self.prompts is not None:
            text += f"; {self.prompts}"
        if not self.compresses or self.policy != DEFAULT_POLICY:
            return [text]
        advice = (
            "measured heads would lose far less in the same memory: run `vllm-kvcompress profile "
            "MODEL --kind headkv --out FILE` once, then serve with --kv-policy auto --kv-profile "
            "FILE"
        )
        return [text, advice]

    def _kept_text(self) -> str:
        if not self.policies:
            return "nothing is compressed"
        if not self.compresses and self.may_compress:
            return f"requests choose among {', '.join(self.request_policies)}; others stay whole"
        if not self.compresses:
            return f"policy {self.policy} with budget 1.0 keeps everything: stock vLLM"
        text = f"policy {self.policy}, budget {self.budget_text}, trigger {self.trigger}"
        if isinstance(self.budget, float):
            text += f"; a compressed prompt holds about {1 / self.budget:.3g} times fewer blocks"
        if self.profile is not None:
            text += f"; heads as measured in {self.profile}"
        return text

    @property
    def repeats(self) -> bool:
        """Whether a request may be compressed more than once."""
        later = any(trigger.kind != "prompt" for trigger in self.triggers)
        return later or self.reuse_conversations is not None

    @property
    def compresses_while_generating(self) -> bool:
        """Whether any number of requests may come near an event at once, one token at a time."""
        return any(trigger.kind in ("chunk", "decode") for trigger in self.triggers)

    @property
    def compresses(self) -> bool:
        """False when every request is to be served exactly as stock vLLM would."""
        keeps_all = isinstance(self.budget, float) and self.budget >= 1.0
        return self.policy != NO_POLICY and not keeps_all

    @property
    def may_compress(self) -> bool:
        """False when no request can be compressed, whatever it asks for."""
        asked = bool(self.policies) and (self.min_request_budget or 1.0) < 1.0
        others = any(name != NO_POLICY for name in self.request_policies)
        keeps_all = isinstance(self.budget, float) and self.budget >= 1.0
        return self.compresses or asked or (others and not keeps_all)

    @property
    def acts(self) -> bool:
        """False where stock vLLM would do the same for every request."""
        return self.may_compress or self.read is not None

    @property
    def pressure_mark(self) -> float | None:
        """Used part of the pool from which on requests are compressed for room, if they are."""
        return next((t.mark for t in self.triggers if t.mark is not None), None)

    def rule(
        self,
        block_size: int,
        window_size: int,
        least_blocks: int = 1,
        window_blocks: int = 0,
        blocks_on_top: int = 0,
    ) -> CompressionRule:
        """The budget and triggers in tokens and blocks.

        Args:
            block_size: tokens of a block; chunks are rounded up to whole blocks.
            window_size: the last queries that the policy observes.
            least_blocks: that an event leaves.
            window_blocks: for a request's last queries, under pressure.
            blocks_on_top: for a policy state that does not count in the budget.
        """
        if not self.compresses:
            return CompressionRule(block_size, fraction=1.0, at_prompt_end=False)
        every = {trigger.kind: trigger.every for trigger in self.triggers}
        chunk_tokens = every.get("chunk")
        if chunk_tokens is not None:
            chunk_tokens = math.ceil(chunk_tokens / block_size) * block_size
        is_fraction = isinstance(self.budget, float)
        return CompressionRule(
            block_size=block_size,
            fraction=self.budget if is_fraction else None,
            tokens=None if is_fraction else int(self.budget),
            at_prompt_end="prompt" in every,
            chunk_tokens=chunk_tokens,
            decode_tokens=every.get("decode"),
            pressure_mark=self.pressure_mark,
            min_tokens=self.min_tokens,
            window_size=window_size,
            least_blocks=least_blocks,
            window_blocks=window_blocks,
            blocks_on_top=blocks_on_top,
        )


class RequestOptions(Options):
    """What a request asks for in `vllm_xargs`, each name with `kv_` before it."""

    name: ClassVar[str] = "vllm_xargs"
    prefix: ClassVar[str] = "kv_"

    context_tokens: Annotated[int, BeforeValidator(_whole)] | None = option(
        None,
        "compress that many first tokens of the prompt before the rest is read, so that the "
        "question does not decide what is kept",
        ge=1,
        example=1024,
    )
    prepare: Annotated[bool, BeforeValidator(_switch)] = option(
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
    budget: Part | None = option(
        None, "another fraction of the prompt, within the operator's limits", example=0.5
    )
    read: Part | None = option(
        None,
        "decode steps [read](#reading-less) another fraction of what is held, from "
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
        """Whether it asks for anything that the operator may not allow."""
        return self.prepare or (self.policy, self.budget, self.read) != (None, None, None)
