"""Which KV connectors (`--kv-transfer-config`) work with compression, and why the others do not.

A connector is served if it stores whole blocks that others may read, names them by their tokens,
takes a hit that is cut, and lets go of a request's blocks when it is told that the request ended
(`scheduler_side/whole_blocks.py`). NIXL, which moves a prompt's blocks from the engine that read it
to the one that generates, takes prompts whole; only requests that no event changes are sent.
LMCache takes what it has of a prompt whole, too, and keeps an ended request's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig

    from vllm_kvcompress.config.settings import Settings

# Others are served if they are subclasses of one of these.
STORES = ("ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector")
# Move prompts between engines.
SENDS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
# Keeps a request's blocks until they are stored, and offers what is loaded whole.
KEEPS = "LMCacheMPConnector"
_SEVERAL = "MultiConnector"
# Stores all slots of a prompt in the prompt's first step.
_READS_WHOLE = "ExampleConnector"
_NOT_RUN = "was not run; NixlConnector moves prompts between engines, too"
REFUSED = {
    "DecodeBenchConnector": "fills the cache with made-up keys, of which no policy can choose",
    "ExampleHiddenStatesConnector": "stores hidden states of draft models, and no cache",
    "FlexKVConnectorV1": "takes what it offers only whole, and was not run",
    "HF3FSKVConnector": "takes what it offers only whole, and was not run",
    "HiSparseConnector": "keeps the cache of models whose indexer reads evicted tokens",
    "LMCacheConnectorV1": "loads what it offers whole and within a step, while policies need the "
    f"last queries; {KEEPS} loads before it",
    "MoRIIOConnector": _NOT_RUN,
    "MooncakeConnector": _NOT_RUN,
    "MooncakeStoreConnector": "keeps a request's blocks until they are stored, behind its event",
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
    if takes_prompts_whole(transfer):
        yield from _reasons_against_whole_prompts(config, settings, transfer)
    elif config.scheduler_config.disable_hybrid_kv_cache_manager and _has_other_layers(config):
        yield (
            f"--kv-transfer-config: {transfer.kv_connector} knows of one kind of layers, and "
            f"{config.model_config.architecture} has several, of which only full attention is "
            "compressed; use OffloadingConnector."
        )


def _reasons_against_whole_prompts(
    config: VllmConfig, settings: Settings, transfer: KVTransferConfig
) -> Iterator[str]:
    """Yields a refusal for what does not work where a prompt is loaded whole."""
    if _has_other_layers(config):
        yield (
            f"--kv-transfer-config: {transfer.kv_connector} loads prompts whole, whose last tokens "
            f"are computed again for their queries, and {config.model_config.architecture} has "
            "layers that cannot go back; use OffloadingConnector."
        )
    if transfer.kv_connector == _SEVERAL and _has(transfer, (KEEPS,)):
        yield f"--kv-transfer-config: {KEEPS} was not run beside others; use it alone."
    if not sends_prompts(transfer):
        return
    if any(trigger.kind == "chunk" for trigger in settings.triggers):
        yield (
            "--kv-trigger chunk compresses while a prompt is read, and NIXL brings prompts that "
            "another engine has read; use --kv-trigger prompt."
        )
    if settings.ceiling is not None and reads_for_others(transfer):
        yield (
            "--kv-ceiling: expected kv_role kv_consumer in --kv-transfer-config, found "
            f"{transfer.kv_role}; an engine that sends prompts holds them whole."
        )


def reads_prompts_whole(transfer: KVTransferConfig) -> bool:
    """Whether prompts have to be read in one step, since a connector stores them in that."""
    kind = KVConnectorFactory.get_connector_class_by_name(_READS_WHOLE)
    classes = map(KVConnectorFactory.get_connector_class, _connectors(transfer))
    return any(issubclass(each, kind) for each in classes)


def sends_prompts(transfer: KVTransferConfig) -> bool:
    """Whether a connector moves prompts from an engine that reads them to one that generates."""
    return _has(transfer, SENDS)


def takes_prompts_whole(transfer: KVTransferConfig) -> bool:
    """Whether a connector loads all that it offers, before the step that computes the rest."""
    return _has(transfer, (*SENDS, KEEPS))


def keeps_blocks(transfer: KVTransferConfig) -> bool:
    """Whether a connector keeps a request's blocks until they are stored."""
    return _has(transfer, (KEEPS,))


def reads_for_others(transfer: KVTransferConfig) -> bool:
    """Whether an engine may read prompts from which another generates."""
    return sends_prompts(transfer) and transfer.is_kv_producer


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
    served = tuple(map(KVConnectorFactory.get_connector_class_by_name, STORES))
    for each in _connectors(transfer):
        # Modules of these log warnings, or fail, where their packages are not installed.
        if not _is(each, (*SENDS, KEEPS)) and not issubclass(
            KVConnectorFactory.get_connector_class(each), served
        ):
            yield str(each.kv_connector)


def _connectors(transfer: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yields the configuration of a connector, or of those inside a MultiConnector."""
    if transfer.kv_connector != _SEVERAL:
        yield transfer
        return
    for child in transfer.kv_connector_extra_config.get("connectors", ()):
        yield from _connectors(type(transfer)(**child))


def _has(transfer: KVTransferConfig, names: tuple[str, ...]) -> bool:
    """Whether one of the connectors is one of these of vLLM's."""
    return any(_is(each, names) for each in _connectors(transfer))


def _is(transfer: KVTransferConfig, names: tuple[str, ...]) -> bool:
    """Whether a connector is one of these of vLLM's."""
    return transfer.kv_connector in names and not transfer.kv_connector_module_path


def _refusal(name: str, reason: str) -> str:
    return (
        f"--kv-transfer-config: {name} {reason}; use {', '.join(STORES)}, {KEEPS} or {SENDS[0]}, "
        "or serve without --kv-policy."
    )


def _has_other_layers(config: VllmConfig) -> bool:
    """Whether a model has layers beside those of full attention."""
    model = config.model_config
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    windows = getattr(text, "sliding_window", None), model.attention_chunk_size
    return bool(model.is_hybrid or any(windows) or kinds - {"full_attention"})
