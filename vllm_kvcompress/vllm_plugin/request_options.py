"""What a single request may say about its compression, in `vllm_xargs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from vllm_kvcompress.config import (
    CONTEXT_TOKENS,
    REQUEST_BUDGET,
    REQUEST_POLICY,
    REQUEST_READ,
    Settings,
)
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.settings import REQUEST_RATE
from vllm_kvcompress.scheduling.read_rule import is_part

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

PREFIX = "kv_"
PREPARE = "kv_prepare"
_KNOWN = (CONTEXT_TOKENS, PREPARE, REQUEST_POLICY, REQUEST_BUDGET, REQUEST_READ)
_VLLM_OWN = "kv_transfer_params"
_LIMITED = "RequestCheck_"


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks for.

    Attributes:
        context_tokens: at the beginning of the prompt, compressed before the rest is read. What
            follows them attends to the compressed context, and is not compressed with it: so a
            document can be compressed before the question about it is known. None: the whole
            prompt is compressed together.
        prepares: the context is compressed at the end of the prompt instead, by what the rest of
            that attends to, and kept for later requests that name the same one.
        policy: None: the server's.
        budget: kept fraction; None: the server's.
        read: fraction of what is held that decode steps read; None: the server's.
    """

    context_tokens: int | None = None
    prepares: bool = False
    policy: str | None = None
    budget: float | None = None
    read: float | None = None

    @property
    def chooses(self) -> bool:
        """Whether it asks for anything that the operator may not allow."""
        return self.prepares or (self.policy, self.budget, self.read) != (None, None, None)

    def allowed_by(self, settings: Settings) -> None:
        """Nothing, or why a server with these settings does not allow it.

        Raises:
            ConfigError: the reason.
        """
        chosen = settings.for_request(self.policy, self.budget)
        settings.request_read_rule(self.read)
        if self.prepares:
            check_preparation(chosen)


def request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """Reads a request's `vllm_xargs`.

    Raises:
        ConfigError: a value of another kind, or an unknown key that begins with `kv_`.
    """
    given = dict(extra_args or {})
    if REQUEST_RATE in given:  # where prompts are shortened, it has been taken out
        raise ConfigError(
            f"vllm_xargs {REQUEST_RATE}: only the messages of chats are shortened, on a server "
            "with --prompt-compressor; leave it out."
        )
    unknown = [key for key in given if key.startswith(PREFIX) and key not in (*_KNOWN, _VLLM_OWN)]
    if unknown:
        raise ConfigError(
            f"vllm_xargs {unknown[0]}: not known; a request may set {', '.join(_KNOWN)}."
        )
    if not isinstance(given.get(_VLLM_OWN) or {}, Mapping):  # vLLM answers with a 500
        raise ConfigError(
            f"{_VLLM_OWN}: expected an object, found {given[_VLLM_OWN]!r}; leave it out."
        )
    prepares = given.get(PREPARE)
    if prepares not in (None, 0, 1) or isinstance(prepares, float):
        raise ConfigError(f"vllm_xargs {PREPARE}: expected true or false, found {prepares!r}.")
    if prepares and given.get(CONTEXT_TOKENS) is None:
        raise ConfigError(
            f"vllm_xargs {PREPARE}: expected {CONTEXT_TOKENS} beside it, found none; say how many "
            "tokens of the prompt are the context, and repeat that behind them."
        )
    return RequestOptions(
        _context_tokens(given.get(CONTEXT_TOKENS)),
        bool(prepares),
        _policy(given.get(REQUEST_POLICY)),
        _part(REQUEST_BUDGET, given.get(REQUEST_BUDGET), "the prompt"),
        _part(REQUEST_READ, given.get(REQUEST_READ), "what is held"),
    )


def _context_tokens(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
        raise ConfigError(
            f"vllm_xargs {CONTEXT_TOKENS}: expected a whole number of tokens, found {value!r}."
        )
    if value < 1:
        raise ConfigError(f"vllm_xargs {CONTEXT_TOKENS}: expected at least 1, found {value!r}.")
    return int(value)


def _policy(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"vllm_xargs {REQUEST_POLICY}: expected a name, found {value!r}.")
    return value


def _part(name: str, value: Any, whole: str) -> float | None:
    if value is None:
        return None
    if not is_part(value):
        raise ConfigError(
            f"vllm_xargs {name}: expected a fraction of {whole} above 0 and at most 1, such as "
            f"0.25, found {value!r}."
        )
    return float(value)


def check_preparation(settings: Settings) -> None:
    """Refuses preparations where nothing is kept, or the policy does more than choose.

    Raises:
        ConfigError: the reason.
    """
    from vllm_kvcompress.policies import describe

    if not settings.reuse_contexts:
        raise ConfigError(
            f"vllm_xargs {PREPARE}: this server keeps no contexts; start it with "
            "--kv-reuse-contexts."
        )
    kinds = {trigger.kind for trigger in settings.triggers}
    if not settings.compresses or not kinds & {"prompt", "chunk"}:
        raise ConfigError(
            f"vllm_xargs {PREPARE}: with policy {settings.policy}, budget {settings.budget} and "
            f"trigger {settings.trigger} no context is compressed; leave it out."
        )
    if merging := [part.name for part in describe(settings.policy) if part.stages.merge]:
        raise ConfigError(
            f"vllm_xargs {PREPARE}: {merging[0]} makes something of the evicted tokens, and what "
            "scores a context only chooses; ask for another policy, or leave it out."
        )


class RequestCheck(LogitsProcessorV1, LogitsProcessorV2):
    """Has vLLM refuse requests with wrong `vllm_xargs` at admission, with HTTP 400.

    Logits processors are vLLM's place for checks of single requests. Model runners V1 and V2 load
    subclasses of their own interface only, so this is both. It leaves logits as they are, and says
    so to each: under V1 greedy sampling never calls it, under V2 no request asks for it.

    What the server allows is part of the class's name, `RequestCheck_` and the settings
    (`compat.plugin_options`): see "Hooks that vLLM lacks" in docs/vllm-versions.md.

    Attributes:
        settings: the server's; None: requests may choose nothing but a context.
    """

    settings: ClassVar[Settings | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what either model runner gives, and keeps nothing."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses what `request_options` refuses, and what the server does not allow.

        Raises:
            ConfigError: the reason, which reaches the client.
        """
        options = request_options(sampling_params.extra_args)
        if not options.chooses:
            return
        if cls.settings is None:
            asked = PREPARE if options.prepares else ", ".join(_KNOWN[2:])
            raise ConfigError(
                f"vllm_xargs {asked}: this server lets no request choose, and keeps no contexts; "
                "leave it out."
            )
        options.allowed_by(cls.settings)
        if options.prepares and sampling_params.max_tokens != 1:
            raise ConfigError(
                f"vllm_xargs {PREPARE}: expected max_tokens 1, found "
                f"{sampling_params.max_tokens}; what is prepared is for later requests."
            )

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """The logits, unchanged."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """True (asked by model runner V1)."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing to keep (told by model runner V1)."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """False: no logits of this request are changed (asked by model runner V2)."""
        return False


@cache
def __getattr__(name: str) -> type[RequestCheck]:
    """The class for a server whose settings are in the name."""
    if not name.startswith(_LIMITED):
        raise AttributeError(name)
    settings = Settings.from_dict(json.loads(bytes.fromhex(name.removeprefix(_LIMITED))))
    return type(name, (RequestCheck,), {"__module__": __name__, "settings": settings})
