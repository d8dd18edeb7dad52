"""What does not work together is refused at start-up: what, why, and what to do instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcompress.config import Settings
from vllm_kvcompress.errors import ConfigError, UnsupportedError
from vllm_kvcompress.vllm_plugin.compat import plugin_options
from vllm_kvcompress.vllm_plugin.refusals import check_engine

SETTINGS = {"policy": "adakv", "budget": 0.25}
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
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 512,
}


def engine_config(model: str, settings: dict[str, Any] | None, **options: Any) -> Any:
    """vLLM's own configuration for a model and options, without starting an engine."""
    from vllm.engine.arg_utils import EngineArgs

    given: dict[str, Any] = {"max_model_len": 256}
    if settings:
        paths = plugin_options(Settings("adakv"))
        given |= {name: paths[name] for name in ("scheduler_cls", "worker_cls")}
        given["additional_config"] = {"kvcompress": settings}
    return EngineArgs(model=model, **{**given, **options}).create_engine_config()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"runner": "pooling"}, "pooling model finishes with its prompt.*serve it without"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism.*use --tensor-parallel-size"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8.*use --kv-cache-dtype auto"),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                }
            },
            "speculative decoding takes tokens back.*remove --speculative-config",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors transfer whole blocks.*remove --kv-transfer-config",
        ),
        ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager.*remove it"),
    ],
    ids=["pooling", "pipeline", "fp8", "speculative", "connector", "no-hybrid"],
)
def test_options_of_vllm(llama: str, options: dict[str, Any], reason: str) -> None:
    config = engine_config(llama, SETTINGS, **options)
    with pytest.raises(UnsupportedError, match=reason):
        check_engine(config)


@pytest.mark.parametrize("settings", [None, {"policy": "none", "budget": 0.5}])
def test_nothing_is_refused_when_nothing_is_compressed(llama: str, settings: Any) -> None:
    check_engine(engine_config(llama, settings, kv_cache_dtype="fp8"))


def test_latent_attention(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MLA))
    config = engine_config(str(tmp_path), SETTINGS, skip_tokenizer_init=True)
    with pytest.raises(UnsupportedError, match="MLA models keep one latent vector per token"):
        check_engine(config)


def test_unknown_settings(llama: str) -> None:
    config = engine_config(llama, {**SETTINGS, "bugdet": 0.5})
    with pytest.raises(ConfigError, match="unknown setting bugdet; valid ones are attention"):
        check_engine(config)


def test_dual_batch_overlap(llama: str) -> None:
    config = engine_config(llama, SETTINGS)
    config.parallel_config.enable_dbo = True
    with pytest.raises(UnsupportedError, match=r"dual batch overlap.*remove --enable-dbo"):
        check_engine(config)
