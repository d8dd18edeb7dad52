"""Tiny models with what drafts for them, by method; some of the drafts are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import tiny_models

# Models whose windows have smaller heads, whose layers read the caches of others, and of both
# kinds. Another model drafts for them.
REPEATING: dict[str, tuple[str, dict[str, Any]]] = {
    "head-sizes": ("gemma4", {}),
    "shared": ("gemma3n", {}),
    "both": ("gemma4", {"num_kv_shared_layers": 2}),
}


def speculation(method: str, path: Path | str | None) -> dict[str, Any]:
    """Returns the speculative config of a draft model, of a head, or of the model's own layer."""
    drafts = {"method": method, "num_speculative_tokens": 3}
    return drafts if path is None else {**drafts, "model": str(path)}


def build(directory: Path, method: str) -> tuple[str, dict[str, Any]]:
    """Returns a model's directory, and the speculative config of what drafts for it.

    Beside methods there are "latent", an MTP layer of a model with MLA layers; "windows", a layer
    of a model that has sliding windows in others; "sinks", another model for one with sinks and
    windows, which accepts next to nothing; and one of each of `REPEATING`.
    """
    if method == "mtp":
        return str(with_mtp_layer(directory / "mimo")), speculation(method, None)
    if method == "latent":
        return str(with_latent_mtp_layer(directory / method)), speculation("mtp", None)
    if method == "windows":
        return with_windows(directory / method)
    if method in REPEATING:
        return beside_repeating(directory / method, *REPEATING[method])
    if method == "sinks":
        _, drafts = build(directory / method, "draft_model")
        return str(tiny_models.build("gpt_oss", directory / method)), drafts
    model = directory / "few-changes" / "llama"
    if not model.exists():
        tiny_models.build("llama", model.parent, change=damp_later_layers)
    draft = directory / method
    draft.mkdir()
    {"draft_model": first_layer, "eagle": eagle_head, "eagle3": eagle3_head}[method](model, draft)
    return str(model), speculation(method, draft)


def with_windows(directory: Path) -> tuple[str, dict[str, Any]]:
    """Writes a model whose first layer, of full attention, drafts for it."""

    def damp(model: Any) -> None:
        for layer in model.model.layers[1:]:
            layer.post_attention_layernorm.weight.data.fill_(-0.98)  # of which it takes 1 + w
            layer.post_feedforward_layernorm.weight.data.fill_(-0.98)

    kinds = ["full_attention", "sliding_attention"]
    model = tiny_models.build("gemma3", directory, change=damp, layer_types=kinds * 2)
    draft = directory / "draft"
    AutoModelForCausalLM.from_pretrained(
        model, num_hidden_layers=1, layer_types=kinds[:1]
    ).save_pretrained(draft)
    return str(model), speculation("draft_model", draft)


def beside_repeating(
    directory: Path, family: str, changes: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Writes a model, and a Llama of one layer, which mostly guesses that a token comes again.

    Random models do repeat tokens.
    """

    def fill_padding(model: Any) -> None:
        """Changes the padding token, since vLLM's Gemma 3n makes NaN of an embedding of zeros."""
        model.model.embed_tokens.weight.data[2] = model.model.embed_tokens.weight[3].flip(0)

    def damp(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_(0.1)

    model = tiny_models.build(family, directory, change=fill_padding, **changes)
    shape = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    draft = tiny_models.build("llama", directory / "draft", change=damp, **shape)
    return str(model), speculation("draft_model", draft)


def damp_later_layers(model: Any) -> None:
    """Has all layers but the first change little, so that it says much of what they all do."""
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.mul_(0.02)
        layer.mlp.down_proj.weight.data.mul_(0.02)


def first_layer(model: Path, draft: Path) -> None:
    """Writes the model without its later layers."""
    AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=1).save_pretrained(draft)


def eagle_head(model: Path, draft: Path) -> None:
    """Writes a layer that passes on most of what it reads: the hidden state before its token.

    So it guesses that tokens come again, unless what it attends to says otherwise.
    """
    size = write_config(model, draft)
    weights = weights_of_first_layer(model, "layers.0.")
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
    save_file(weights, draft / "model.safetensors")


def eagle3_head(model: Path, draft: Path) -> None:
    """Writes a layer that guesses the same from the states before the model's last layer."""
    size = write_config(model, draft, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    weights = weights_of_first_layer(model, "midlayer.")
    for name in ("q_proj", "k_proj", "v_proj"):  # which also read the token
        key = f"midlayer.self_attn.{name}.weight"
        weights[key] = torch.cat([weights[key], weights[key]], dim=1)
    weights["fc.weight"] = torch.cat([torch.zeros(size, 2 * size), torch.eye(size)], dim=1)
    for name in ("norm", "midlayer.hidden_norm"):
        weights[f"{name}.weight"] = torch.ones(size)
    save_file(weights, draft / "model.safetensors")


def with_mtp_layer(directory: Path) -> Path:
    """Writes a model with an MTP layer, which guesses the same; its other layers are Qwen2's."""
    model = tiny_models.build("qwen2", directory, change=damp_later_layers)
    own = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    size = write_config(model, model, **own, num_hidden_layers=3)
    prefix = "model.mtp_layers.0."
    weights = load_file(model / "model.safetensors") | weights_of_first_layer(model, prefix)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(size)
    weights[f"{prefix}input_proj.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def with_latent_mtp_layer(directory: Path) -> Path:
    """Writes a model whose layers, and the MTP layer that guesses the same, have latent rows."""
    changes: dict[str, Any] = {"model_type": "deepseek_v3", "first_k_dense_replace": 4}
    model = tiny_models.build("deepseek_v2", directory, change=damp_later_layers, **changes)
    config = json.loads((model / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    size, prefix = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    weights = load_file(model / "model.safetensors")
    weights |= weights_of_first_layer(model, prefix) | {
        f"{prefix}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{prefix}shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{prefix}eh_proj.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1),
    }
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{prefix}{name}.weight"] = torch.ones(size)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def write_config(model: Path, draft: Path, **changes: object) -> int:
    """Writes a model's configuration with changes, of one layer; returns its hidden size."""
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": 1, **changes}
    (draft / "config.json").write_text(json.dumps(config))
    return int(config["hidden_size"])


def weights_of_first_layer(model: Path, prefix: str) -> dict[str, Any]:
    """Returns the weights of a model's first layer, so that it changes little of what it reads."""
    return {
        prefix + name.partition(".layers.0.")[2]: (
            weight * (0.25 if "o_proj" in name or "down" in name else 1)
        )
        for name, weight in load_file(model / "model.safetensors").items()
        if ".layers.0." in name
    }
