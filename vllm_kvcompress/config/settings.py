"""The user's settings: what to compress with, how far, and when.

Flags, YAML files and vLLM's `--additional-config` give them to `Settings.from_dict`; they reach
every process as a plain dictionary. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from vllm_kvcompress.config.auto import (
    AUTO,
    DEFAULT_BUDGET,
    DEFAULT_POLICY,
    NO_POLICY,
    PROFILED_FROM,
    PROFILED_POLICY,
    PROFILED_POLICY_BELOW,
    named_policy,
)
from vllm_kvcompress.config.request import Fraction, RequestOptions
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import MAX_TOKENS, Options, check_choice, check_limits, option
from vllm_kvcompress.prompts.roles import ROLES
from vllm_kvcompress.prompts.settings import PromptSettings
from vllm_kvcompress.rounding import ceil_div
from vllm_kvcompress.scheduling.budgets import Budget
from vllm_kvcompress.scheduling.protocols import PAPER, common_protocol
from vllm_kvcompress.scheduling.read_rule import DEFAULT_MIN_TOKENS as READ_MIN_TOKENS
from vllm_kvcompress.scheduling.read_rule import ReadRule
from vllm_kvcompress.scheduling.rule import CompressionRule, PolicyDemand
from vllm_kvcompress.scheduling.triggers import Trigger, parse_triggers

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


class Settings(Options):
    """What decides how requests are compressed.

    In `policy` and `request_policies`, `auto` is replaced by the policy that it stands for.
    """

    name: ClassVar[str] = SETTINGS_KEY
    flags: ClassVar[str] = "--kv-"

    policy: str = option(
        ...,
        f"what to keep: `auto` ([{PROFILED_POLICY} or {PROFILED_POLICY_BELOW}, without measured "
        f"heads {DEFAULT_POLICY}](policies.md#which-one)), or a [policy](policies.md) and "
        "modifiers joined by `+`, such as `adakv+criticalkv` (`vllm-kvcompress policies` lists "
        "them); `none`: stock vLLM",
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
        f"while no request waits and half of the pool is free (default {AUTO_MIN_ANSWER_TOKENS} "
        "with `auto`, else 0)",
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

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.policy == AUTO and "min_answer_tokens" not in self.model_fields_set:
            object.__setattr__(self, "min_answer_tokens", AUTO_MIN_ANSWER_TOKENS)
        if self.has_own_events and not {"budget", "trigger"} & self.model_fields_set:
            object.__setattr__(self, "budget", 1.0)
        policy = named_policy(self.policy, self.has_heads, self.ceiling or self.budget)
        object.__setattr__(self, "policy", policy)
        policies = tuple(map(self._named, self.request_policies))
        object.__setattr__(self, "request_policies", policies)
        if self.trigger == PAPER:
            self._follow_paper()
        self._check_ceiling()
        self._check_protection()
        self._check_longer_budgets()
        self._check_shadow()
        self._check_spill()
        check_limits("--kv-{}-request-budget", self.min_request_budget, self.max_request_budget)
        for name in ("read_min_tokens", "min_request_read"):
            if getattr(self, name) is not None and self.read is None:
                raise ValueError(
                    f"{name}: expected read beside it, found none; add --kv-read quest:0.25, or "
                    f"leave {name} out."
                )
        if self.min_request_read is not None and ReadRule.parse(str(self.read)).prefill_tokens:
            raise ValueError(
                f'min_request_read: with read "{self.read}" prompts are read in part, so requests '
                "can share prefixes only if all read alike; leave out min_request_read, or prefill."
            )
        if self.prompts and (self.reuse_contexts or self.conversations):
            raise ValueError(
                "prompts: a shortened prompt has other tokens in the next turn (an answered "
                "question is shortened too), so that reuse_contexts and reuse_conversations would "
                "find nothing; remove them, or prompts."
            )
        return self

    def _check_ceiling(self) -> None:
        """Refuses what some requests could not hold to, and limits out of order."""
        smallest = self.min_request_ceiling
        if smallest is not None and smallest > (self.ceiling or 0):
            raise ValueError(
                f"min_request_ceiling {smallest}: expected a ceiling of at least as many tokens "
                f"beside it, found {self.ceiling}; give --kv-ceiling, or leave it out."
            )
        if self.after_reasoning is not None and (self.policy == NO_POLICY or self.read):
            other = "policy none" if self.policy == NO_POLICY else f"read {self.read}"
            raise ValueError(
                f"after_reasoning: expected a policy that evicts, and answers that read all of "
                f"what is kept, found {other}; give a policy, such as auto, without --kv-read."
            )
        if self.ceiling is not None and NO_POLICY in (self.policy, *self.request_policies):
            raise ValueError(
                f"ceiling {self.ceiling}: a request with policy none holds all of its tokens; "
                "give a policy, such as auto, and let requests choose no none; or leave the "
                "ceiling out."
            )

    def _check_protection(self) -> None:
        """Refuses protected tokens that could not be kept, or prompts that leave nothing else."""
        if unknown := sorted(set(self.protect) - set(ROLES)):
            raise ValueError(
                f"protect (--kv-protect): expected {' or '.join(ROLES)}, found {unknown[0]!r}; "
                "requests name other tokens with vllm_xargs kv_protect."
            )
        if self.protect and (self.read is not None or self.prompts is not None):
            other = "read" if self.read is not None else "prompts"
            raise ValueError(
                f"protect: with {other} parts of protected messages would not be read; leave one "
                "of the two out."
            )
        if self.protect_mode == "fair" and self.keep_prompt is not None:
            raise ValueError(
                "protect_mode fair: keep_prompt says how much every head keeps of a prompt; leave "
                "one of the two out."
            )
        if self.span_share != 1.0 and self.after_reasoning is not None:
            raise ValueError(
                f"after_reasoning {self.after_reasoning:g}: expected protected tokens that are "
                "kept whole, as answers are; leave out protect_mode fair, or keep_prompt's part."
            )
        if self.keep_prompt is None:
            return
        if self.protect and self.keep_prompt < 1.0:
            raise ValueError(
                f"protect: with keep_prompt {self.keep_prompt:g} no part of a prompt is kept "
                "whole; leave one of the two out."
            )
        if self.read is not None or self.conversations is not None:
            other = "read" if self.read is not None else "reuse_conversations"
            raise ValueError(
                f"keep_prompt: with {other} parts of a prompt would not be read whole; leave one "
                "of the two out."
            )
        if not self.has_own_events and "decode" not in self.trigger:
            raise ValueError(
                f'keep_prompt: expected a ceiling or the trigger decode:N, found "{self.trigger}", '
                "which evicts nothing but prompts; give for example --kv-ceiling 1024."
            )

    def _check_shadow(self) -> None:
        """Refuses to score answers where nothing is compressed, or no prompt is read in full."""
        if not self.shadow:
            return
        if not self.acts:
            raise ValueError(
                f"shadow {self.shadow}: nothing is compressed, so every answer has the full cache; "
                "give a policy, such as auto, or leave it out."
            )
        if self.read is not None and ReadRule.parse(self.read).prefill_tokens:
            raise ValueError(
                f'shadow: with read "{self.read}" prompts are read in part, and the prefix cache '
                "holds what follows from that; leave out shadow, or prefill."
            )

    def _check_longer_budgets(self) -> None:
        """Refuses budgets of longer prompts where others have tokens, or are never compressed."""
        is_fraction = isinstance(self.budget, float)
        if self.longer_budgets and not (is_fraction and (self.compresses or self.has_own_events)):
            raise ValueError(
                "longer_budgets: expected a fraction below 1.0 as the budget of shorter prompts, "
                f"found {self.budget}; give for example budget 0.5."
            )

    def _check_spill(self) -> None:
        """Refuses host memory where no states are kept, or where they would lack something."""
        if self.spill is None:
            return
        if not (self.reuse_contexts or self.conversations or self.continues_unasked):
            raise ValueError(
                f"spill {self.spill:g}: expected contexts or conversations that are kept, found "
                "neither; add --kv-reuse-conversations or --kv-reuse-contexts, or leave it out."
            )
        if self.read is not None:
            raise ValueError(
                f'spill: with read "{self.read}" decode steps choose pages by summaries, which are '
                "not copied to host memory; leave one of the two out."
            )

    def _follow_paper(self) -> None:
        """Replaces the trigger `paper`, and a budget that is not given, by the paper's."""
        protocol = common_protocol(self.policies or (self.policy,))
        object.__setattr__(self, "trigger", protocol.trigger)
        if protocol.budget is not None and "budget" not in self.model_fields_set:
            object.__setattr__(self, "budget", protocol.budget)

    def _named(self, policy: str) -> str:
        """Resolves `auto` for a request; the profile is that of the server's own policy."""
        profiled = self.policy in (PROFILED_POLICY, PROFILED_POLICY_BELOW)
        has_heads = self.measure_heads or (self.profile is not None and profiled)
        return named_policy(policy, has_heads, self.ceiling or self.budget)

    @property
    def span_share(self) -> float | None:
        """Part of protected tokens that every head keeps; None: as much as it keeps of all."""
        if self.protect_mode == "fair":
            return None
        return 1.0 if self.keep_prompt is None else self.keep_prompt

    @property
    def has_heads(self) -> bool:
        """Whether the server's own policy has measured heads once it serves."""
        return self.measure_heads or self.profile is not None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` of it gives equal settings. Most defaults are left out."""
        always = {"policy": self.policy, "budget": self.budget, "trigger": self.trigger}
        return always | super().to_dict()

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        """Conditions under which requests are compressed."""
        return parse_triggers(self.trigger)

    @property
    def read_rule(self) -> ReadRule | None:
        """How much of the cache decode steps read; None: everything."""
        return None if self.read is None else ReadRule.parse(self.read, self.read_min_tokens)

    @property
    def draft_rule(self) -> ReadRule | None:
        """How much of the cache draft steps read; None: nothing is drafted."""
        return None if self.draft is None else ReadRule.parse(self.draft)

    def request_read_rule(self, read: float | None) -> ReadRule | None:
        """The read rule of a request that asks for fraction `read`; ConfigError: it may not."""
        rule = self.read_rule
        if read is None:
            return rule
        check_choice("kv_read", read, self.min_request_read, 1.0)
        assert rule is not None, "min_request_read without read"
        return rule.reading(read)

    @property
    def plugins(self) -> tuple[str, ...]:
        """The endpoint plugins that the API server needs for them."""
        of_prompts = (PROMPTS_PLUGIN,) if self.prompts is not None else ()
        return of_prompts + ((PROTECT_PLUGIN,) if self.protect else ())

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that compress requests of this server, its own first."""
        policies = dict.fromkeys((self.policy, *self.request_policies))
        return tuple(policy for policy in policies if policy != NO_POLICY)

    def for_request(self, options: RequestOptions, num_tokens: int = 0) -> Self:
        """Returns the settings of a request that asks for a policy, a budget or a ceiling.

        The server's parameters and profile are those of its own policy. What a request asks for is
        done however short its answer may be.

        Args:
            options: of the request.
            num_tokens: prompt tokens that are compressed, for `longer_budgets`.

        Raises:
            ConfigError: the server does not allow it.
        """
        policy, budget, ceiling = options.policy, options.budget, options.ceiling
        changes: dict[str, Any] = {}
        if policy is not None or budget is not None:
            changes["min_answer_tokens"] = 0
        policy = self.policy if policy is None else self._named(policy)
        allowed = dict.fromkeys((self.policy, *self.request_policies))
        if policy not in allowed:
            raise ConfigError(
                f'policy "{policy}": this server allows {" and ".join(allowed)}; choose one, or '
                "leave it out."
            )
        changes["policy"] = policy
        if budget is not None:
            check_choice("kv_budget", budget, self.min_request_budget, self.max_request_budget)
            changes["budget"] = budget
        elif fitting := [least for least in self.longer_budgets if least <= num_tokens]:
            changes["budget"] = self.longer_budgets[max(fitting)]
        if ceiling is not None:
            smallest = self.min_request_ceiling or self.ceiling
            check_choice("kv_ceiling", ceiling, smallest, self.ceiling)
            changes["ceiling"] = ceiling
        if policy != self.policy:
            changes |= {"params": {}, "profile": None}
        return self.model_copy(update=changes)

    @property
    def has_own_events(self) -> bool:
        """Whether requests have events that depend on neither budget nor trigger."""
        return self.ceiling is not None or self.after_reasoning is not None

    @property
    def repeats(self) -> bool:
        """Whether a request may be compressed more than once."""
        later = any(trigger.kind != "prompt" for trigger in self.triggers)
        later = later or self.has_own_events
        return later or self.conversations is not None or self.continues_unasked

    @property
    def conversations(self) -> str | None:
        """How conversations go on if that was asked for; None: it was not, or asked not to."""
        return None if self.reuse_conversations == "off" else self.reuse_conversations

    @property
    def continues_unasked(self) -> bool:
        """Whether conversations go on compressed without being asked to, where the engine can.

        With measured heads that forgets next to nothing (docs/results/conversations.md).
        """
        has_room = isinstance(self.budget, float) and PROFILED_FROM <= self.budget < 1
        is_measured = self.policy == PROFILED_POLICY and self.trigger == "prompt" and has_room
        return is_measured and self.reuse_conversations is None and self.prompts is None

    @property
    def compresses_while_generating(self) -> bool:
        """Whether many requests may come near an event at once, one token at a time."""
        by_interval = any(trigger.kind in ("chunk", "decode") for trigger in self.triggers)
        return by_interval or self.has_own_events

    @property
    def compresses(self) -> bool:
        """Whether requests that ask for nothing are compressed."""
        return self.policy != NO_POLICY and (self.budget != 1.0 or self.has_own_events)

    @property
    def may_compress(self) -> bool:
        """Whether any request can be compressed, whatever it asks for."""
        keeps_all = self.budget == 1.0 and self.min_request_budget in (None, 1.0)
        return bool(self.policies) and (self.has_own_events or not keeps_all)

    @property
    def acts(self) -> bool:
        """Whether any request is served otherwise than by stock vLLM."""
        return self.may_compress or self.read is not None or self.draft is not None

    @property
    def ceilings(self) -> tuple[int, ...]:
        """The smallest and the largest ceiling that requests have; none: they have no ceiling."""
        return tuple(each for each in (self.min_request_ceiling, self.ceiling) if each is not None)

    @property
    def pressure_mark(self) -> float | None:
        """Used part of the pool above which requests are compressed; None: never for that."""
        return next((t.mark for t in self.triggers if t.mark is not None), None)

    def rule(self, block_size: int, demand: PolicyDemand, split: int = 1) -> CompressionRule:
        """Returns the budget and triggers in tokens and blocks.

        Chunks and ceilings are whole blocks of vLLM's, of `split` blocks each.
        """
        if not self.compresses:
            return CompressionRule(block_size, fraction=1.0, at_prompt_end=False, split=split)
        allocated_size = block_size * split
        intervals = {trigger.kind: trigger.every for trigger in self.triggers}
        if self.budget == 1.0:
            intervals = {}  # only events of other settings compress
        chunk_tokens = intervals.get("chunk")
        if chunk_tokens is not None:
            chunk_tokens = ceil_div(chunk_tokens, allocated_size) * allocated_size
        is_fraction = isinstance(self.budget, float)
        return CompressionRule(
            block_size=block_size,
            fraction=self.budget if is_fraction else None,
            tokens=None if is_fraction else int(self.budget),
            at_prompt_end="prompt" in intervals,
            chunk_tokens=chunk_tokens,
            decode_tokens=intervals.get("decode"),
            pressure_mark=self.pressure_mark,
            min_tokens=self.min_tokens,
            span_share=self.span_share,
            ceiling_blocks=None if self.ceiling is None else self.ceiling // allocated_size,
            after_reasoning=self.after_reasoning,
            split=split,
            leaves_states=self.conversations is not None or self.continues_unasked,
            **vars(demand),
        )
