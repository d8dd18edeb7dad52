"""Which KV connectors (`--kv-transfer-config`) work with compression, and why the others do not.

A connector is served if it stores whole blocks that others may read, names them by their tokens,
takes a hit that is cut, and lets go of a request's blocks when it is told that the request ended
(`scheduler_side/whole_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_kvcompress.vllm_plugin.compat.scheduler import child_connectors

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig

    from vllm_kvcompress.config.settings import Settings

# Others are served if they are subclasses of one of these.
SERVED = ("ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector")
_SEVERAL = "MultiConnector"
# Stores all slots of a prompt in the prompt's first step.
_READS_WHOLE = "ExampleConnector"
_SENDS = (
    "hands a request's blocks to another engine when the prompt has been read, and needs all of "
    "them, whole, until they are sent"
)
REFUSED = {
    "DecodeBenchConnector": "fills the cache with made-up keys, of which no policy can choose",
    "ExampleHiddenStatesConnector": "stores hidden states of draft models, and no cache",
    "FlexKVConnectorV1": "takes what it offers only whole, and was not run",
    "HF3FSKVConnector": "takes what it offers only whole, and was not run",
    "HiSparseConnector": "keeps the cache of models whose indexer reads evicted tokens",
    "LMCacheConnectorV1": "takes what it offers only whole, while policies need the last queries",
    "LMCacheMPConnector": "takes what it offers only whole, while policies need the last queries",
    "MoRIIOConnector": _SENDS,
    "MooncakeConnector": _SENDS,
    "MooncakeStoreConnector": "keeps a request's blocks until they are stored, behind its event",
    "NixlConnector": _SENDS,
    "NixlPullConnector": _SENDS,
    "NixlPushConnector": _SENDS,
}
_UNKNOWN = "is not known to store only what was computed before an event"


def reasons_against_connector(config: VllmConfig, settings: Settings) -> Iterator[str]:
    """Yields a refusal for everything about --kv-transfer-config that does not work."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    yield from reasons_against_names(transfer)
    for name in _unknown(transfer):
        yield _refusal(name, _UNKNOWN)
    if settings.read is not None:
        yield (
            "--kv-read computes tokens from a part of the cache, and a connector would store them "
            "for requests that read everything; remove --kv-read or --kv-transfer-config."
        )
    if config.scheduler_config.disable_hybrid_kv_cache_manager and _has_other_layers(config):
        yield (
            f"--kv-transfer-config: {transfer.kv_connector} knows of one kind of layers, and "
            f"{config.model_config.architecture} has several, of which only full attention is "
            "compressed; use OffloadingConnector."
        )


def reads_prompts_whole(connector: Any) -> bool:
    """Whether a connector's prompts have to be read in one step, since it stores them in that."""
    several = KVConnectorFactory.get_connector_class_by_name(_SEVERAL)
    if isinstance(connector, several):
        return any(map(reads_prompts_whole, child_connectors(connector)))
    return isinstance(connector, KVConnectorFactory.get_connector_class_by_name(_READS_WHOLE))


def reasons_against_names(transfer: KVTransferConfig) -> Iterator[str]:
    """Yields a refusal for connectors of vLLM's own that are not served.

    It needs their names alone: some of their modules import packages that need not be there.
    """
    for each in _connectors(transfer):
        name = str(each.kv_connector)
        if name in REFUSED and not each.kv_connector_module_path:
            yield _refusal(name, REFUSED[name])


def _unknown(transfer: KVTransferConfig) -> Iterator[str]:
    """Yields connectors whose class is none that is served, nor made of one."""
    served = tuple(map(KVConnectorFactory.get_connector_class_by_name, SERVED))
    for each in _connectors(transfer):
        if not issubclass(KVConnectorFactory.get_connector_class(each), served):
            yield str(each.kv_connector)


def _connectors(transfer: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yields the configuration of a connector, or of those inside a MultiConnector."""
    if transfer.kv_connector != _SEVERAL:
        yield transfer
        return
    for child in transfer.kv_connector_extra_config.get("connectors", ()):
        yield from _connectors(type(transfer)(**child))


def _refusal(name: str, reason: str) -> str:
    return (
        f"--kv-transfer-config: {name} {reason}; use {', '.join(SERVED[:-1])} or {SERVED[-1]}, or "
        "serve without --kv-policy."
    )


def _has_other_layers(config: VllmConfig) -> bool:
    """Whether a model has layers beside those of full attention."""
    model = config.model_config
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    windows = getattr(text, "sliding_window", None), model.attention_chunk_size
    return bool(model.is_hybrid or any(windows) or kinds - {"full_attention"})
