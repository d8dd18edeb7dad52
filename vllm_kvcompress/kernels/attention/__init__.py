"""Attention over pages, with a bias for each entry and the log-sum-exp."""

from vllm_kvcompress.kernels.attention import reference
from vllm_kvcompress.kernels.dispatch import by_device

attention_with_lse = reference.attention_with_lse
decode_attention = by_device("attention.decode_triton")(reference.decode_attention)
decode_rows = by_device("attention.decode_triton")(reference.decode_rows)
prefill_attention = by_device("attention.prefill_triton")(reference.prefill_attention)
sum_tiles = by_device("attention.shares_triton")(reference.sum_tiles)
