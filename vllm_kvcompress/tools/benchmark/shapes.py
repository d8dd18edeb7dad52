"""Models of a given shape with vLLM's dummy weights, on which times and memory do not depend."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.tools.dtypes import fast_dtype

VOCABULARY = 1024


@dataclass(frozen=True)
class ModelShape:
    """A Llama's shape. The default is small in parameters and heavy in KV cache.

    Attributes:
        layers, hidden, heads, kv_heads, head_size: as in a model's configuration.
        dtype: of weights and cache; by default one that this machine computes fast.
    """

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = field(default_factory=fast_dtype)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `layers=4,hidden=512`; what is not named keeps its default.

        Raises:
            ConfigError: an unknown name, or not a number.
        """
        known = [each.name for each in fields(cls)]
        values: dict[str, int | str] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in known or not (name == "dtype" or value.isdecimal()):
                raise ConfigError(
                    f'shape "{part}": expected NAME=NUMBER with one of {", ".join(known)}, such '
                    "as layers=4."
                )
            values[name] = value if name == "dtype" else int(value)
        return cls(**values)  # type: ignore[arg-type]

    @property
    def bytes_per_token(self) -> int:
        """KV cache bytes per token."""
        width = 4 if self.dtype == "float32" else 2
        return 2 * self.layers * self.kv_heads * self.head_size * width

    def write(self, directory: Path, longest: int) -> None:
        """Writes the configuration of such a model, without weights and tokenizer."""
        from transformers import LlamaConfig

        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=VOCABULARY,
            max_position_embeddings=longest,
            hidden_size=self.hidden,
            intermediate_size=7 * self.hidden // 2,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_size,
            tie_word_embeddings=True,
        ).save_pretrained(directory)
