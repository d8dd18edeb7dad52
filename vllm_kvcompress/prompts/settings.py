"""What an operator says about shorter prompts. No torch, no transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vllm_kvcompress.errors import ConfigError

METHOD = "llmlingua2"
REQUEST_RATE = "prompt_rate"  # of a request's vllm_xargs
MOST_FORCED = 100  # as the authors' package
LEAST_RATE = 0.01  # the threshold is a whole percentile
DEFAULT_RATE = 0.5
DEFAULT_MIN_TOKENS = 64  # questions and short replies say little that could be left out
# Of whom texts are, and those that stay whole unless they are given a rate of their own.
ROLES = ("user", "assistant", "tool", "system", "question", "tools")
WHOLE_ROLES = ("system", "question", "tools")


@dataclass(frozen=True)
class PromptSettings:
    """How chat messages are shortened; see `from_dict` for the keys.

    Attributes:
        compressor: `llmlingua2:MODEL`, a token classifier's folder or name.
        rate: kept fraction of a text's tokens, as the classifier counts them.
        target_tokens: instead of `rate`: what all texts of a request together come down to.
        roles: other rates for texts of some roles; system prompts, the last user turn's question
            and the descriptions of tools stay whole unless they have one.
        force_tokens: texts that are kept wherever they stand, such as line breaks.
        min_tokens: texts with fewer tokens are left alone.
        min_request_rate, max_request_rate: rates that a request may ask for; None: none.
        device: where the classifier runs.
    """

    compressor: str
    rate: float = DEFAULT_RATE
    target_tokens: int | None = None
    roles: dict[str, float] = field(default_factory=dict, hash=False)
    force_tokens: tuple[str, ...] = ()
    min_tokens: int = DEFAULT_MIN_TOKENS
    min_request_rate: float | None = None
    max_request_rate: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        method, colon, model = str(self.compressor).partition(":")
        if method != METHOD or not colon or not model.strip():
            raise ConfigError(
                f"prompt compressor {self.compressor!r}: expected {METHOD}:MODEL, where MODEL is a "
                "token classifier's folder or name; write for example --prompt-compressor "
                f"{METHOD}:microsoft/llmlingua-2-xlm-roberta-large-meetingbank."
            )
        object.__setattr__(self, "rate", _rate("prompt rate", self.rate))
        self._check_counts()
        self._check_roles()
        forced = self.force_tokens
        if len(forced) > MOST_FORCED or not all(isinstance(t, str) and t for t in forced):
            raise ConfigError(
                f"prompt force_tokens: expected at most {MOST_FORCED} texts, none of them empty, "
                f"found {forced!r}."
            )
        if not isinstance(self.device, str) or not self.device:
            raise ConfigError(
                f"prompt device: expected cpu or such as cuda:1, found {self.device!r}."
            )
        self._check_request_limits()

    def _check_counts(self) -> None:
        target, least = self.target_tokens, self.min_tokens
        if target is not None and not _is_count(target, 1):
            raise ConfigError(
                f"prompt target_tokens: expected a number of tokens, at least 1, found {target!r}; "
                "leave it out to go by the rate."
            )
        if not _is_count(least, 0):
            raise ConfigError(
                f"prompt min_tokens: expected a number of tokens, at least 0, found {least!r}; "
                f"leave it out for {DEFAULT_MIN_TOKENS}."
            )

    def _check_roles(self) -> None:
        unknown = [role for role in self.roles if role not in ROLES]
        if unknown:
            raise ConfigError(
                f"prompt role {unknown[0]!r}: not known; roles are {', '.join(ROLES)}."
            )
        rates = {role: _rate(f"prompt rate of {role}", r) for role, r in self.roles.items()}
        object.__setattr__(self, "roles", rates)

    def _check_request_limits(self) -> None:
        bounds = (self.min_request_rate, self.max_request_rate)
        if bounds == (None, None):
            return
        if None in bounds or not _rate("", bounds[0]) <= _rate("", bounds[1]):
            raise ConfigError(
                f"prompt rates of requests from {bounds[0]} to {bounds[1]}: expected both, in this "
                "order, such as --prompt-min-request-rate 0.3 --prompt-max-request-rate 1.0."
            )
        for name, bound in zip(("min_request_rate", "max_request_rate"), bounds, strict=True):
            object.__setattr__(self, name, float(bound or 0))

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Settings from the section `prompts` of ours.

        Args:
            values: `compressor`, and optionally `rate`, `target_tokens`, `roles` (rates by role),
                `force_tokens` (a list), `min_tokens`, `min_request_rate` with `max_request_rate`,
                and `device`.

        Raises:
            ConfigError: an unknown or missing key, or a value that cannot work.
        """
        names = {each.name for each in dataclasses.fields(cls)}
        if not isinstance(values, Mapping):
            raise ConfigError(f"prompts: expected a section with a compressor, found {values!r}.")
        given = {str(key).replace("-", "_"): v for key, v in values.items() if v is not None}
        if unknown := sorted(given.keys() - names):
            raise ConfigError(
                f"prompts: unknown setting {', '.join(unknown)}; valid ones are "
                f"{', '.join(sorted(names))}."
            )
        if "compressor" not in given:
            raise ConfigError(
                "prompts: compressor missing; say what shortens prompts, such as "
                f"--prompt-compressor {METHOD}:MODEL, or the same as compressor in YAML."
            )
        if {"rate", "target_tokens"} <= given.keys():
            raise ConfigError(
                "prompts: rate and target_tokens both say how much stays; leave one of them out."
            )
        if not isinstance(given.get("roles", {}), Mapping):
            raise ConfigError(f"prompt roles: expected rates by role, found {given['roles']!r}.")
        if not isinstance(given.get("force_tokens", []), list | tuple):
            raise ConfigError(
                f"prompt force_tokens: expected a list of texts, found {given['force_tokens']!r}."
            )
        given["roles"] = {str(role): rate for role, rate in given.get("roles", {}).items()}
        given["force_tokens"] = tuple(given.get("force_tokens", ()))
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` of it gives equal settings. Defaults are left out."""
        values: dict[str, Any] = {"compressor": self.compressor}
        if self.target_tokens is None:
            values["rate"] = self.rate
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name not in (*values, "rate") and value not in (each.default, {}, ()):
                values[each.name] = list(value) if isinstance(value, tuple) else value
        return values

    def __str__(self) -> str:
        """What becomes of messages, in a few words."""
        target = self.target_tokens
        left = f"{self.rate:g} of their tokens" if target is None else f"{target} tokens"
        return f"messages of chats are shortened to {left} by {self.model}"

    @property
    def model(self) -> str:
        """The classifier's folder or name."""
        return self.compressor.partition(":")[2]

    def rate_of(self, role: str, rate: float) -> float:
        """The kept fraction of a role's texts, where `rate` is the request's; 1.0: all of it."""
        return self.roles.get(role, 1.0 if role in WHOLE_ROLES else rate)

    def request_rate(self, asked: object) -> float | None:
        """The rate of a request that asks for one; None: the server's.

        Raises:
            ConfigError: the server does not allow it.
        """
        if asked is None:
            return None
        rate = _rate(f"vllm_xargs {REQUEST_RATE}", asked)
        lowest, highest = self.min_request_rate, self.max_request_rate
        if lowest is None or highest is None:
            raise ConfigError(
                f"vllm_xargs {REQUEST_RATE}: this server lets no request choose; leave it out."
            )
        if not lowest <= rate <= highest:
            raise ConfigError(
                f"vllm_xargs {REQUEST_RATE} {rate:g}: this server allows rates from {lowest:g} to "
                f"{highest:g}."
            )
        return rate


def _rate(what: str, value: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not LEAST_RATE <= float(value) <= 1:  # type: ignore[arg-type]
        raise ConfigError(
            f"{what or 'prompt rate'}: expected a fraction of the text from {LEAST_RATE} to 1, "
            f"such as 0.5, found {value!r}."
        )
    return float(value)  # type: ignore[arg-type]


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
