"""The user's settings: what to compress with, how far, and when.

They come from flags, from a YAML file or from vLLM's `--additional-config`, always through
`Settings.from_dict`, and travel to every process as a plain dictionary. No torch, no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.settings import PromptSettings
from vllm_kvcompress.scheduling.budgets import MOST_TOKENS, parse_budget
from vllm_kvcompress.scheduling.read_rule import ReadRule, check_reading, request_rule
from vllm_kvcompress.scheduling.rule import CompressionRule
from vllm_kvcompress.scheduling.triggers import TRIGGER_HELP, Trigger, parse_triggers

Scalar = str | int | float | bool

SETTINGS_KEY = "kvcompress"  # our section of --additional-config and of YAML files
STATUS_PLUGIN = "kvcompress-status"  # adds the page at /kvcompress to the server
PROMPTS_PLUGIN = "kvcompress-prompts"  # shortens the messages of chats
NO_POLICY = "none"
AUTO = "auto"  # stands for DEFAULT_POLICY, wherever a policy is named
DEFAULT_POLICY = "spans"  # see "Which one" in docs/policies.md
PROFILED_POLICY = "spans+headkv"  # instead, where heads were measured
CONTEXT_TOKENS = "kv_context_tokens"  # of a request's vllm_xargs, like the next three
REQUEST_POLICY = "kv_policy"
REQUEST_BUDGET = "kv_budget"
REQUEST_READ = "kv_read"
DEFAULT_BUDGET = 0.5  # of each prompt: loses next to nothing, see docs/results/spans.md
CONVERSATIONS = ("reuse", "anew", "auto")  # how one goes on from turn to turn
ATTENTION_KERNELS = ("auto", "flash", "triton", "own")
DEFAULT_MIN_TOKENS = 256  # shorter ones lose most and free least: docs/results/spans.md


def named_policy(policy: str, profile: str | None = None) -> str:
    """A policy string; the one that `auto` stands for, without or with a profile of heads."""
    if policy != AUTO:
        return policy
    return DEFAULT_POLICY if profile is None else PROFILED_POLICY


@dataclass(frozen=True)
class Settings:
    """Everything that decides how requests are compressed; see `from_dict` for the keys.

    Attributes:
        policy: parts joined by `+`, such as `adakv+criticalkv`; `none` serves stock vLLM. `auto` is
            replaced by what it stands for, here and among `request_policies`.
        budget: kept fraction of the prompt (float), or kept tokens per head (int); 0.5 unless said.
        triggers: when requests are compressed.
        params: overrides of the policy's parameters, by name.
        profile: path of the head profile or pattern file, for policies that need one.
        min_tokens: requests with fewer logical tokens are left alone.
        request_policies: other policies that a request may ask for; `none`: to stay uncompressed.
        min_request_budget, max_request_budget: fractions that a request may ask for; None: only
            the server's own budget.
        reuse_contexts: keep contexts that requests name and that were compressed, for later
            requests with the same one.
        reuse_conversations: keep what requests leave at their end, for later ones that begin with
            their tokens; where the prefix cache has these too: reuse (go on from what is kept),
            anew (compress all of them together) or auto. None: keep nothing.
        attention: kernels for attention on GPUs: vLLM's flash or triton; own: this package's for
            compressed requests, and for all where each has one token; auto: these where that
            gives CUDA graphs of whole steps, else vLLM's.
        read: how much of what is held a decode step reads, such as quest:0.25; None: everything.
        read_min_tokens: heads with fewer tokens read everything; None: the default.
        min_request_read: fraction from which on up to 1 a request may ask for; None: none may.
        prompts: how chat messages are made shorter before they are read; None: they are not.
    """

    policy: str
    budget: float | int = DEFAULT_BUDGET
    triggers: tuple[Trigger, ...] = (Trigger("prompt"),)
    params: dict[str, Scalar] = field(default_factory=dict, hash=False)
    profile: str | None = None
    min_tokens: int = DEFAULT_MIN_TOKENS
    request_policies: tuple[str, ...] = ()
    min_request_budget: float | None = None
    max_request_budget: float | None = None
    reuse_contexts: bool = False
    reuse_conversations: str | None = None
    attention: str = "auto"
    read: str | None = None
    read_min_tokens: int | None = None
    min_request_read: float | None = None
    prompts: PromptSettings | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or not self.policy:
            raise ConfigError(
                f"policy: expected a name, found {self.policy!r}; "
                "`vllm-kvcompress policies` lists them."
            )
        object.__setattr__(self, "policy", named_policy(self.policy, self.profile))
        others = tuple(map(self._named, self.request_policies))
        object.__setattr__(self, "request_policies", others)
        object.__setattr__(self, "budget", parse_budget(self.budget))
        if not self.triggers:
            raise ConfigError(f"trigger: expected at least one; {TRIGGER_HELP}.")
        if self.profile is not None and not isinstance(self.profile, str):
            raise ConfigError(
                f"profile: expected the path of a file, found {self.profile!r}; "
                "`vllm-kvcompress profile` makes one."
            )
        if not _is_count(self.min_tokens):
            raise ConfigError(
                f"min_tokens: expected a number of tokens, at least 0, found "
                f"{self.min_tokens!r}; leave it out for {DEFAULT_MIN_TOKENS}."
            )
        _check_params(self.params)
        self._check_request_limits()
        check_reading(self.read, self.read_min_tokens, self.min_request_read)
        self._check_prompts()
        if not isinstance(self.reuse_contexts, bool):
            raise ConfigError(
                f"reuse_contexts: expected true or false, found {self.reuse_contexts!r}."
            )
        if self.reuse_conversations not in (None, *CONVERSATIONS):
            raise ConfigError(
                f"reuse_conversations: expected one of {', '.join(CONVERSATIONS)}, found "
                f"{self.reuse_conversations!r}; leave it out to keep no conversations."
            )
        if self.attention not in ATTENTION_KERNELS:
            raise ConfigError(
                f"attention: expected one of {', '.join(ATTENTION_KERNELS)}, found "
                f"{self.attention!r}; leave it out for auto."
            )

    def _named(self, policy: str) -> str:
        """The policy that a request asks for; a profile is that of the server's own."""
        return named_policy(policy, self.profile if self.policy == PROFILED_POLICY else None)

    def _check_prompts(self) -> None:
        reuse = self.reuse_contexts or self.reuse_conversations is not None
        if self.prompts is not None and reuse:
            raise ConfigError(
                "prompts that are made shorter have other tokens in the next turn (a question, "
                "once answered, is shortened too), so that reuse_contexts and reuse_conversations "
                "would find nothing; remove them, or prompts."
            )

    def _check_request_limits(self) -> None:
        bounds = (self.min_request_budget, self.max_request_budget)
        if bounds == (None, None):
            return
        given = [parse_budget(bound) for bound in bounds if bound is not None]
        if len(given) < 2 or not all(isinstance(b, float) for b in given) or given[0] > given[1]:
            raise ConfigError(
                f"request budgets from {bounds[0]} to {bounds[1]}: expected both, as fractions in "
                "this order, such as --kv-min-request-budget 0.1 --kv-max-request-budget 0.5."
            )
        object.__setattr__(self, "min_request_budget", given[0])
        object.__setattr__(self, "max_request_budget", given[1])

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Settings from a section of YAML or of `--additional-config`.

        Args:
            values: `policy`, and optionally the other attributes by name; `trigger` in the place
                of `triggers`, which like `request_policies` is text or a list; `prompts` is for
                `PromptSettings.from_dict`.

        Raises:
            ConfigError: an unknown or missing key, or a value that cannot work.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{SETTINGS_KEY}: expected a section with a policy, found {values!r}."
            )
        given = {str(key).replace("-", "_"): v for key, v in values.items() if v is not None}
        unknown = sorted(given.keys() - set(SETTING_NAMES))
        if unknown:
            raise ConfigError(
                f"{SETTINGS_KEY}: unknown setting {', '.join(unknown)}; "
                f"valid ones are {', '.join(sorted(SETTING_NAMES))}."
            )
        if "policy" not in given:
            raise ConfigError(
                f"{SETTINGS_KEY}: policy missing; say what to compress with, such as --kv-policy "
                "auto, or the same as policy in YAML."
            )
        arguments: dict[str, Any] = dict(given)
        if "trigger" in arguments:
            arguments["triggers"] = parse_triggers(arguments.pop("trigger"))
        if "params" in arguments and not isinstance(arguments["params"], Mapping):
            raise ConfigError(
                f"params: expected names with values, found {arguments['params']!r}; "
                "write for example params: {window_size: 64}."
            )
        arguments["params"] = dict(arguments.get("params", {}))
        if "request_policies" in arguments:
            arguments["request_policies"] = _names(arguments["request_policies"])
        if "prompts" in arguments:
            arguments["prompts"] = PromptSettings.from_dict(arguments["prompts"])
        return cls(**arguments)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` of it gives equal settings. Defaults are left out."""
        values: dict[str, Any] = {"policy": self.policy, "budget": self.budget}
        values["trigger"] = self.trigger
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "triggers" or each.name in values or value in (each.default, {}, ()):
                continue
            if isinstance(value, PromptSettings):
                value = value.to_dict()
            values[each.name] = list(value) if isinstance(value, tuple) else copy(value)
        return values

    @property
    def read_rule(self) -> ReadRule | None:
        """How much decode steps read; None: everything."""
        return None if self.read is None else ReadRule.parse(self.read, self.read_min_tokens)

    def request_read_rule(self, read: float | None) -> ReadRule | None:
        """As `read_rule`, of a request that may ask for a part; ConfigError: it may not."""
        rule = self.read_rule
        return rule if read is None else request_rule(rule, read, self.min_request_read)

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
            lowest, highest = self.min_request_budget, self.max_request_budget
            if lowest is None or highest is None:
                raise ConfigError(
                    f"budget {budget}: this server lets no request choose a budget; leave it out."
                )
            if not lowest <= budget <= highest:
                raise ConfigError(
                    f"budget {budget}: this server allows fractions from {lowest} to {highest}."
                )
        if policy == self.policy:
            return replace(self, budget=chosen)
        return replace(self, policy=policy, budget=chosen, params={}, profile=None)

    @property
    def budget_text(self) -> str:
        """The budget in words; where it is the default, also how to change it."""
        if not isinstance(self.budget, float):
            return f"{self.budget} tokens per KV head"
        text = f"{self.budget:g} of each prompt"
        if self.budget == DEFAULT_BUDGET:
            text += f" (the default; --kv-budget, or budget under {SETTINGS_KEY}, changes it)"
        return text

    @property
    def trigger(self) -> str:
        """The triggers as text, joined by commas."""
        return ",".join(str(trigger) for trigger in self.triggers)

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

    def num_kept_blocks(self, num_full_blocks: int, block_size: int) -> int:
        """Blocks that `num_full_blocks` blocks are compressed to: at least 1, at most all."""
        num_tokens = num_full_blocks * block_size
        target = self.rule(block_size, window_size=0).target_blocks(num_tokens, num_tokens)
        return min(num_full_blocks, target)


# The keys of `Settings.from_dict`.
SETTING_NAMES = tuple("trigger" if f.name == "triggers" else f.name for f in fields(Settings))


def _names(value: object) -> tuple[str, ...]:
    """Names from `"snapkv,none"` or from a list of them."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(
            f"request_policies: expected names of policies, found {value!r}; write for example "
            "snapkv,none."
        )
    return tuple(part.strip() for part in parts if part.strip())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def _check_params(params: Mapping[str, object]) -> None:
    """Raises ConfigError unless every parameter is a finite scalar under a text name."""
    for name, value in params.items():
        finite = not isinstance(value, float) or math.isfinite(value)
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool):
            raise ConfigError(
                f"parameter {name}: expected text, a number or true/false, found {value!r}; "
                "`vllm-kvcompress policies` lists the parameters."
            )
        if not finite:
            raise ConfigError(f"parameter {name}: expected a finite number, found {value!r}.")
