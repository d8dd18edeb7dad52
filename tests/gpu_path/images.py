"""A tiny Gemma 3 that sees images, its requests, and what stands in for torchvision beside it.

vLLM's module of Gemma 3 imports torchvision for a type alone. Its wheels for CUDA break beside the
CPU build of torch, and Transformers then takes its own image processor, made of PIL.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.tiny_models import COMMON, FAMILIES, VOCABULARY

WORDS = (
    "<image_soft_token>",
    "<start_of_image>",
    "<end_of_image>",
    "\n",
    "\n\n",
    "\n" * 3,
    "\n" * 4,
)
IMAGE, START, END, _, LINES, *_ = range(VOCABULARY - len(WORDS), VOCABULARY)
SIZE, PATCH = 56, 14
TOKENS = (SIZE // PATCH) ** 2  # of an image
PLACE = [LINES, START, *[IMAGE] * TOKENS, END, LINES]  # that the processor gives it in a prompt


def without_torchvision(report: dict[str, Any]) -> None:
    """Has vLLM find a torchvision of no content, and look at models in this process."""
    from transformers.utils import is_torchvision_available
    from vllm.model_executor.models import registry

    assert not is_torchvision_available()  # which Transformers remembers
    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        sys.modules[f"torchvision{name}"] = ModuleType(f"torchvision{name}")
    sys.modules["torchvision.transforms.v2"].functional = None
    registry._run_in_subprocess = lambda look: look()


def build(directory: Path, seed: int = 0) -> Path:
    """Writes a random Gemma 3 for images, with its processor, and returns its directory."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3Processor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": SIZE, "patch_size": PATCH}
    config = Gemma3Config(
        text_config={**COMMON, **FAMILIES["gemma3"]},
        vision_config={**vision, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=TOKENS,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    torch.manual_seed(seed)
    model = Gemma3ForConditionalGeneration(config).to(torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data.mul_(8)
        if name.endswith(("v_proj.weight", "o_proj.weight", "embed_tokens.weight")):
            parameter.data.mul_(4)
        if name.endswith("mm_input_projection_weight"):
            parameter.data.normal_(std=0.1)
    target = directory / "gemma3-images"
    model.save_pretrained(target)
    _name_as_published(target / "model.safetensors")
    words = {f"w{i}": i for i in range(IMAGE)} | {word: IMAGE + i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in WORDS])
    image, start, end = WORDS[:3]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="w0",
        eos_token="w1",
        pad_token="w2",
        unk_token="w3",
        extra_special_tokens={"image_token": image, "boi_token": start, "eoi_token": end},
    )
    processor = Gemma3ImageProcessorPil(size={"height": SIZE, "width": SIZE})
    Gemma3Processor(processor, fast, image_seq_length=TOKENS).save_pretrained(target)
    return target


def _name_as_published(path: Path) -> None:
    """Names the vision tower's weights as published models, and vLLM, do."""
    name, published = "vision_tower.", "vision_tower.vision_model."
    weights = {key.replace(name, published): value for key, value in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


def draw(path: Path, seed: int) -> str:
    """Writes an image of noise, in blocks as large as patches, and returns its path."""
    numbers = np.random.default_rng(seed).integers(0, 256, (SIZE // PATCH, SIZE // PATCH, 3))
    pixels = numbers.astype(np.uint8).repeat(PATCH, 0).repeat(PATCH, 1)
    Image.fromarray(pixels).save(path)
    return str(path)
