"""Parses and checks what a request asks for in `vllm_xargs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from vllm_kvcompress.config.request import RequestOptions
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.settings import REQUEST_RATE
from vllm_kvcompress.scheduling.plan import Spans, num_in_spans

_PREFIX = RequestOptions.prefix
_VLLM_KEY = "kv_transfer_params"  # vLLM's own, with our prefix
_CLASS_PREFIX = "RequestCheck_"


def request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """Parses a request's `vllm_xargs`.

    Raises:
        ConfigError: a wrong value, or an unknown key that begins with `kv_`.
    """
    given = dict(extra_args or {})
    if REQUEST_RATE in given:  # a server that shortens prompts has taken it out
        raise ConfigError(
            f"vllm_xargs {REQUEST_RATE}: only the messages of chats are shortened, on a server "
            "with --prompt-compressor; leave it out."
        )
    transfer = given.pop(_VLLM_KEY, None)
    if not isinstance(transfer or {}, Mapping):  # vLLM would answer with HTTP 500
        raise ConfigError(f"{_VLLM_KEY}: expected an object, found {transfer!r}; leave it out.")
    options = {key.removeprefix(_PREFIX): given[key] for key in given if key.startswith(_PREFIX)}
    return RequestOptions.from_dict(options)


def check_allowed(options: RequestOptions, settings: Settings) -> None:
    """Checks that a server with these settings lets a request choose its options.

    Raises:
        ConfigError: it does not.
    """
    chosen = settings.for_request(options)
    settings.request_read_rule(options.read)
    if options.protect:
        check_protection(options.protect, chosen)
    if options.prepare:
        check_preparation(chosen)


def check_protection(spans: Spans, settings: Settings) -> None:
    """Checks that a request's settings can keep tokens whole, and have room for more than these.

    Raises:
        ConfigError: they cannot, or have not.
    """
    from vllm_kvcompress.policies.registry import merging_part

    if settings.read is not None:
        raise ConfigError(
            "vllm_xargs kv_protect: this server's decode steps read a part of the cache "
            f"({settings.read}), protected tokens or not; leave it out."
        )
    if (settings.keep_prompt or 1.0) < 1.0:
        raise ConfigError(
            f"vllm_xargs kv_protect: this server keeps {settings.keep_prompt:g} of every prompt "
            "(--kv-keep-prompt); leave it out."
        )
    if merging := merging_part(settings.policy):
        raise ConfigError(
            f"vllm_xargs kv_protect: {merging} merges evicted tokens in the order of the prompt, "
            "which protected ones would change; ask for another policy, or leave it out."
        )
    number = num_in_spans(spans, spans[-1][1])
    limits = [each for each in (settings.budget, settings.ceiling) if isinstance(each, int)]
    if limits and number >= min(limits) and settings.span_share == 1.0:
        raise ConfigError(
            f"vllm_xargs kv_protect: expected fewer tokens than the {min(limits)} that a head "
            f"keeps here, found {number}; protect less, or ask for a larger budget."
        )


def check_preparation(settings: Settings) -> None:
    """Checks that contexts can be prepared: they are kept, and the policy only evicts.

    Raises:
        ConfigError: they cannot.
    """
    from vllm_kvcompress.policies.registry import merging_part

    if not settings.reuse_contexts:
        raise ConfigError(
            "vllm_xargs kv_prepare: this server keeps no contexts; start it with "
            "--kv-reuse-contexts."
        )
    if settings.ceiling is not None:
        raise ConfigError(
            "vllm_xargs kv_prepare: a context is prepared while all of it is held, and this server "
            f"has a ceiling of {settings.ceiling} tokens; leave it out."
        )
    kinds = {trigger.kind for trigger in settings.triggers}
    if not settings.compresses or not kinds & {"prompt", "chunk"}:
        raise ConfigError(
            f"vllm_xargs kv_prepare: with policy {settings.policy}, budget {settings.budget} and "
            f"trigger {settings.trigger} no context is compressed; leave it out."
        )
    if merging := merging_part(settings.policy):
        raise ConfigError(
            f"vllm_xargs kv_prepare: {merging} merges evicted tokens, and preparing a "
            "context only evicts them; ask for another policy, or leave it out."
        )


class RequestCheck(LogitsProcessorV1, LogitsProcessorV2):
    """Has vLLM refuse requests with wrong `vllm_xargs` at admission, with HTTP 400.

    Logits processors are vLLM's place for checks of single requests. Model runners V1 and V2 load
    subclasses of their own interface only, so this is both. It leaves logits as they are: under V1
    greedy sampling never calls it, under V2 no request needs it.

    The class's name holds the server's settings, behind `RequestCheck_` (`plugin_options`):
    see "Hooks that vLLM lacks" in docs/vllm-versions.md.

    Attributes:
        settings: the server's; None: requests may choose nothing but a context.
    """

    settings: ClassVar[Settings | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accepts the arguments of either model runner, and keeps nothing."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Checks a request's options, and that the server allows them.

        Raises:
            ConfigError: an option is wrong or not allowed; the client gets the message.
        """
        options = request_options(sampling_params.extra_args)
        if not options.chooses:
            return
        if cls.settings is None and options.needs_permission:
            keys = ", ".join(_PREFIX + name for name in options.to_dict())
            raise ConfigError(
                f"vllm_xargs {keys}: this server lets no request choose, and keeps no contexts; "
                "leave it out."
            )
        if cls.settings is not None:
            check_allowed(options, cls.settings)
        if options.prepare and sampling_params.max_tokens != 1:
            raise ConfigError(
                f"vllm_xargs kv_prepare: expected max_tokens 1, found {sampling_params.max_tokens};"
                " what is prepared is for later requests."
            )

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Returns the logits, unchanged."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Tells model runner V1 that greedy sampling may skip this."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Ignores model runner V1's batch, since nothing is kept."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Tells model runner V2 that no logits of this request are changed."""
        return False


@cache
def __getattr__(name: str) -> type[RequestCheck]:
    """Makes the class for a server whose settings are in the name."""
    if not name.startswith(_CLASS_PREFIX):
        raise AttributeError(name)
    settings = Settings.from_dict(json.loads(bytes.fromhex(name.removeprefix(_CLASS_PREFIX))))
    return type(name, (RequestCheck,), {"__module__": __name__, "settings": settings})
