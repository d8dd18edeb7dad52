"""A server's settings: what to compress with, how far, and when.

Flags, YAML files and vLLM's `--additional-config` give them to `Settings.from_dict`; they reach
every process as a plain dictionary. Imports neither torch nor vLLM. `fields.py` says what can be
set; here is what excludes each other, what `auto` and `paper` stand for, and what requests change.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import model_validator

from vllm_kvcompress.config.auto import (
    AUTO,
    NO_POLICY,
    PROFILED_POLICIES,
    named_policy,
)
from vllm_kvcompress.config.derived import DerivedSettings
from vllm_kvcompress.config.fields import AUTO_MIN_ANSWER_TOKENS
from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.options import check_choice, check_limits
from vllm_kvcompress.prompts.roles import ROLES
from vllm_kvcompress.scheduling.protocols import PAPER, common_protocol
from vllm_kvcompress.scheduling.read_rule import ReadRule


class Settings(DerivedSettings):
    """What decides how requests are compressed.

    In `policy` and `request_policies`, `auto` is replaced by the policy that it stands for.
    """

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self._resolve()
        self._check_ceiling()
        self._check_protection()
        self._check_longer_budgets()
        self._check_shadow()
        self._check_spill()
        check_limits("--kv-{}-request-budget", self.min_request_budget, self.max_request_budget)
        self._check_reading()
        if self.prompts and (self.reuse_contexts or self.conversations):
            raise ValueError(
                "prompts: a shortened prompt has other tokens in the next turn (an answered "
                "question is shortened too), so that reuse_contexts and reuse_conversations would "
                "find nothing; remove them, or prompts."
            )
        return self

    def _resolve(self) -> None:
        """Replaces `auto` and `paper`, and defaults that depend on other fields."""
        if self.policy == AUTO and "min_answer_tokens" not in self.model_fields_set:
            self._set(min_answer_tokens=AUTO_MIN_ANSWER_TOKENS)
        if self.has_own_events and not {"budget", "trigger"} & self.model_fields_set:
            self._set(budget=1.0)
        self._set(policy=named_policy(self.policy, self.has_heads, self.ceiling or self.budget))
        self._set(request_policies=tuple(map(self._named, self.request_policies)))
        if self.trigger == PAPER:
            protocol = common_protocol(self.policies or (self.policy,))
            self._set(trigger=protocol.trigger)
            if protocol.budget is not None and "budget" not in self.model_fields_set:
                self._set(budget=protocol.budget)

    def _set(self, **values: Any) -> None:
        """Sets fields of a frozen model, which still count as not given."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_reading(self) -> None:
        """Refuses how requests read where nothing is read in part, or where prompts are."""
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
            other = "--kv-read" if self.read is not None else "--prompt-compressor"
            raise ValueError(
                f"protect (--kv-protect): expected no {other} beside it, which would leave parts "
                "of protected messages unread; remove one of the two."
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
            other = "--kv-read" if self.read is not None else "--kv-reuse-conversations"
            raise ValueError(
                f"keep_prompt (--kv-keep-prompt): expected no {other} beside it, with which parts "
                "of a prompt would not be read; remove one of the two."
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

    def _named(self, policy: str) -> str:
        """Resolves `auto` for a request; the profile is that of the server's own policy."""
        profiled = self.policy in PROFILED_POLICIES
        has_heads = self.measure_heads or (self.profile is not None and profiled)
        return named_policy(policy, has_heads, self.ceiling or self.budget)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` of it gives equal settings. Most defaults are left out."""
        always = {"policy": self.policy, "budget": self.budget, "trigger": self.trigger}
        return always | super().to_dict()

    def request_read_rule(self, read: float | None) -> ReadRule | None:
        """The read rule of a request that asks for fraction `read`; ConfigError: it may not."""
        rule = self.read_rule
        if read is None:
            return rule
        check_choice("kv_read", read, self.min_request_read, 1.0)
        assert rule is not None, "min_request_read without read"
        return rule.reading(read)

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
