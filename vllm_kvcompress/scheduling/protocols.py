"""When each policy's paper compresses, and to how much: what `--kv-trigger paper` stands for.

Papers that evict at every generated token do so here whenever a block is full (`decode:16`), since
memory is freed by blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vllm_kvcompress.errors import ConfigError

PAPER = "paper"


class Protocol(NamedTuple):
    """How a paper runs its policy.

    Attributes:
        trigger: when it compresses.
        budget: tokens per KV head; None: the paper has several, and no policy depends on one.
    """

    trigger: str
    budget: int | None = None


_ONCE = Protocol("prompt")
_GENERATING = Protocol("prompt,decode:16")
_IN_CHUNKS = Protocol("chunk:512", 2048)
PROTOCOLS = {
    "streamingllm": _GENERATING,
    "knorm": _ONCE,
    "keydiff": Protocol("chunk:128,decode:16"),
    "leverage": _ONCE,
    "tova": _GENERATING,
    "h2o": _GENERATING,
    "snapkv": _ONCE,
    "attention": _ONCE,
    "pyramidkv": _ONCE,
    "adakv": _ONCE,
    "headkv": _ONCE,
    "duoattention": _GENERATING,
    "expected": _ONCE,
    "rkv": Protocol("decode:128"),
    "triattention": Protocol("decode:128"),
    "spans": _ONCE,
    "keyspans": _ONCE,
    "d2o": _GENERATING,
    "momentkv": _GENERATING,
    "kvmerger": _GENERATING,
    "asymkv": _IN_CHUNKS,
    "kvslimmer": _IN_CHUNKS,
}


def protocol_of(policy: str) -> Protocol | None:
    """Returns the protocol of a policy string; None: no part of it has one.

    Of two policies in one string the one that compresses more often counts: `adakv` and `headkv`
    only divide the budget of what another policy chooses.
    """
    known = [PROTOCOLS[part] for part in policy.split("+") if part in PROTOCOLS]
    return max(known, key=lambda protocol: protocol != _ONCE, default=None)


def common_protocol(policies: Iterable[str]) -> Protocol:
    """Returns the protocol that all policies of a server have.

    Raises:
        ConfigError: one of them has none, or another one.
    """
    first, *others = policies
    protocol = protocol_of(first)
    if protocol is None:
        raise ConfigError(
            f'trigger "{PAPER}": expected a policy whose paper\'s protocol is known '
            f"({', '.join(PROTOCOLS)}), found {first}; name triggers, such as prompt."
        )
    for other in others:
        if protocol_of(other) != protocol:
            raise ConfigError(
                f'trigger "{PAPER}": expected policies that share a protocol, found {first} '
                f"({protocol.trigger}) and {other}; name triggers, such as prompt."
            )
    return protocol
