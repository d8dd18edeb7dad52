from __future__ import annotations

import pytest
from transformers import LlamaConfig


@pytest.fixture(scope="session")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config of Llama 3.1 8B, and nothing else of it."""
    folder = tmp_path_factory.mktemp("llama-8b")
    LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return str(folder)
