"""Tiny configurations of vLLM's text models: small sizes, and what single classes need beside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LAYERS = 4  # many families have a full-attention layer behind three others

_BASIC: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
# Given to a configuration only where its class knows the name.
SIZES: dict[str, Any] = {
    **_BASIC,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # Mamba and linear attention.
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "ssm_state_size": 16,
    "state_size": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    # MLA; vLLM's kernels for CPUs take rows of 512 + 64 elements.
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}

_MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_top_k": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "router_enable_expert_bias": False,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
_INDEXER = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 64}
_BAILING = {**_MIXTURE, "embedding_dropout": 0.0, "use_bias": False, "use_qkv_bias": False}
_SLIDING = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}

_INKLING = {
    "hidden_size": 256,  # so that blocks of convolutions are as large as 32 tokens' keys and values
    "dense_mlp_idx": LAYERS,
    "rel_extent": 48,
    "sliding_window_size": 64,
    "log_scaling_n_floor": 128,
    "sconv_kernel_size": 4,
    "use_sconv": True,
    "local_layer_ids": [0, 2],
    "n_shared_experts": 1,
    "shared_expert_sink": True,
    "n_routed_experts": 4,
}
_MIMO: dict[str, Any] = {
    "hybrid_layer_pattern": [1, 0] * (LAYERS // 2),
    "layernorm_epsilon": 1e-5,
    "moe_layer_freq": [0, 1] * (LAYERS // 2),
    "sliding_window_size": 64,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "add_swa_attention_sink_bias": True,
    "rope_theta": 1e4,
    "swa_rope_theta": 1e4,
}
_CHATGLM: dict[str, Any] = {
    "model_type": "chatglm",
    "original_rope": True,
    "num_layers": LAYERS,
    "padded_vocab_size": 256,
    "tie_word_embeddings": False,
    "ffn_hidden_size": 128,
    "kv_channels": 32,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LONGCAT: dict[str, Any] = {
    "num_layers": LAYERS // 2,  # with two attention layers each
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
}
# What configurations of classes that transformers knows need beside SIZES.
MORE: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "score_func": "sigmoid",
        "num_dense_layers": 1,
        "route_norm": True,
        "route_scale": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "DeepseekV4ForCausalLM": {
        **_INDEXER,
        "compress_ratios": [0, 4, 128, 4],
    },
    "DbrxForCausalLM": {
        "d_model": 128,
        "n_heads": 4,
        "n_layers": LAYERS,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "FalconForCausalLM": {"ffn_hidden_size": 128},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 256},
    "Gemma3ForCausalLM": {**_SLIDING},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1, "head_dim": 64},
    "LongcatFlashForCausalLM": {**_LONGCAT},
    "Gemma3nForCausalLM": {
        **_SLIDING,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "tie_word_embeddings": True,
    },
    "Gemma4ForCausalLM": {
        **_SLIDING,
        "num_experts": None,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 32,
        "head_dim": 256,
        "global_head_dim": 512,
    },
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "GPTJForCausalLM": {"rotary_dim": 32},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "HYV3ForCausalLM": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 64,
        "route_norm": True,
    },
    "JambaForCausalLM": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "KimiLinearForCausalLM": {
        "mla_use_nope": True,
        "q_lora_rank": None,
        "num_experts": None,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "LagunaForCausalLM": {**_SLIDING},
    "Lfm2ForCausalLM": {"block_dim": 128, "block_ff_dim": 128, "conv_dim": 128},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "Llama4ForCausalLM": {
        "num_experts_per_tok": 1,
        "attention_chunk_size": 64,
        "layer_types": ["chunked_attention", "full_attention"] * (LAYERS // 2),
        "no_rope_layers": [1, 0] * (LAYERS // 2),
    },
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 32, "scoring_func": "sigmoid"},
    "MiMoV2FlashForCausalLM": {**_MIMO},
    "MistralForCausalLM": {"sliding_window": None},
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "attention", "mlp", "attention"]},
    "OPTForCausalLM": {"ffn_dim": 128, "word_embed_proj_dim": 128},
    "Qwen4ExpForCausalLM": {
        "output_gate_type": "silu",
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}

# Classes that transformers does not know: what their code reads, over Llama's configuration.
FOREIGN: dict[str, dict[str, Any]] = {
    "BailingMoeForCausalLM": {**_BAILING},
    "BailingMoeV2ForCausalLM": {**_BAILING, "use_qk_norm": True},
    "BailingMoeV2_5ForCausalLM": {
        "model_type": "bailing_hybrid",
        **_BAILING,
        **_LATENT,
        "layer_group_size": 2,
    },
    "BailingMoeV3ForCausalLM": {
        "model_type": "bailing_hybrid",
        **_BAILING,
        **_LATENT,
        "layer_group_size": 2,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
    },
    "ChatGLMModel": {**_CHATGLM},
    "ChatGLMForConditionalGeneration": {**_CHATGLM},
    "DeciLMForCausalLM": {
        "model_type": "nemotron-nas",
        "blocks": [
            {
                "attention": {"no_op": number == 1, "n_heads_in_group": 2},
                "ffn": {"no_op": number == 2, "ffn_mult": 1.0},
            }
            for number in range(LAYERS)
        ],
    },
    "DeepseekV32ForCausalLM": {"model_type": "deepseek_v32", **_INDEXER},
    "DeepseekForCausalLM": {"model_type": "deepseek", **_MIXTURE, "moe_layer_freq": 1},
    "ExaoneForCausalLM": {"activation_function": "silu", "layer_norm_epsilon": 1e-5},
    "ExaoneMoEForCausalLM": {"model_type": "exaone_moe"},
    "Rnj1ForCausalLM": {
        "model_type": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["chunked_attention", "full_attention"] * (LAYERS // 2),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("chunked_attention", "full_attention")
        },
    },
    "Glm5NextForCausalLM": {
        "model_type": "glm5_next_text",
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
    },
    "HCXVisionV2ForCausalLM": {
        "model_type": "hyperclovax_vision_v2",
        "text_config": {**_BASIC},
        "vision_config": {"hidden_size": 64, "num_heads": 2, "depth": 1, "out_hidden_size": 128},
        "image_token_id": 254,
        "video_token_id": 255,
    },
    "IQuestLoopCoderForCausalLM": {"loop_num": 2, "loop_window_size": 64},
    "K2HorizonForCausalLM": {
        **_MIXTURE,
        "attention_gate_func": "softplus",
        "decoder_sparse_step": 1,
        "layernorm_num_groups": 1,
        "moe_gate_bias": False,
        "mova_num_experts": 2,
        "mova_num_experts_per_tok": 1,
        "query_key_norm": True,
        "rope_head_dim": 32,
        "router_scaling_factor": 1.0,
        "router_score_func": "sigmoid",
        "mlp_only_layers": [],
    },
    "LongcatFlashNgramForCausalLM": {
        "model_type": "longcat_flash",
        **_LONGCAT,
        "rope_parameters": _YARN,  # without it vLLM's operator for CPUs rotates queries wrongly
        "emb_neighbor_num": 2,
        "emb_split_num": 2,
        "ngram_vocab_size_ratio": 2,
    },
    "MiniCPMForCausalLM": {"dim_model_base": 128, "scale_depth": 1.4, "scale_emb": 12},
    "MiniMaxM3SparseForCausalLM": {
        "model_type": "minimax_m3_text",
        **_MIXTURE,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 16,
        "use_gemma_norm": True,
        "scoring_func": "sigmoid",
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_beta": 1.0,
        "swiglu_limit": 7.0,
        "dense_intermediate_size": 128,
        "moe_layer_freq": [0] * LAYERS,
        "sparse_attention_config": {
            "sparse_index_dim": 32,
            "sparse_num_index_heads": 2,
            "sparse_topk_blocks": 4,
            "sparse_block_size": 128,
            "sparse_attention_freq": [0] + [1] * (LAYERS - 1),
        },
    },
    "InklingForCausalLM": {"model_type": "inkling_model", **_INKLING},
    "InklingForConditionalGeneration": {
        "model_type": "inkling_mm_model",
        "text_config": {**_BASIC, **_INKLING},
    },
    "MistralLarge3ForCausalLM": {"model_type": "deepseek_v3"},
    "MiMoV2ForCausalLM": {"model_type": "mimo_v2_flash", **_MIMO},
    "NemotronHPuzzleForCausalLM": {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "attention", "mlp", "attention"],
    },
    "MuseGlimmerForCausalLM": {"model_type": "muse_glimmer_text"},
    "PanguUltraMoEForCausalLM": {
        "model_type": "pangu_ultra_moe",
        **_MIXTURE,
        **_LATENT,
        "rope_theta": 1e4,
    },
    "PanguProMoEV2ForCausalLM": {**_MIXTURE, "qkv_bias": False},
    "Param2MoEForCausalLM": {"model_type": "param2moe", **_BAILING, "rope_scaling": None},
    "PhiMoEForCausalLM": {"model_type": "phimoe"},
    "Plamo3ForCausalLM": {
        **_SLIDING,
        "interleaved_sliding_window": [64, None] * (LAYERS // 2),
        "rope_local_theta": 1e4,
    },
    "SarvamMoEForCausalLM": {**_BAILING},
    "SarvamMLAForCausalLM": {
        "model_type": "sarvam_mla",
        **_BAILING,
        **_LATENT,
        "head_dim": 576,
        "q_lora_rank": None,
    },
    "Step1ForCausalLM": {"num_attention_groups": 2},
    "Step3TextForCausalLM": {"model_type": "step3_text", "moe_layers_enum": "1,2,3"},
    "Step3p5ForCausalLM": {"model_type": "step3p5", "num_attention_groups": 2},
    "SolarForCausalLM": {f"bskcn_{number}": [] for number in range(1, 5)}
    | {"bskcn_tv": [0.9, 0.8]},
    "TeleChat2ForCausalLM": {
        "n_head": 4,
        "n_layer": LAYERS,
        "ffn_hidden_size": 128,
        "layer_norm_epsilon": 1e-5,
    },
    "TeleFLMForCausalLM": {"mup_scale_factor": 1.0, "output_mult": 1.0, "use_mup": False},
}

# Options of `serve` without which a class does not start on CPUs.
OPTIONS = {"SarvamMLAForCausalLM": ["--block-size=16"]}
# What stock vLLM computes for a class on GPUs alone.
ON_GPUS = {
    "InklingForCausalLM": "biases by distance in a kernel of its own",
    "InklingForConditionalGeneration": "biases by distance in a kernel of its own",
    "KimiLinearForCausalLM": "MLA layers with kernels of their own",
    "LongcatFlashNgramForCausalLM": "n-gram embeddings, which need model runner V2",
    "Rnj1ForCausalLM": "attention within chunks and the chunk before",
    "Step1ForCausalLM": "biases by roots of distances",
}


class _OnHub:
    """What classes of configurations on the Hub have and Llama's lacks."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        for name, model_type in (("text_config", "llama"), ("vision_config", "qwen2_5_vl_vision")):
            part = getattr(self, name, None)
            if isinstance(part, dict):
                setattr(self, name, config_class(model_type)(**part))

    @property
    def rope_theta(self) -> float:
        parameters = getattr(self, "rope_parameters", None) or {}
        if "rope_theta" not in parameters:
            raise AttributeError("rope_theta")
        theta: float = parameters["rope_theta"]
        return theta

    @rope_theta.setter
    def rope_theta(self, value: float) -> None:
        """Leaves it to `rope_parameters`."""

    @property
    def block_configs(self) -> list[SimpleNamespace]:
        return [_as_object(block) for block in self.blocks]  # type: ignore[attr-defined]


_WORDS = [
    *(f"<|message_{role}|>" for role in ("user", "model", "system", "tool")),
    *(f"<|content_{kind}|>" for kind in ("text", "image", "thinking", "audio_input", "xml")),
    *("<|content_model_end_sampling|>", "<|content_invoke_tool_json|>"),
    *("<|end_message|>", "<|audio_end|>"),
]
# Classes that also see images, and make the parts that do from a tokenizer.
SEEING = {"HCXVisionV2ForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration"}


def write_tokenizer(path: Path) -> None:
    """Writes a tokenizer that has a word for each token, the last of them what Inkling asks for."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    numbers = range(_BASIC["vocab_size"] - len(_WORDS))
    words = {word: number for number, word in enumerate([*(f"w{n}" for n in numbers), *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(path)


def model_types() -> dict[str, str]:
    """Returns, by class, the type of configuration that transformers has for it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types: dict[str, str] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (names,) if isinstance(names, str) else names:
            types[name] = model_type  # of several the last one is of the text part
    return types


def tiny_config(name: str) -> dict[str, Any]:
    """Returns the contents of a tiny config.json of a class."""
    known = model_types().get(name)
    more = dict(MORE.get(name, {})) if name not in FOREIGN else dict(FOREIGN[name])
    model_type = more.pop("model_type", known or "llama")
    config = _made(model_type, more)
    return {**config, **more, "architectures": [name]}


def config_class(model_type: str) -> Any:
    """Returns the class of a type of configuration; an unknown type is registered as a Llama's."""
    from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if model_type in dict.keys(_CONFIG_REGISTRY):
        return _CONFIG_REGISTRY[model_type]
    if model_type not in CONFIG_MAPPING:
        foreign = type("Foreign", (_OnHub, LlamaConfig), {"model_type": model_type})
        AutoConfig.register(model_type, foreign)
    return CONFIG_MAPPING[model_type]


def _as_object(values: Mapping[str, Any]) -> SimpleNamespace:
    """Returns an object with the contents of a dictionary as attributes, as code on the Hub has."""
    return SimpleNamespace(
        **{
            key: _as_object(value) if isinstance(value, dict) else value
            for key, value in values.items()
        }
    )


def _made(model_type: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration of a type with small sizes, as its class completes it."""
    cls = config_class(model_type)
    default = cls()
    known = {*default.to_dict(), *default.attribute_map}
    if "hidden_size" not in known:  # the class takes what the file says
        known = {*SIZES}
    read_only = {name for name in known if isinstance(getattr(cls, name, None), property)}
    sizes = {key: value for key, value in SIZES.items() if key in known - read_only}
    if getattr(default, "sliding_window", None):
        sizes["sliding_window"] = 64
    config: dict[str, Any] = cls(**{**sizes, **more}).to_dict()
    return config


def write(name: str, folder: Path) -> Path:
    """Writes the tiny configuration of a class, and returns its folder."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    if name in SEEING:
        write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(tiny_config(name), default=str))
    return path
