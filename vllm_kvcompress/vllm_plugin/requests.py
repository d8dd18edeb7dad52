"""What a single request may say about its compression, in `vllm_xargs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import LogitsProcessor

from vllm_kvcompress.config import CONTEXT_TOKENS

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

PREFIX = "kv_"


def context_tokens(extra_args: Mapping[str, Any] | None) -> int | None:
    """Tokens at the beginning of the prompt that are compressed before the rest is read.

    What follows them attends to the compressed context, and is not compressed with it: so a
    document can be compressed before the question about it is known.

    Returns:
        None where the request does not say; then the whole prompt is compressed together.

    Raises:
        ValueError: not a positive whole number, or an unknown key that begins with `kv_`.
    """
    given = dict(extra_args or {})
    unknown = [key for key in given if key.startswith(PREFIX) and key != CONTEXT_TOKENS]
    unknown = [key for key in unknown if key != "kv_transfer_params"]  # vLLM's own
    if unknown:
        raise ValueError(
            f"vllm_xargs {unknown[0]}: not known; a request may set {CONTEXT_TOKENS} only."
        )
    value = given.get(CONTEXT_TOKENS)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(
            f"vllm_xargs {CONTEXT_TOKENS}: expected a whole number of tokens, found {value!r}."
        )
    if value < 1:
        raise ValueError(f"vllm_xargs {CONTEXT_TOKENS}: expected at least 1, found {value!r}.")
    return int(value)


class RequestCheck(LogitsProcessor):
    """Has vLLM refuse requests with wrong `vllm_xargs` at admission, with HTTP 400.

    Logits processors are vLLM's place for checks of single requests. This one leaves logits as
    they are, and says so, so that greedy sampling never calls it.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuses what `context_tokens` refuses.

        Raises:
            ValueError: the reason, which reaches the client.
        """
        context_tokens(sampling_params.extra_args)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, unchanged."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """True."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing to keep."""
