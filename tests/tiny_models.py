"""Tiny random models of the served families, with a word-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 256

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    # Full and sliding-window layers in one model.
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 32,
    },
    # Full layers with larger heads than the sliding-window layers beside them.
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 64,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "tie_word_embeddings": True,
    },
    # The last two layers read the caches of the first two.
    "gemma3n": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0] * 4,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    # Gated delta nets (vLLM's for CPUs want heads of 128, and bfloat16) beside full attention.
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "shared_expert_intermediate_size": 64,
        **EXPERTS,
    },
    # Short convolutions beside full attention.
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "conv_dim": 128,
        "block_dim": 128,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    },
    # MLA: one latent row per token; vLLM's kernel for CPUs takes rows of 512 + 64 elements. Without
    # YaRN, vLLM's operator for CPUs rotates queries of several heads as if they were of one.
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    # Attention sinks in full and sliding-window layers.
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # Biases by distance in the place of rotation; every query head has a KV head.
    "bloom": {
        "model_type": "bloom",
        "n_head": 4,
        "tie_word_embeddings": True,
    },
    # Full layers, and others that attend within chunks.
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "attention_chunk_size": 64,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0] * 2,
        "moe_layers": [],
        "interleave_moe_layer_step": 100,  # further than there are layers
        "intermediate_size_mlp": 128,
        "num_local_experts": 2,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
    },
}


def build(
    family: str,
    directory: Path,
    seed: int = 0,
    change: Callable[[Any], None] | None = None,
    **overrides: object,
) -> Path:
    """Writes a random model of a family, with its tokenizer, and returns its directory.

    Attention is made sharper than at initialisation, so that which tokens are kept matters, and
    in half of the heads diffuse, so that heads deserve different budgets. `change` is called with
    the model before it is written. Raises ValueError where another model is at its place.
    """
    settings: dict[str, Any] = {**COMMON, **FAMILIES[family], **overrides}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data.mul_(8)
        if name.endswith(("query_key_value.weight", "attention.dense.weight")):  # Bloom's
            parameter.data.mul_(8)
        if name.endswith("q_norm.weight"):  # where there is one, the projection's size is nothing
            parameter.data.mul_(8)
        if name.endswith("kv_b_proj.weight"):
            parameter.data.mul_(8)
        if name.endswith("sinks"):
            parameter.data.uniform_(1, 4)
        if name.endswith("q_proj.weight"):
            parameter.data[: parameter.shape[0] // 2].mul_(0.1)
        if name.endswith(("v_proj.weight", "o_proj.weight", "embed_tokens.weight")):
            parameter.data.mul_(4)
    if change is not None:
        change(model)
    target = directory / family
    before = {each: each.read_bytes() for each in target.glob("*")}
    model.save_pretrained(target)
    if any(each.read_bytes() != content for each, content in before.items()):
        raise ValueError(f"expected one model in {target}, got two; give them directories")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w3"
    ).save_pretrained(target)
    return target


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Returns random token ids, the same for the same length and seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (num_tokens,), generator=generator).tolist()
