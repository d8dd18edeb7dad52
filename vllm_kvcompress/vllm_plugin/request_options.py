"""What a single request may say about its compression, in `vllm_xargs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from vllm_kvcompress.config import RequestOptions, Settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.prompts.settings import REQUEST_RATE

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

_PREFIX = RequestOptions.prefix
_VLLM_OWN = "kv_transfer_params"
_LIMITED = "RequestCheck_"


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
    own = given.pop(_VLLM_OWN, None)
    if not isinstance(own or {}, Mapping):  # vLLM answers with a 500
        raise ConfigError(f"{_VLLM_OWN}: expected an object, found {own!r}; leave it out.")
    return RequestOptions.from_dict(
        {
            key.removeprefix(_PREFIX): value
            for key, value in given.items()
            if key.startswith(_PREFIX)
        }
    )


def check_allowed(options: RequestOptions, settings: Settings) -> None:
    """Refuses what a server with these settings does not let a request choose.

    Raises:
        ConfigError: the reason.
    """
    chosen = settings.for_request(options.policy, options.budget)
    settings.request_read_rule(options.read)
    if options.prepare:
        check_preparation(chosen)


def check_preparation(settings: Settings) -> None:
    """Refuses preparations where nothing is kept, or the policy does more than choose.

    Raises:
        ConfigError: the reason.
    """
    from vllm_kvcompress.policies import describe

    if not settings.reuse_contexts:
        raise ConfigError(
            "vllm_xargs kv_prepare: this server keeps no contexts; start it with "
            "--kv-reuse-contexts."
        )
    kinds = {trigger.kind for trigger in settings.triggers}
    if not settings.compresses or not kinds & {"prompt", "chunk"}:
        raise ConfigError(
            f"vllm_xargs kv_prepare: with policy {settings.policy}, budget {settings.budget} and "
            f"trigger {settings.trigger} no context is compressed; leave it out."
        )
    if merging := [part.name for part in describe(settings.policy) if part.stages.merge]:
        raise ConfigError(
            f"vllm_xargs kv_prepare: {merging[0]} makes something of the evicted tokens, and what "
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
            chosen = ", ".join(f"kv_{name}" for name in options.to_dict())
            raise ConfigError(
                f"vllm_xargs {chosen}: this server lets no request choose, and keeps no contexts; "
                "leave it out."
            )
        check_allowed(options, cls.settings)
        if options.prepare and sampling_params.max_tokens != 1:
            raise ConfigError(
                f"vllm_xargs kv_prepare: expected max_tokens 1, found {sampling_params.max_tokens};"
                " what is prepared is for later requests."
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
