"""Unsupported combinations are refused at start-up, with the reason and a remedy."""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests import tiny_models
from tests.conftest import Drafting
from tests.engine.host_memory import KeepingConnector
from tests.tiny_models import COMMON, FAMILIES
from vllm_kvcompress.config.settings import Settings
from vllm_kvcompress.errors import ConfigError, UnsupportedError
from vllm_kvcompress.policies import resolve_settings
from vllm_kvcompress.vllm_plugin.compat.layers import cache_scales, shared_caches, view_scales
from vllm_kvcompress.vllm_plugin.compat.options import plugin_options
from vllm_kvcompress.vllm_plugin.startup import distance_refusals, draft_refusals, registration
from vllm_kvcompress.vllm_plugin.startup.connector_refusals import (
    KEEPS,
    REFUSED,
    SENDS,
    STORES,
)
from vllm_kvcompress.vllm_plugin.startup.latent_refusals import reasons_against_latents
from vllm_kvcompress.vllm_plugin.startup.layer_refusals import (
    check_classes,
    check_groups,
    check_latents,
    check_layer,
    check_page_sizes,
)
from vllm_kvcompress.vllm_plugin.startup.quantized import reasons_against
from vllm_kvcompress.vllm_plugin.startup.refusals import check_engine
from vllm_kvcompress.vllm_plugin.worker_side.attention.latent_gpu import check_strides
from vllm_kvcompress.vllm_plugin.worker_side.worker_compression import WorkerCompression

SETTINGS = {"policy": "adakv", "budget": 0.25}
ENDS_WITH_7 = SimpleNamespace(natural_reasoning_end_token_ids=[7])
MLA = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "max_position_embeddings": 512,
}
# An MLA model that vLLM's configuration does not take for one, so no block size is set for it.
SARVAM = {
    "model_config.model_arch_config.is_deepseek_mla": False,
    "model_config.model_arch_config.architectures": ["SarvamMLAForCausalLM"],
    "cache_config.block_size": 32,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 128,
}
# Of the kind of multimodal Gemma 3, whose code wants torchvision.
PREFIX_LM = {
    "model_type": "paligemma",
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "text_config": {**COMMON, "model_type": "gemma"},
    "vision_config": VISION,
    "image_token_index": 250,
    "projection_dim": 128,
    "hidden_size": 128,
}
MAMBA = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}
STEP = {**COMMON, **FAMILIES["llama"], "architectures": ["Step1ForCausalLM"]}
LOOK_BACK = {
    **COMMON,
    **FAMILIES["gemma3"],
    "architectures": ["Rnj1ForCausalLM"],
    "layer_types": ["chunked_attention", "full_attention"] * 2,
}
ALIBI = {
    "model_type": "bloom",
    "architectures": ["BloomForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "n_layer": 2,
    "n_head": 4,
}
INKLING = {
    **COMMON,
    "model_type": "inkling_model",
    "architectures": ["InklingForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dense_mlp_idx": 2,
}
HYBRID = {**COMMON, **FAMILIES["qwen3_next"], "architectures": ["Qwen3NextForCausalLM"]}
CAPPED = {
    **COMMON,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
}
SHARING = {**COMMON, **FAMILIES["gemma3n"], "architectures": ["Gemma3nForCausalLM"]}


def engine_config(model: str, settings: dict[str, Any] | None, **options: Any) -> Any:
    """vLLM's own configuration for a model and options, without starting an engine."""
    from vllm.engine.arg_utils import EngineArgs

    given: dict[str, Any] = {"max_model_len": 256}
    if settings:
        paths = plugin_options(Settings(policy="adakv"))
        given |= {name: paths[name] for name in ("scheduler_cls", "worker_cls")}
        given["additional_config"] = {"kvcompress": settings}
    return EngineArgs(model=model, **{**given, **options}).create_engine_config()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"runner": "pooling"}, "pooling model finishes with its prompt.*serve it without"),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager.*remove it"),
    ],
    ids=["pooling", "no-hybrid"],
)
def test_vllm_options_that_exclude_compression_are_refused(
    llama: str, options: dict[str, Any], reason: str
) -> None:
    config = engine_config(llama, SETTINGS, **options)
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


def connector(name: str, **extra: Any) -> dict[str, Any]:
    """Makes an engine's options for a connector."""
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": config}


CONSUMER = connector("NixlConnector")
CONSUMER["kv_transfer_config"]["kv_role"] = "kv_consumer"


def test_every_connector_of_vllm_is_served_or_refused_with_a_reason(llama: str) -> None:
    known = set(KVConnectorFactory._registry)
    assert known == {*STORES, *SENDS, KEEPS, *REFUSED, "MultiConnector"}
    for name in known - {"MultiConnector"}:
        config = engine_config(llama, SETTINGS, **connector(STORES[0]))
        config.kv_transfer_config.kv_connector = name
        if name in (*STORES, *SENDS, KEEPS):
            check_engine(config)
            continue
        with pytest.raises(UnsupportedError, match=f"{name} .*; use .* or serve without"):
            check_engine(config)


@pytest.mark.parametrize(
    ("family", "settings", "options", "reason"),
    [
        (
            "llama",
            {},
            connector("MultiConnector", connectors=[connector("MooncakeConnector")]),
            "MooncakeConnector was not run",
        ),
        ("llama", {"policy": "none", "read": "quest:0.25"}, connector(STORES[0]), "--kv-read"),
        ("gemma3", {}, connector(STORES[0]), "one kind of layers.*use OffloadingConnector"),
        ("gemma3", {}, connector("OffloadingConnector"), None),
        ("gemma3", {}, connector("NixlConnector"), "has layers that cannot go back"),
        ("llama", {"trigger": "chunk:64"}, connector("NixlConnector"), "use --kv-trigger prompt"),
        ("llama", {"ceiling": 512}, connector("NixlConnector"), "kv_consumer.*, found kv_both"),
        ("llama", {"ceiling": 512}, CONSUMER, None),
        ("gemma3", {}, connector(KEEPS), "has layers that cannot go back"),
        ("llama", {"trigger": "chunk:64"}, connector(KEEPS), None),
        (
            "llama",
            {},
            connector("MultiConnector", connectors=[connector(KEEPS)]),
            "use it alone",
        ),
    ],
    ids=[
        *("several", "read", "window-layers", "hybrid"),
        *("sent-to-other-layers", "chunks", "producer-under-a-ceiling", "consumer"),
        *("kept-of-other-layers", "kept-with-chunks", "kept-beside-others"),
    ],
)
def test_what_connectors_exclude(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    reason: str | None,
) -> None:
    monkeypatch.setitem(KVConnectorFactory._registry, KEEPS, lambda: KeepingConnector)
    children = options["kv_transfer_config"]["kv_connector_extra_config"].get("connectors", ())
    for child in children:
        child |= child.pop("kv_transfer_config", {})
    model = str(tiny_models.build(family, tmp_path))
    config = engine_config(model, {**SETTINGS, **settings}, **options)
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


def test_connectors_of_other_packages_have_to_be_made_of_one_that_is_served(llama: str) -> None:
    options = connector("LossyExample")
    options["kv_transfer_config"]["kv_connector_module_path"] = "tests.engine.host_memory"
    check_engine(engine_config(llama, SETTINGS, **options))
    options["kv_transfer_config"] |= {
        "kv_connector": "DecodeBenchConnector",
        "kv_connector_module_path": KVConnectorFactory.get_connector_class_by_name(
            "DecodeBenchConnector"
        ).__module__,
    }
    with pytest.raises(UnsupportedError, match="DecodeBenchConnector is not known"):
        check_engine(engine_config(llama, SETTINGS, **options))


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({}, {}, None),
        (
            {},
            {"speculative_config.method": "dflash"},
            "with dflash was not run.*use draft_model or eagle or eagle3 or mtp or ngram or",
        ),
        (
            {"ceiling": 128, "trigger": "prompt,decode:32"},
            {"scheduler_config.async_scheduling": True},
            None,
        ),
        (
            {"after_reasoning": 0.25},
            {"scheduler_config.async_scheduling": True, "reasoning_config": ENDS_WITH_7},
            "end of the reasoning before it is known; remove .*, or add --no-async-scheduling",
        ),
        ({"trigger": "pressure:0.5"}, {}, "--kv-trigger pressure.*oldest of the queries.*decode:N"),
        ({"read": "quest:0.25"}, {}, "--kv-read.*one query of a request.*remove one of the two"),
    ],
    ids=[
        *("ngram", "dflash", "asynchronous", "asynchronous-reasoning"),
        *("pressure", "read"),
    ],
)
def test_speculative_methods_and_triggers_beside_them_are_checked(
    llama: str, settings: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    config = engine_config(llama, {**SETTINGS, **settings}, speculative_config=drafts)
    for path, value in changes.items():
        *parts, name = path.split(".")
        setattr(reduce(getattr, parts, config), name, value)
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


CUDA: dict[str, Any] = {"device_config.device_type": "cuda", "runner": "V2"}
TRITON = {"speculative_config.attention_backend": AttentionBackendEnum.TRITON_ATTN}


def mtp(**fields: object) -> dict[str, Any]:
    """Makes a draft model MTP layers, whose configuration has these fields."""
    config = "speculative_config.draft_model_config.hf_config"
    changes = {f"{config}.{name}": value for name, value in fields.items()}
    return {"speculative_config.method": "mtp", **changes}


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({}, {}, None),
        ({}, CUDA, None),
        ({}, {**CUDA, "runner": "V1"}, "vLLM chooses.*expected model runner V2.*unset both, or"),
        ({}, CUDA | TRITON, "vLLM chooses.*no attention_backend"),
        ({}, {"parallel_config.tensor_parallel_size": 2}, None),
        ({}, {"parallel_config.pipeline_parallel_size": 2}, "last stage only.*tensor-parallel"),
        ({}, {"speculative_config.parallel_drafting": True}, "masked tokens.*leave it out, or"),
        ({}, {"model_config.hf_text_config.num_kv_shared_layers": 2}, None),
        ({}, mtp(model_type="gemma4_mtp"), "layers read the model's cache.*, or use"),
        ({}, mtp(num_nextn_predict_layers=2), "each draft one token.*num_speculative_tokens 1, or"),
        ({}, mtp(num_nextn_predict_layers=1), None),
        ({}, {"kv_transfer_config": connector(STORES[0])}, "blocks of two sizes; remove one"),
        ({"reuse_contexts": True}, {}, "--kv-reuse-contexts with a draft model.*or use"),
        ({"reuse_conversations": "anew"}, {}, "--kv-reuse-conversations with a draft model"),
    ],
    ids=[
        *("none", "gpu", "runner-v1", "backend", "ranks", "stages", "parallel", "sharing"),
        *("shared-cache", "several-layers", "one-layer", "connector", "contexts", "conversations"),
    ],
)
def test_what_a_draft_model_excludes(
    llama: str,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    changes: dict[str, Any],
    reason: str | None,
) -> None:
    drafts = {"method": "draft_model", "model": llama, "num_speculative_tokens": 2}
    options: dict[str, Any] = changes.pop("kv_transfer_config", {})
    config = engine_config(llama, {**SETTINGS, **settings}, speculative_config=drafts, **options)
    changes = dict(changes)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(changes.pop("runner", "V1") == "V2")))
    for path, value in changes.items():
        *parts, name = path.split(".")
        setattr(reduce(getattr, parts, config), name, value)
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


def test_latent_rows_are_in_both_models_or_in_neither(
    llama: str, drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs MTP layers of a model with MLA draft; vLLM's kernel for CPUs takes short blocks."""
    latent, drafts = drafting("latent")
    config = engine_config(latent, {**SETTINGS, "policy": "snapkv"}, speculative_config=drafts)
    with pytest.raises(UnsupportedError, match=r"kernel for CPUs.*or use --speculative.*ngram"):
        check_engine(config)
    monkeypatch.setattr(draft_refusals, "takes_cpu_kernels", lambda _: False)
    check_engine(config)
    drafts = {"method": "draft_model", "model": llama, "num_speculative_tokens": 2}
    config = engine_config(latent, {**SETTINGS, "policy": "snapkv"}, speculative_config=drafts)
    with pytest.raises(UnsupportedError, match="in both the model and its draft model or in nei"):
        check_engine(config)


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        ({}, {}, None),
        ({}, {"speculative_config": None}, "needs --speculative-config .*SelfDrafts.*add it"),
        ({"policy": "adakv", "budget": 0.5}, {}, "policies evict.*remove --kv-draft, or"),
        ({"request_policies": ["snapkv"], "budget": 0.5}, {}, "or --kv-policy and --kv-allow"),
        ({"read": "quest:0.5"}, {}, "--kv-read has decode steps read a part; remove one"),
        ({}, {"tensor_parallel_size": 2}, "different numbers of drafts; use one rank"),
        ({}, {"enable_lora": True}, "without adapters; remove --enable-lora"),
    ],
    ids=["none", "speculation", "policy", "request", "read", "ranks", "lora"],
)
def test_what_drafts_by_the_model_itself_exclude(
    llama: str, settings: dict[str, Any], options: dict[str, Any], reason: str | None
) -> None:
    settings = {"policy": "none", "draft": "quest:0.1", **settings}
    given = plugin_options(Settings.from_dict(settings))["speculative_config"]
    options = {"speculative_config": json.loads(given), **options}
    config = engine_config(llama, settings, **options)
    if reason is None:
        assert check_engine(config).draft == "quest:0.1"
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"policy": "kvmerger"}, "kvmerger corrects attention.*such as adakv, or remove --kv-read"),
        ({"policy": "none", "attention": "own"}, "--kv-attention own reads every page"),
    ],
)
def test_policies_and_kernels_that_read_every_page_are_refused_with_kv_read(
    llama: str, settings: dict[str, Any], reason: str
) -> None:
    config = engine_config(llama, {**settings, "read": "quest:0.25"})
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({"policy": "none"}, {}, None),
        ({}, {"max_num_batched_tokens": 263}, None),
        ({}, {"max_num_batched_tokens": 262}, "chunks of 256.*up to 7 requests.*at least 263"),
        (
            {},
            {"long_prefill_token_threshold": 255},
            "threshold of at least 256, found 255",
        ),
        ({"trigger": "chunk:512"}, {}, "chunk:N and prefill.*use the trigger prompt, or remove"),
        ({"reuse_contexts": True}, {}, "continue prompts in the middle of a chunk"),
        ({"reuse_conversations": "auto"}, {}, "continue prompts in the middle of a chunk"),
    ],
)
def test_options_that_cut_prompts_inside_a_prefill_chunk_are_refused(
    llama: str, settings: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    """Chunks are the asked size rounded up to blocks of 128."""
    asked = {**SETTINGS, "read": "longcache:prefill=200", **settings}
    changes = {"max_num_batched_tokens": 1024, **changes}
    config = engine_config(llama, asked, max_num_seqs=8, block_size=128, **changes)
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


SKIPPING = {"kv_cache_dtype_skip_layers": ["0"]}


@pytest.mark.parametrize(
    ("cache_dtype", "settings", "options", "reason"),
    [
        ("fp8", {}, {}, None),
        ("fp8_e5m2", {"read": "quest:0.25"}, {}, None),
        ("int8_per_token_head", {}, {}, "CPUs has no kernel for it, only.*--kv-cache-dtype auto"),
        ("turboquant_4bit_nc", {}, {}, "only its own backend reads.*--kv-cache-dtype fp8 or auto"),
        ("nvfp4", {}, {}, "scales lie in an order of their own.*--kv-cache-dtype fp8 or auto"),
        ("fp8", {}, SKIPPING, "skip-layers: pages of layers.*remove one of the two"),
        ("fp8", {"attention": "own"}, {}, "--kv-attention own: this package's kernels.*remove"),
        ("fp8", {"attention": "flash"}, {}, "flash: FlashAttention takes.*remove --kv-attention"),
        ("fp8", {"policy": "kvmerger"}, {}, "with kvmerger, which changes kept tokens"),
        ("fp8", {"policy": "snapkv+momentfix"}, {}, "momentfix, which changes.*use another policy"),
    ],
)
def test_cache_dtypes_are_accepted_or_refused(
    llama: str,
    cache_dtype: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    config = engine_config(llama, {**SETTINGS, **settings}, kv_cache_dtype=cache_dtype, **options)
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=f"--kv-cache-dtype {cache_dtype}.*{reason}"):
        check_engine(config)


@pytest.mark.parametrize("compresses", [True, False])
def test_fp8_is_refused_on_cpus_whose_kernels_cannot_read_it(
    llama: str, compresses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal quotes vLLM, before a model is loaded."""
    for name in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    settings = SETTINGS if compresses else None
    config = engine_config(llama, settings, kv_cache_dtype="fp8")
    if not compresses:
        check_engine(config)  # vLLM's own affair
        return
    with pytest.raises(UnsupportedError, match=r"fp8: .*AVX-512 or AMX, says vLLM; use .* auto"):
        check_engine(config)


GPUS = "fp8 or int8_per_token_head or fp8_per_token_head or int4_per_token_head or auto"


@pytest.mark.parametrize(
    ("cache_dtype", "settings", "reason"),
    [
        ("int8_per_token_head", {}, None),
        ("int4_per_token_head", {"read": "quest:0.25"}, None),
        ("turboquant_k8v4", {}, f"this package does not extend; use --kv-cache-dtype {GPUS}"),
        ("int8_per_token_head", {"policy": "kvmerger"}, "kvmerger, which changes kept tokens"),
        ("fp8_per_token_head", {"attention": "own"}, "this package's kernels do not read quant"),
        ("int4_per_token_head", {"attention": "flash"}, "reads no other quantized cache; remove"),
    ],
)
def test_cache_dtypes_are_accepted_or_refused_on_gpus(
    llama: str, cache_dtype: str, settings: dict[str, Any], reason: str | None
) -> None:
    config = engine_config(llama, {**SETTINGS, **settings}, kv_cache_dtype=cache_dtype)
    config.device_config.device_type = "cuda"
    found = list(reasons_against(config, Settings.from_dict({**SETTINGS, **settings})))
    if reason is None:
        assert not found
    else:
        assert reason in found[0], found


def test_layers_look_for_scales_before_an_event_may_write_some() -> None:
    """Once they know where scales lie, no layer sets them to 1 at its first step."""
    pages = torch.zeros(3, 2, 16, 2 * 36, dtype=torch.int8)  # blocks, heads, tokens, bytes
    layers = []
    for _ in range(2):
        layer = SimpleNamespace(kv_cache=pages, impl=object.__new__(TritonAttentionImpl))
        layer.impl._per_head = object.__new__(TritonAttentionImpl)
        layers.append(layer)
    of_one_head = pages.view(6, 1, 16, 2 * 36)
    view_scales(layers, of_one_head)
    pages.fill_(7)
    for layer in layers:
        layer.impl._ensure_scale_caches(pages)
        layer.impl._per_head._ensure_scale_caches(of_one_head)
        assert layer.impl._k_scale_cache.shape == (3, 16, 2)
        assert layer.impl._per_head._v_scale_cache.shape == (6, 16, 1)
    assert bool((pages == 7).all())


def test_fp8_scales_per_head_are_refused() -> None:
    layer = SimpleNamespace(
        layer_name="layers.0.attn", kv_cache_dtype="fp8", _k_scale=torch.ones(2)
    )
    with pytest.raises(UnsupportedError, match=r"one fp8 scale per layer.*layers.0.attn; use"):
        cache_scales([layer])


def test_layers_that_call_attention_kernels_by_themselves_are_refused() -> None:
    class QSACompressedKeyCache:
        """A cache of the layers of Qwen 4."""

    with pytest.raises(
        UnsupportedError, match=r"layers.0.attn: .* QSACompressedKeyCache, .*without --kv-policy"
    ):
        check_classes({"layers.0.attn": QSACompressedKeyCache()})


@pytest.mark.parametrize("part", ["q_lora_rank", "rotary_emb"])
def test_mla_that_calls_kernels_by_itself_is_taken_as_kimi_linear_has_it(part: str) -> None:
    class MultiHeadLatentAttention:
        """A layer of Kimi Linear or Kimi K3, of whose kernels a CPU has none."""

        impl, q_lora_rank, rotary_emb = None, None, None
        _forward_prefill_fused = _decode_concat_cache = None

    layer = MultiHeadLatentAttention()
    check_classes({"layers.0.attn": layer})
    setattr(layer, part, 32)
    with pytest.raises(UnsupportedError, match=f"layers.0.attn .* {part}.*without --kv-policy"):
        check_classes({"layers.0.attn": layer})


def test_layers_that_keep_every_token_by_themselves_are_refused(llama: str) -> None:
    """Beside vLLM's attention, which is compressed, or alone, as in MiniMax M3."""

    class SparseAttention:
        """A layer whose cache is plain full attention's, by a backend of no compression."""

    config = engine_config(llama, SETTINGS)
    config.compilation_config.static_forward_context["layers.0.attn"] = SparseAttention()
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    window = SlidingWindowSpec(**shape, sliding_window=64)
    groups = WorkerCompression(config, Settings.from_dict(SETTINGS))
    with pytest.raises(UnsupportedError, match="no layer in which every token attends"):
        groups.compressed_groups([KVCacheGroupSpec(["layers.0.attn"], window)])
    full = KVCacheGroupSpec(["layers.0.attn"], FullAttentionSpec(**shape))
    for every in (full, KVCacheGroupSpec(full.layer_names, wrapped(full.kv_cache_spec))):
        with pytest.raises(UnsupportedError, match=r"layers.0.attn: expected.*SparseAttention"):
            groups.compressed_groups([every])


def wrapped(spec: FullAttentionSpec) -> UniformTypeKVCacheSpecs:
    """Returns a layer's spec as vLLM wraps it where pages of layers differ in size."""
    return UniformTypeKVCacheSpecs(
        block_size=spec.block_size, kv_cache_specs={"layers.0.attn": spec}
    )


def test_latent_layers_that_the_configuration_does_not_tell_of_are_refused() -> None:
    layers = [SimpleNamespace(layer_name="layers.0.attn", kv_lora_rank=512)]
    names = {"architecture": "NewForCausalLM", "architectures": ["NewForCausalLM"]}
    model: Any = SimpleNamespace(use_mla=False, **names)
    with pytest.raises(
        UnsupportedError, match=r"layers.0.attn is an MLA layer.*serve this model without"
    ):
        check_latents(layers, model)
    check_latents([SimpleNamespace(layer_name="layers.0.attn")], model)
    model.architectures = ["SarvamMLAForCausalLM"]
    check_latents(layers, model)


def test_mla_kernels_that_take_blocks_to_lie_side_by_side_are_refused() -> None:
    """vLLM's did so before it knew caches with other layers between a layer's blocks."""

    def reads(strided: bool) -> Any:
        def forward_mqa(query: Any, cache: Any, metadata: Any, _: Any) -> Any:
            rows = cache if strided else cache.as_strided(cache.shape, (16 * 576, 576, 1))
            row = rows[metadata.decode.block_table[0, 0], 0, :512]
            return row.expand(1, query.shape[1], 512), None

        return SimpleNamespace(impl=SimpleNamespace(num_heads=4, forward_mqa=forward_mqa))

    cache = torch.zeros(1, 16, 576)
    check_strides(reads(strided=True), cache)
    with pytest.raises(UnsupportedError, match=r"at any stride.*use vLLM 0.32, or serve without"):
        check_strides(reads(strided=False), cache)


@pytest.mark.parametrize("settings", [None, {"policy": "none", "budget": 0.5}])
def test_nothing_is_refused_when_nothing_is_compressed(llama: str, settings: Any) -> None:
    check_engine(engine_config(llama, settings, kv_cache_dtype="int8_per_token_head"))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (PREFIX_LM, "image see each other.*attention for CPUs.*alone with --language-model-only"),
        (MAMBA, "MambaForCausalLM has no attention layer.*serve it without --kv-policy"),
        (STEP, "Step1ForCausalLM uses ALiBi with roots, which vLLM's attention for CPUs.*a GPU"),
        (LOOK_BACK, "chunk before, which vLLM's attention for CPUs does not compute; use a GPU"),
    ],
    ids=["prefix-LM", "attention-free", "roots", "look-back"],
)
def test_models_that_cannot_be_compressed_are_refused(
    tmp_path: Path, model: dict[str, Any], reason: str
) -> None:
    """The refusal comes before weights are loaded."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = engine_config(str(tmp_path), SETTINGS, skip_tokenizer_init=True)
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"policy": "spans", "params": {"keys": "rotated"}}, None),
        ({"policy": "spans"}, "spans leaves its biases.*such as adakv"),
        ({"policy": "rkv", "trigger": "decode:64"}, "rkv leaves its biases.*such as adakv"),
        ({"policy": "auto"}, "headkv leaves its biases.*such as adakv"),
        ({"policy": "d2o"}, "d2o leaves its biases.*such as adakv"),
        ({"read": "quest:0.25", "policy": "none"}, "--kv-read leaves out.*; remove --kv-read"),
        ({"reuse_contexts": True}, "--kv-reuse-contexts leaves out.*; remove --kv-reuse-contexts"),
        ({"attention": "own"}, "--kv-attention own leaves out.*; remove --kv-attention own"),
    ],
)
def test_what_leaves_out_biases_by_distance_is_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ALIBI))
    config = engine_config(str(tmp_path), {**SETTINGS, **settings}, skip_tokenizer_init=True)
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"policy": "adakv+criticalkv", "trigger": "prompt,decode:64"}, None),
        ({"policy": "auto"}, "keeps the last 1023 tokens, which attention.headkv does not"),
        ({"policy": "pyramidkv"}, "keeps the last 1023 tokens, which pyramidkv does not"),
        ({"policy": "d2o"}, "keeps the last 1023 tokens, which d2o does not"),
        ({"read": "quest:0.25", "policy": "none"}, "--kv-read leaves out.*; remove --kv-read"),
        ({"protect": ["system"]}, "--kv-protect leaves out.*; remove --kv-protect"),
        (
            {"keep_prompt": 1.0, "ceiling": 4096},
            "--kv-keep-prompt leaves out.*; remove --kv-keep-prompt",
        ),
        ({"attention": "flash"}, "--kv-attention flash leaves out.*; remove --kv-attention flash"),
    ],
)
def test_what_does_not_work_with_inklings_biases_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    reason: str | None,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(INKLING))
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    config = engine_config(str(tmp_path), {**SETTINGS, **settings}, **options)
    with pytest.raises(UnsupportedError, match=r"NVIDIA's GPUs alone; use one"):
        check_engine(config)
    monkeypatch.setattr(distance_refusals, "takes_cpu_kernels", lambda _: False)
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


def test_chunks_with_a_look_back_take_vllms_triton_kernels_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_takes_flash", lambda _: True)
    (tmp_path / "config.json").write_text(json.dumps(LOOK_BACK))
    for attention, reason in (("auto", None), ("flash", "remove --kv-attention flash")):
        settings = {**SETTINGS, "attention": attention}
        config = engine_config(str(tmp_path), settings, skip_tokenizer_init=True)
        config.device_config.device_type = "cuda"
        assert registration.kernels_for(config, "auto") == "triton"
        if reason is None:
            check_engine(config)
        else:
            with pytest.raises(UnsupportedError, match=reason):
                check_engine(config)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"trigger": "prompt,decode:64", "attention": "own"}, None),
        ({"attention": "flash"}, "FlashAttention 2 and 3.*use --kv-attention triton"),
        ({"trigger": "chunk:64"}, "--kv-trigger chunk:N may compress within.*the triggers prompt"),
        ({"ceiling": 512}, "--kv-ceiling may compress within one; use a budget"),
        ({"reuse_contexts": True}, "with --kv-reuse-contexts a request.*; remove it"),
        ({"reuse_conversations": "anew"}, "with --kv-reuse-conversations a request.*; remove it"),
    ],
)
def test_what_does_not_work_where_tokens_of_an_image_see_each_other_is_refused_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setattr(registration, "_takes_flash", lambda _: True)
    (tmp_path / "config.json").write_text(json.dumps(PREFIX_LM))
    config = engine_config(str(tmp_path), {**SETTINGS, **settings}, skip_tokenizer_init=True)
    config.device_config.device_type = "cuda"
    assert registration.kernels_for(config, "auto") == "triton"
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=f"PaliGemma.*all tokens of an image.*{reason}"):
        check_engine(config)


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({}, {}, None),
        ({"trigger": "pressure:0.9"}, {}, "--kv-trigger pressure records no queries.*chunk:N"),
        ({"read": "quest:0.5"}, {}, "--kv-read chooses pages.*remove --kv-read"),
        ({"policy": "keydiff", "attention": "own"}, {}, "remove --kv-attention own"),
        ({}, {"cache_config.kv_sharing_fast_prefill": True}, "leaves out the queries.*remove it"),
    ],
    ids=["nothing", "pressure", "read", "own", "fast-prefill"],
)
def test_what_does_not_work_where_layers_read_others_caches_is_refused(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], reason: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHARING))
    given = {**SETTINGS, **settings}
    config = engine_config(str(tmp_path), given, skip_tokenizer_init=True)
    for path, value in changes.items():
        part, name = path.split(".")
        setattr(getattr(config, part), name, value)
    if reason is None:
        check_engine(config)
        return
    with pytest.raises(UnsupportedError, match=f"Gemma3nForCausalLM has layers.*{reason}"):
        check_engine(config)


def test_shared_caches_beside_pages_of_another_size_are_refused_in_cuda_graphs(
    tmp_path: Path,
) -> None:
    """vLLM wraps the specs of such groups, and looks for those of layers that have none."""
    gemma4 = {**COMMON, **FAMILIES["gemma4"], "architectures": ["Gemma4ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**gemma4, "num_kv_shared_layers": 2}))
    for eager, device in ((False, "cpu"), (True, "cuda"), (False, "cuda")):
        options = {"skip_tokenizer_init": True, "enforce_eager": eager}
        config = engine_config(str(tmp_path), SETTINGS, **options)
        config.device_config.device_type = device
        if eager or device == "cpu":
            check_engine(config)
            continue
        with pytest.raises(UnsupportedError, match=r"pages have several sizes.*--enforce-eager"):
            check_engine(config)


def test_full_layers_with_other_heads_in_one_cache_group_are_refused() -> None:
    """Any head must be able to own any page of the group's blocks."""
    specs = [SimpleNamespace(num_kv_heads=2, head_size=64)]
    check_page_sizes(specs)
    specs.append(SimpleNamespace(num_kv_heads=4, head_size=32))
    with pytest.raises(UnsupportedError, match=r"heads \(2 of 64, 4 of 32 elements\).*serve this"):
        check_page_sizes(specs)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (PREFIX_LM, {"language_model_only": True}),
        (HYBRID, {"enable_prefix_caching": True}),
        (HYBRID, {"enable_prefix_caching": False}),
    ],
    ids=["prefix-LM", "hybrid", "hybrid-without-prefix-caching"],
)
def test_remedies_that_refusals_name_are_accepted(
    tmp_path: Path, model: dict[str, Any], options: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    check_engine(engine_config(str(tmp_path), SETTINGS, skip_tokenizer_init=True, **options))


def test_hits_within_a_block_are_refused_beside_states(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    options = {"skip_tokenizer_init": True, "enable_prefix_caching": True}
    config = engine_config(str(tmp_path), SETTINGS, prefix_match_unit=16, **options)
    with pytest.raises(UnsupportedError, match=r"--prefix-match-unit 16: Qwen3Next.*; remove it"):
        check_engine(config)


def test_policies_without_logit_caps_are_refused_for_models_with_them(tmp_path: Path) -> None:
    """Caps in the model's configuration, and caps that only its layers know."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    (tmp_path / "config.json").write_text(json.dumps(CAPPED))
    check_engine(engine_config(str(tmp_path), SETTINGS, skip_tokenizer_init=True))
    settings = {**SETTINGS, "policy": "momentkv"}
    config = engine_config(str(tmp_path), settings, skip_tokenizer_init=True)
    with pytest.raises(UnsupportedError, match=r"caps its attention logits.*momentkv.*adakv"):
        check_engine(config)
    own = Settings(policy="keydiff", budget=0.5, attention="own")
    with pytest.raises(UnsupportedError, match=r"logits.*remove --kv-attention own"):
        check_engine(engine_config(str(tmp_path), own.to_dict(), skip_tokenizer_init=True))
    with set_current_vllm_config(config):
        layer = Attention(4, 32, 1.0, 2, prefix="layers.0.attn", logits_soft_cap=50.0)
    pipelines = resolve_settings(Settings.from_dict(settings))
    with pytest.raises(UnsupportedError, match=r"layers.0.attn caps its attention logits"):
        check_layer(layer, own, False, pipelines)
    with pytest.raises(UnsupportedError, match=r"layers.0.attn.*with --kv-attention triton"):
        check_layer(layer, own, True, {})


def test_what_does_not_take_sinks_into_account_is_refused(llama: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    with set_current_vllm_config(engine_config(llama, SETTINGS)):
        layer = Attention(4, 32, 1.0, 2, prefix="layers.0.attn", sinks=torch.zeros(4))
    plain = Settings(policy="keydiff", budget=0.5)
    check_layer(layer, plain, False, resolve_settings(plain))
    for settings, reason in (
        (Settings(policy="momentkv", budget=0.5), "sinks, which momentkv does not.*such as adakv"),
        (Settings(policy="keydiff", budget=0.5, read="quest:0.25"), "sinks.*remove --kv-read"),
        (Settings(policy="none", draft="quest:0.1"), "sinks.*remove --kv-draft"),
    ):
        with pytest.raises(UnsupportedError, match=rf"layers.0.attn has attention {reason}"):
            check_layer(layer, settings, False, resolve_settings(settings))
    layer.kv_cache_dtype = "fp8"
    with pytest.raises(UnsupportedError, match="a cache in fp8; use --kv-cache-dtype auto"):
        check_layer(layer, plain, False, resolve_settings(plain))


@pytest.mark.parametrize(("option", "setting"), [("contexts", True), ("conversations", "reuse")])
def test_reuse_without_prefix_caching_is_refused(llama: str, option: str, setting: object) -> None:
    settings = {**SETTINGS, f"reuse_{option}": setting}
    config = engine_config(llama, settings, enable_prefix_caching=False)
    with pytest.raises(UnsupportedError, match=rf"--kv-reuse-{option}.*remove one of the two"):
        check_engine(config)


def test_layers_that_share_a_compressed_cache_are_refused(llama: str) -> None:
    """Neither vLLM's cache groups nor the configuration need to name such layers."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    config = engine_config(llama, SETTINGS)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]
    with set_current_vllm_config(config):
        for name, owner in zip(names, (None, None, names[0]), strict=True):
            Attention(4, 32, 1.0, 2, prefix=name, kv_sharing_target_layer_name=owner)
    shared = shared_caches(config)
    assert shared == {names[2]: names[0]}
    check_groups([[names[1]]], {}, shared)
    with pytest.raises(UnsupportedError, match=f"{names[2]} reads the cache of {names[0]}"):
        check_groups([[names[0]]], {}, shared)


def test_unknown_settings_are_refused(llama: str) -> None:
    config = engine_config(llama, {**SETTINGS, "bugdet": 0.5})
    with pytest.raises(ConfigError, match="bugdet is not known; valid are after_reasoning"):
        check_engine(config)


def test_dual_batch_overlap_is_refused(llama: str) -> None:
    config = engine_config(llama, SETTINGS)
    config.parallel_config.enable_dbo = True
    with pytest.raises(UnsupportedError, match=r"dual batch overlap.*remove --enable-dbo"):
        check_engine(config)


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({}, {}, None),
        ({"policy": "adakv+criticalkv"}, {}, None),
        ({"policy": "kvmerger"}, {}, "kvmerger merges keys and values.*spans or snapkv"),
        ({"policy": "expected"}, {}, "expected predicts later queries.*another policy"),
        ({"policy": "snapkv+obcache"}, {}, "weighs values of heads as they are cached"),
        ({"read": "quest:0.25"}, {}, "latent rows are not; remove --kv-read"),
        ({}, {"model_config.hf_text_config.index_topk": 8}, "its indexer.*so serve it without"),
        ({}, {"device_config.device_type": "cuda"}, None),
        ({"attention": "own"}, {"device_config.device_type": "cuda"}, "remove --kv-attention own"),
        ({"attention": "flash"}, {"device_config.device_type": "cuda"}, "FlashAttention's.*remove"),
        ({}, {"cache_config.cache_dtype": "fp8"}, "the model's type alone.*use .* auto"),
        ({}, {"attention_config.backend": None}, "has AMX.*--attention-backend CPU_MLA"),
        ({}, SARVAM, "reads blocks of 16 tokens.*add --block-size 16"),
        ({}, {**SARVAM, "cache_config.block_size": 16}, None),
        ({"policy": "kvmerger"}, {**SARVAM, "cache_config.block_size": 16}, "merges keys"),
    ],
)
def test_what_latent_rows_do_not_allow_is_refused(
    tmp_path: Path,
    settings: dict[str, Any],
    changes: dict[str, Any],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLA keeps one row per token, which is the key of all query heads, and their value."""
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    given = {**SETTINGS, **settings}
    options = {"skip_tokenizer_init": True, "attention_backend": "CPU_MLA"}
    config = engine_config(str(tmp_path), given, **options)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for path, value in changes.items():
        *owners, name = path.split(".")
        setattr(reduce(getattr, owners, config), name, value)
    found = list(reasons_against_latents(config, Settings.from_dict(given)))
    if reason is None:
        check_engine(config)
        assert registration.kernels_for(config, "auto") == "triton-mla"
        assert not found
    else:
        assert re.search(reason, found[0]), found
