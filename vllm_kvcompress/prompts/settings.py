"""Settings of shorter prompts. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, cast, get_args

from pydantic import Field, field_validator, model_validator

from vllm_kvcompress.options import MAX_TOKENS, Options, check_choice, check_limits, option

METHOD = "llmlingua2"
REQUEST_RATE = "prompt_rate"  # of a request's vllm_xargs
MAX_FORCED_TOKENS = 100  # as the authors' package
MIN_RATE = 0.01  # the threshold is a whole percentile
UNSHORTENED_ROLES = ("system", "question", "tools")  # unless they are given a rate of their own

Rate = Annotated[float, Field(ge=MIN_RATE, le=1)]
Role = Literal["user", "assistant", "tool", "system", "question", "tools"]
Text = Annotated[str, Field(min_length=1)]


class PromptRequestOptions(Options):
    """A request's own options of shorter prompts, in `vllm_xargs`."""

    name: ClassVar[str] = "vllm_xargs"
    prefix: ClassVar[str] = "prompt_"

    rate: Rate | None = option(
        None,
        "on a server with a [`--prompt-compressor`](#shorter-prompts), in a chat: another rate, "
        "within the operator's limits",
        example=0.5,
    )


class PromptSettings(Options):
    """How chat messages are shortened."""

    name: ClassVar[str] = "prompts"
    flags: ClassVar[str] = "--prompt-"

    compressor: str = option(
        ...,
        f"shorten the messages of chats with `{METHOD}:MODEL`, a token classifier's folder or "
        "name; system prompts, the last question and tools stay whole",
        "C",
        example=f"{METHOD}:microsoft/llmlingua-2-xlm-roberta-large-meetingbank",
    )
    rate: Rate = option(
        0.5, "kept fraction of a text's tokens, as the classifier counts them; `1.0`: all", "R"
    )
    target_tokens: int | None = option(
        None,
        "instead of a rate: tokens that the texts of a request come down to, together",
        "N",
        ge=1,
        le=MAX_TOKENS,
    )
    roles: dict[Role, Rate] = option(
        {},
        f"another rate for the texts of {', '.join(get_args(Role))}; may be repeated",
        "ROLE=R",
        flag="role_rate",
        repeats=True,
        example="tool=0.3",
    )
    force_tokens: tuple[Text, ...] = option(
        (),
        r"a text that is kept wherever it stands, such as `.` or `\n`; may be repeated",
        "TEXT",
        flag="force_token",
        repeats=True,
        max_length=MAX_FORCED_TOKENS,
        strict=False,  # YAML and JSON have lists
    )
    min_tokens: int = option(
        64,  # questions and short replies say little that could be left out
        "leave texts with fewer tokens alone",
        "N",
        ge=0,
        le=MAX_TOKENS,
    )
    min_request_rate: Rate | None = option(
        None,
        f"smallest rate that a request may ask for, with `vllm_xargs` `{REQUEST_RATE}`; needs "
        "--prompt-max-request-rate",
        "R",
    )
    max_request_rate: Rate | None = option(
        None, "largest rate that a request may ask for; needs the smallest", "R"
    )
    device: str = option("cpu", "where the classifier runs", "D", min_length=1, example="cuda:1")

    @field_validator("compressor")
    @classmethod
    def _check_compressor(cls, compressor: str) -> str:
        method, _, model = compressor.partition(":")
        if method != METHOD or not model.strip():
            raise ValueError(
                f"expected {METHOD}:MODEL, where MODEL is a token classifier's folder or name, "
                f"found {compressor!r}."
            )
        return compressor

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if {"rate", "target_tokens"} <= self.model_fields_set:
            raise ValueError(
                "prompts: rate and target_tokens both say how much stays; leave one of them out."
            )
        check_limits("--prompt-{}-request-rate", self.min_request_rate, self.max_request_rate)
        return self

    def __str__(self) -> str:
        """The settings in a few words, for the server's first line."""
        target = self.target_tokens
        kept = f"{self.rate:g} of their tokens" if target is None else f"{target} tokens"
        return f"messages of chats are shortened to {kept} by {self.model}"

    @property
    def model(self) -> str:
        """The classifier's folder or name."""
        return self.compressor.partition(":")[2]

    def rate_of(self, role: str, rate: float) -> float:
        """Returns the kept fraction of a role's texts, where `rate` is the request's."""
        return self.roles.get(cast(Role, role), 1.0 if role in UNSHORTENED_ROLES else rate)

    def request_rate(self, asked: object) -> float | None:
        """Checks the rate that a request asks for; None: the server's.

        Raises:
            ConfigError: the server does not allow it.
        """
        rate = PromptRequestOptions.from_dict({"rate": asked}).rate
        if rate is not None:
            check_choice(REQUEST_RATE, rate, self.min_request_rate, self.max_request_rate)
        return rate
